"""Diffusion over trajectories of states and actions (Diffuser, Janner et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rl_lab.components.actions import ActionCodec
from rl_lab.components.diffusion.averaging import AveragedModel
from rl_lab.components.diffusion.guidance import Guidance, Inpainting
from rl_lab.components.diffusion.limits import LimitsNormalizer
from rl_lab.components.diffusion.model import DiffusionModel, Sampler
from rl_lab.components.diffusion.networks import make_denoiser
from rl_lab.components.diffusion.schedule import NoiseSchedule
from rl_lab.components.observations import ObservationVector
from rl_lab.components.spaces import SpecLike, observation_specs
from rl_lab.errors import ConfigError, nearest
from rl_lab.records import OBSERVATION_PREFIX
from rl_lab.specs import ActionSpec

SEEN = 2048  # states of the data that are kept for pictures


class TrajectoryModel(nn.Module):
    """p(τ) over rows τ_i = (a_i, s_i) that lie `stride` env steps apart, all in [-1, 1]; actions stand first.

    A state is the vectors of `state_keys`, one after the other. With `goal_key` the last state is the goal, which that
    key of the observation has: it takes the state's first entries, and the others, velocities, are 0 there. What is
    known of a plan is put in its place at every level of noise (inpainting): the first state, and the goal.
    """

    seen: Tensor
    seen_count: Tensor

    def __init__(
        self,
        *,
        observation: Mapping[str, SpecLike],
        action: ActionSpec | Mapping[str, Any],
        state_keys: Sequence[str] | None,  # None: all vectors but the goal
        goal_key: str | None,
        horizon: int,  # rows of a trajectory
        stride: int,  # env steps from row to row
        network: str,  # unet | transformer | mlp
        network_settings: Mapping[str, Any],
        levels: int,  # of noise
        prediction: str,  # x0 | epsilon | v
        action_weight: float,  # of the first action in the loss: the one that may be executed
        max_decay: float,  # of the averaged weights
    ) -> None:
        super().__init__()
        if horizon < 2 or stride < 1:
            raise ConfigError(f"horizon={horizon}, stride={stride}: expected at least 2 rows and 1 env step.")
        specs = observation_specs(observation)
        vectors = [key for key, spec in specs.items() if spec.kind == "vector"]
        keys = [key for key in vectors if key != goal_key] if state_keys is None else list(state_keys)
        for key in [*keys, *([goal_key] if goal_key else [])]:
            if key not in vectors:
                raise ConfigError(f"'{key}' is not a vector of the observation.{nearest(key, vectors)}")
        self.state = ObservationVector({key: specs[key] for key in keys})
        self.goal = ObservationVector({goal_key: specs[goal_key]}) if goal_key else None
        self.codec = ActionCodec(action)
        self.horizon, self.stride, self.action_weight = horizon, stride, action_weight
        self.action_size, self.state_size = self.codec.encoded_size, self.state.size
        if self.goal is not None and self.goal.size > self.state_size:
            raise ConfigError(f"The goal has {self.goal.size} entries and a state only {self.state_size}.")
        self.normalizer = LimitsNormalizer(self.dim)
        denoiser = make_denoiser(network, dim=self.dim, horizon=horizon, condition=0, **network_settings)
        self.model = DiffusionModel(network=denoiser, schedule=NoiseSchedule(levels=levels), prediction=prediction)
        self.average = AveragedModel(self.model, max_decay=max_decay)
        self.register_buffer("seen", torch.zeros(SEEN, self.state_size))
        self.register_buffer("seen_count", torch.zeros((), dtype=torch.int64))

    @property
    def dim(self) -> int:
        return self.action_size + self.state_size

    @property
    def span(self) -> int:
        """Env steps from the first row to the last."""
        return (self.horizon - 1) * self.stride

    # Data -------------------------------------------------------------------------------------------------------------

    def fit(self, statistics: Mapping[str, Any]) -> None:
        """Take the limits of a dataset (`FieldStatistics` by field); those of encoded actions are known."""
        if self.normalizer.fitted:
            return
        ones = torch.ones(self.action_size)
        low, high = [0.0 * ones if self.codec.spec.kind == "discrete" else -ones], [ones]
        for key in self.state.specs:
            field = statistics[OBSERVATION_PREFIX + key]
            low.append(torch.from_numpy(field.low).flatten().float())
            high.append(torch.from_numpy(field.high).flatten().float())
        device = self.normalizer.low.device
        self.normalizer.fit(torch.cat(low).to(device), torch.cat(high).to(device))

    def rows(self, observation: Mapping[str, Tensor], action: Tensor) -> Float[Tensor, "batch horizon dim"]:
        """Trajectories out of sequences of consecutive records, normalised."""
        states, actions = self.state.join(observation), self.codec.encode(action)
        return self.normalizer(torch.cat([actions, states], -1)[:, : self.span + 1 : self.stride])

    def remember(self, states: Float[Tensor, "batch state"]) -> None:
        """Keep some states of the data, until there are enough."""
        start = int(self.seen_count)
        count = min(len(states), SEEN - start)
        self.seen[start : start + count] = states[:count]
        self.seen_count.add_(count)

    # What is known ----------------------------------------------------------------------------------------------------

    def known(self) -> Bool[Tensor, "horizon dim"]:
        """The entries of a plan that are known beforehand."""
        known = torch.zeros(self.horizon, self.dim, dtype=torch.bool, device=self.seen.device)
        known[0, self.action_size :] = True
        if self.goal is not None:
            known[-1, self.action_size :] = True
        return known

    def inpainting(self, observation: Mapping[str, Tensor]) -> Inpainting:
        """The first state, and the goal at rest, in their places; observations are [row, …]."""
        state = self.state.join(observation)
        values = state.new_zeros(len(state), self.horizon, self.dim)
        values[:, 0, self.action_size :] = state
        if self.goal is not None:
            goal = self.goal.join(observation)
            values[:, -1, self.action_size : self.action_size + goal.shape[-1]] = goal
        return Inpainting(self.normalizer(values), self.known())

    # Learning and drawing ---------------------------------------------------------------------------------------------

    def loss(self, rows: Float[Tensor, "batch horizon dim"]) -> Float[Tensor, ""]:
        """The weighted denoising error; what is known does not count."""
        weight = torch.ones(self.horizon, self.dim, device=rows.device)
        weight[0, : self.action_size] = self.action_weight
        return self.model.loss(rows, weight=weight, known=self.known())

    def draw(
        self,
        guidance: Guidance,
        count: int,
        *,
        sampler: Sampler,
        steps: int | None,
        temperature: float,
    ) -> Float[Tensor, "count horizon dim"]:
        """Trajectories by the averaged weights, normalised."""
        return self.average.model.sample(
            (count, self.horizon, self.dim), sampler=sampler, steps=steps, spacing="trailing", guidance=guidance,
            temperature=temperature,
        )  # fmt: skip

    def after_update(self) -> None:
        self.average.update(self.model)
