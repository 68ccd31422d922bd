"""Diffusion Policy (Chi et al., 2023): a chunk of actions, drawn by denoising, given the last observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rl_lab.components.acting import AgentState, LearningController, Mode
from rl_lab.components.actions import ActionCodec
from rl_lab.components.diffusion import AveragedModel, DiffusionModel, Guidance, NoiseSchedule, make_denoiser
from rl_lab.components.diffusion.model import SAMPLERS
from rl_lab.components.diffusion.observation_features import ObservationFeatures
from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.plan_priors import LearnedPrior
from rl_lab.components.spaces import SpecLike
from rl_lab.errors import ConfigError, DataError, nearest
from rl_lab.metrics.values import Metrics
from rl_lab.nn.normalizers import LimitsNormalizer
from rl_lab.records import Batch, BatchSpec, Observation, SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec

HISTORY = "history."  # + key: the last observations, in the agent's memory


class ConditionalModel(nn.Module):
    """p(chunk | observations): the encoder of observations and the diffusion model, which are averaged together."""

    def __init__(self, features: ObservationFeatures, diffusion: DiffusionModel) -> None:
        super().__init__()
        self.features, self.diffusion = features, diffusion

    def condition(self, observation: Mapping[str, Tensor]) -> Float[Tensor, "batch condition"]:
        return self.features(observation).flatten(1)


class Chunks(NamedTuple):
    """Training data of the denoiser: observations to condition on, and the action chunks that followed them."""

    observation: dict[str, Tensor]  # each [batch, observation_horizon, ...]
    action: Float[Tensor, "batch prediction_horizon action"]  # encoded
    taken: Float[Tensor, " batch"]  # 0 where no decision is made at the present: it is the last record of an episode


class DiffusionPolicy(LearningController):
    """Draws the actions of times t - To + 1 … t - To + Tp, given the observations of the last To times, and carries out
    Ta of them: those of t … t + Ta - 1. Then it draws anew.

    The memory of an episode is the last observations, the chunk, and how many decisions were made. Entries of
    observations and actions are brought to [-1, 1] by their limits in the data, which are saved with the policy.
    Actions are drawn with the moving average of the weights.
    """

    fitted: Tensor  # whether the limits are those of a dataset

    def __init__(
        self,
        *,
        observation: Mapping[str, SpecLike],
        action: ActionSpec | Mapping[str, Any],
        observation_horizon: int,  # To
        prediction_horizon: int,  # Tp
        action_horizon: int,  # Ta
        network: str,  # unet | transformer | mlp
        unet: Mapping[str, Any],  # settings of each network; `network` picks one
        transformer: Mapping[str, Any],
        mlp: Mapping[str, Any],
        levels: int,  # of noise
        schedule: str,  # squared_cosine | linear
        prediction: str,  # epsilon | x0 | v
        sampler: str,  # ddpm | ddim
        sampling_steps: int | None,  # None: one for each level
        decay_power: float,  # of the averaged weights
        max_decay: float,
        crop: int | None,  # of images, in pixels
        keypoints: int,  # of the spatial softmax
        image_features: int,
        image_width: int,  # channels of the first stage of the image network
        batch_size: int,  # of its own batches, where the workflow has none
    ) -> None:
        super().__init__()
        _check_horizons(observation_horizon, prediction_horizon, action_horizon)
        self.observation_horizon, self.prediction_horizon = observation_horizon, prediction_horizon
        self.action_horizon, self.batch_size = action_horizon, batch_size
        if sampler not in SAMPLERS:
            raise ConfigError(f"sampler='{sampler}' does not exist.{nearest(sampler, SAMPLERS)}")
        self.sampler, self.sampling_steps = sampler, sampling_steps
        self.codec, self.layout = ActionCodec(action), ActionLayout.of(action)
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        self.action_limits = LimitsNormalizer((self.codec.encoded_size,))
        if self.codec.spec.kind == "discrete":  # one-hots
            size = self.codec.encoded_size
            self.action_limits.fit(torch.zeros(size), torch.ones(size))
        features = ObservationFeatures(
            observation=observation, crop=crop, keypoints=keypoints, features=image_features, base=image_width
        )
        denoiser = make_denoiser(
            network,
            dim=self.codec.encoded_size,
            horizon=prediction_horizon,
            condition=observation_horizon * features.output_size,
            condition_tokens=observation_horizon,
            **{"unet": unet, "transformer": transformer, "mlp": mlp}.get(network, {}),
        )
        noise = NoiseSchedule(levels=levels, kind=schedule)
        noise.sampling_levels(sampling_steps)  # refuses a number of steps that does not fit
        diffusion = DiffusionModel(network=denoiser, schedule=noise, prediction=prediction)
        self.model = ConditionalModel(features, diffusion)
        self.average = AveragedModel(self.model, power=decay_power, max_decay=max_decay)

    # Acting -----------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.action_limits.low.device

    def initial_state(self, num_envs: int) -> AgentState:
        shape = (num_envs, self.action_horizon, self.codec.encoded_size)
        return {
            "decided": torch.zeros(num_envs, dtype=torch.int64, device=self.device),
            "chunk": torch.zeros(shape, device=self.device),
            **{HISTORY + key: self._blank(num_envs, spec) for key, spec in self.model.features.specs.items()},
        }

    def _blank(self, num_envs: int, spec: ObservationSpec) -> Tensor:
        shape = (num_envs, self.observation_horizon, *spec.shape)
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=self.device)

    @torch.no_grad()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """The chunk's next action; a new chunk where an episode begins or the old one is used up."""
        decided, chunk = state["decided"], state["chunk"]
        history = {}
        for key, value in observation.items():
            seen, past = torch.as_tensor(value, device=self.device), state[HISTORY + key]
            first = (decided == 0).view(-1, *[1] * (past.ndim - 1))
            history[key] = torch.where(first, seen.unsqueeze(1), torch.cat([past[:, 1:], seen.unsqueeze(1)], 1))
        place = decided % self.action_horizon
        due = (place == 0).nonzero().squeeze(-1)
        if len(due):
            drawn = self.draw({key: value[due] for key, value in history.items()})
            start = self.observation_horizon - 1
            chunk = chunk.index_copy(0, due, drawn[:, start : start + self.action_horizon])
        encoded = chunk[torch.arange(len(chunk), device=self.device), place]
        memory = {HISTORY + key: value for key, value in history.items()}
        action: np.ndarray = self.codec.decode(encoded).cpu().numpy()
        return action, {"decided": decided + 1, "chunk": chunk, **memory}

    @torch.no_grad()
    def draw(
        self, history: Mapping[str, Tensor], *, guidance: Guidance | None = None
    ) -> Float[Tensor, "batch prediction_horizon action"]:
        """Whole chunks of encoded actions, given the last observations [batch, observation_horizon, ...]."""
        model = self.average.model
        condition = model.condition(history)
        shape = (len(condition), self.prediction_horizon, self.codec.encoded_size)
        drawn = model.diffusion.sample(
            shape, condition, sampler=self.sampler, steps=self.sampling_steps, guidance=guidance  # type: ignore[arg-type]
        )  # fmt: skip
        return self.actions_of(drawn)

    @property
    def horizon(self) -> int:
        """Actions of a chunk, where it is a planner's prior."""
        return self.prediction_horizon

    def given(self, observation: Mapping[str, Tensor], *, candidates: int, steps: int) -> LearnedPrior:
        """The policy's distribution of action sequences after these observations [env, ...], as the planner's prior."""
        if self.observation_horizon != 1:
            raise ConfigError(
                f"observation_horizon={self.observation_horizon}: a plan begins at the present, so a diffusion policy "
                "that is a planner's prior sees one observation. Set observation_horizon=1."
            )
        model = self.average.model
        # Outside of inference mode, so that guidance can differentiate what is computed with the condition.
        with torch.inference_mode(False), torch.no_grad():
            condition = model.condition({key: value.unsqueeze(1) for key, value in observation.items()})
        return LearnedPrior(
            self.layout, model.diffusion, condition.repeat_interleave(candidates, 0), horizon=self.horizon, steps=steps,
            limits=self.action_limits,
        )  # fmt: skip

    def actions_of(self, normal: Float[Tensor, "*lead action"]) -> Float[Tensor, "*lead action"]:
        """Normalised actions as encoded, valid ones."""
        return self.action_limits.inverse(normal).clamp(-1.0, 1.0)

    # Learning ---------------------------------------------------------------------------------------------------------

    def batch_spec(self, device: str) -> BatchSpec:
        return BatchSpec(self.batch_size, self.prediction_horizon, device=device)

    def use_statistics(self, statistics: Mapping[str, Any]) -> None:
        if self.fitted:
            return
        if self.codec.spec.kind == "continuous":
            field = statistics["action"]
            self.action_limits.fit(*(torch.from_numpy(limit.reshape(-1)) for limit in (field.low, field.high)))
        for model in (self.model, self.average.model):
            model.features.fit(statistics)
        self.fitted.fill_(True)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """E |ε - ε_θ(√ᾱ_k·chunk + √(1-ᾱ_k)·ε, k, observations)|², or the same for x_0 or v."""
        chunks = self.chunks(batch)
        if not self.fitted:
            self.model.features.widen(chunks.observation)
        condition = self.model.condition(chunks.observation)
        weight = chunks.taken / chunks.taken.mean().clamp(min=1e-6)
        return self.model.diffusion.loss(self.action_limits(chunks.action), condition, weight=weight[:, None, None]), {}

    def after_update(self) -> None:
        self.average.update(self.model)

    def chunks(self, batch: Batch) -> Chunks:
        """Observations and actions of the windows. No chunk crosses an episode's end: what lies beyond it is its last
        action again, and what lies before its start is its first observation and action, as when acting."""
        length = self.prediction_horizon
        if not isinstance(batch, SequenceBatch) or batch.action.shape[1] < length:
            raise DataError(
                f"Diffusion Policy learns from windows of {length} records, and the batches have fewer in a row. Use a "
                "data source of sequences and sequences that are long enough, or a shorter prediction_horizon."
            )
        rows, taken = within_episode(
            batch.is_first[:, :length], batch.is_last[:, :length], now=self.observation_horizon - 1
        )
        window, past = torch.arange(len(rows), device=rows.device).unsqueeze(-1), rows[:, : self.observation_horizon]
        observation = {key: value[window, past] for key, value in batch.observation.items()}
        return Chunks(observation, self.codec.encode(batch.action[window, rows]), taken.float())


