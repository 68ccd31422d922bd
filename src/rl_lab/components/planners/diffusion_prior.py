"""A prior over action sequences that is learned: a diffusion model, conditioned on the observation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_lab.components.acting import AgentState, LearningController, Mode
from rl_lab.components.actions import ActionCodec
from rl_lab.components.diffusion.averaging import AveragedModel
from rl_lab.components.diffusion.model import DiffusionModel
from rl_lab.components.diffusion.networks import make_denoiser
from rl_lab.components.diffusion.schedule import NoiseSchedule
from rl_lab.components.encoders import MultiKeyEncoder
from rl_lab.components.normalizers import ObservationNormalizer
from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.plan_priors import LearnedPrior
from rl_lab.components.spaces import SpecLike
from rl_lab.errors import DataError
from rl_lab.metrics.values import Metrics
from rl_lab.records import Batch, BatchSpec, Observation, SequenceBatch
from rl_lab.specs import ActionSpec


class DiffusionPrior(LearningController):
    """p0(a_0 … a_{H-1} | o_0): what the data did over `horizon` steps after an observation.

    It learns beside any workflow, from that workflow's sequences, and the diffusion planner steers it. Alone it acts by
    drawing a sequence and taking its first action. Plans are drawn with the moving average of the weights.
    """

    fitted: Tensor  # whether the normaliser's statistics are those of a dataset

    def __init__(
        self,
        *,
        observation: Mapping[str, SpecLike],
        action: ActionSpec | Mapping[str, Any],
        horizon: int,  # actions in a sequence
        network: str,  # mlp | unet | transformer
        network_settings: Mapping[str, Any],  # {units: 256} of an mlp, {widths: [32, 64, 128]} of a unet
        levels: int,  # of noise
        prediction: str,  # epsilon | x0 | v
        act_steps: int,  # of the reverse process where it acts alone; a planner has its own number
        max_decay: float,  # of the averaged weights
        batch_size: int,  # of its own batches, where the workflow has none
        image_encoder: str,
        depth: int,  # of the image encoder
    ) -> None:
        super().__init__()
        self.horizon, self.act_steps, self.batch_size = horizon, act_steps, batch_size
        self.codec, self.layout = ActionCodec(action), ActionLayout.of(action)
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        self.normalizer = ObservationNormalizer(observation=observation, clip=10.0)
        self.encoder = MultiKeyEncoder(
            observation=observation, layers=0, depth=depth, image_encoder=image_encoder, use_symlog=False
        )
        denoiser = make_denoiser(
            network, dim=self.layout.size, horizon=horizon, condition=self.encoder.output_size, **network_settings
        )
        self.model = DiffusionModel(network=denoiser, schedule=NoiseSchedule(levels=levels), prediction=prediction)
        self.average = AveragedModel(self.model, max_decay=max_decay)

    # Drawing ----------------------------------------------------------------------------------------------------------

    def given(self, observation: Mapping[str, Tensor], *, candidates: int, steps: int) -> LearnedPrior:
        """The prior after these observations [env, ...]; its rows are environments × candidates."""
        # Outside of inference mode, so that guidance can differentiate what is computed with the condition.
        with torch.inference_mode(False), torch.no_grad():
            condition = self._condition(observation).repeat_interleave(candidates, 0)
        return LearnedPrior(self.layout, self.average.model, condition, horizon=self.horizon, steps=steps)

    @torch.no_grad()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        device = self.model.schedule.betas.device
        condition = self._condition({key: torch.as_tensor(value, device=device) for key, value in observation.items()})
        shape = (len(condition), self.horizon, self.layout.size)
        drawn = self.average.model.sample(shape, condition, steps=self.act_steps, spacing="trailing")
        action: np.ndarray = self.codec.decode(self.layout.valid(drawn[:, 0])).cpu().numpy()
        return action, state

    def _condition(self, observation: Mapping[str, Tensor]) -> Float[Tensor, "row condition"]:
        return self.encoder(self.normalizer(observation))

    # Learning ---------------------------------------------------------------------------------------------------------

    def batch_spec(self, device: str) -> BatchSpec:
        return BatchSpec(self.batch_size, self.horizon, device=device)

    def use_statistics(self, statistics: Mapping[str, Any]) -> None:
        if not self.fitted:
            self.normalizer.fit(statistics)
            self.fitted.fill_(True)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """The denoising error of the sequences from the batch's first records on. What follows the end of an episode
        does not count."""
        if not isinstance(batch, SequenceBatch) or batch.action.shape[1] < self.horizon:
            raise DataError(
                f"The diffusion prior learns sequences of {self.horizon} actions, and the workflow's batches have "
                "fewer in a row. Use a data source of sequences and a longer workflow.sequence_length, or a shorter "
                "horizon of the prior."
            )
        observation = {key: value[:, 0] for key, value in batch.observation.items()}
        if not self.fitted:
            self.normalizer.update(observation)
        actions, taken = self.codec.encode(batch.action[:, : self.horizon]), self._taken(batch)
        loss = self.model.loss(self._centred(actions), self._condition(observation), weight=taken.float().unsqueeze(-1))
        return loss, {}

    def _taken(self, batch: SequenceBatch) -> Bool[Tensor, "batch horizon"]:
        """Which actions were taken in the episode of the first record."""
        return ~batch.is_last[:, : self.horizon].cummax(1).values

    def _centred(self, actions: Float[Tensor, "*lead action"]) -> Float[Tensor, "*lead action"]:
        """One-hots at ±1; continuous entries are in [-1, 1] already."""
        count: int = self.layout.continuous
        return torch.cat([actions[..., :count], 2.0 * actions[..., count:] - 1.0], -1)

    def after_update(self) -> None:
        self.average.update(self.model)