def within_episode(
    is_first: Bool[Tensor, "batch time"], is_last: Bool[Tensor, "batch time"], *, now: int
) -> tuple[Int[Tensor, "batch time"], Bool[Tensor, " batch"]]:
    """For each place of a window the record that stands for it: the nearest decision of the episode that goes on at
    `now`. Also whether a decision was made there: the last record of an episode has none."""
    time = torch.arange(is_first.shape[1], device=is_first.device)
    # In padded windows the first record of an episode is repeated: the last of them up to now begins the episode.
    begin = torch.where(is_first & (time <= now), time, 0).amax(1, keepdim=True)
    length = is_first.shape[1]
    ends = (is_last & (time >= now)) | (is_first & (time > now))
    end = torch.where(ends, time, length).amin(1, keepdim=True) - 1
    return time.expand_as(is_first).clamp(min=begin).minimum(end.clamp(min=0)), ~is_last[:, now]


def _check_horizons(observation: int, prediction: int, action: int) -> None:
    horizons: Sequence[int] = (observation, prediction, action)
    if min(horizons) < 1 or action > prediction - observation + 1:
        raise ConfigError(
            f"observation_horizon={observation}, prediction_horizon={prediction}, action_horizon={action}: expected at "
            "least 1 of each, and at most prediction_horizon - observation_horizon + 1 actions: those before the "
            "present are over."
        )
