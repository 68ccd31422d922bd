"""Reward of a transition, and the probability that the episode goes on after it: known or learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from rl_lab.components.observations import ObservationVector
from rl_lab.components.spaces import SpecLike, action_spec
from rl_lab.errors import ConfigError
from rl_lab.nn.member_mlp import MemberMLP
from rl_lab.nn.normalizers import RunningMeanStd
from rl_lab.simulation.analytic import make_task
from rl_lab.specs import ActionSpec


class Outcome(NamedTuple):
    reward: Float[Tensor, " rows"]
    continuation: Float[Tensor, " rows"]  # probability that the episode goes on


class OutcomeModel(nn.Module, ABC):
    """Reward and continuation of transitions between flat observations."""

    @abstractmethod
    def forward(
        self,
        observation: Float[Tensor, "rows observation"],
        action: Float[Tensor, "rows action"],
        following: Float[Tensor, "rows observation"],
    ) -> Outcome: ...

    def losses(
        self,
        observation: Float[Tensor, "rows observation"],
        action: Float[Tensor, "rows action"],
        following: Float[Tensor, "rows observation"],
        reward: Float[Tensor, " rows"],
        is_terminal: Bool[Tensor, " rows"],
        valid: Bool[Tensor, " rows"],
    ) -> dict[str, Tensor]:
        """Terms to learn from; none where nothing is learned."""
        return {}


class KnownOutcome(OutcomeModel):
    """The task's own reward and end, computed from predicted observations. `shaping` as in the analytic simulator."""

    def __init__(
        self,
        *,
        environment: str,
        kwargs: Mapping[str, Any],
        normalize_actions: bool,
        action_repeat: int | Literal["auto"],
        shaping: float,
    ) -> None:
        super().__init__()
        if action_repeat not in ("auto", 1):
            raise ConfigError(
                f"environment.action_repeat={action_repeat}: the known reward is that of single frames. Use "
                "action_repeat=1, or learn it: components/outcomes@components.outcome=learned."
            )
        self.task, self.shaping = (
            make_task(environment=environment, kwargs=kwargs, normalize_actions=normalize_actions),
            shaping,
        )

    def forward(
        self,
        observation: Float[Tensor, "rows observation"],
        action: Float[Tensor, "rows action"],
        following: Float[Tensor, "rows observation"],
    ) -> Outcome:
        if observation.shape[-1] != self.task.observation_size:
            raise ConfigError(
                f"The known rewards are of observations of {self.task.observation_size} numbers, the agent sees "
                f"{observation.shape[-1]}. Use environment.observation=state and environment.frame_stack=1."
            )
        before, after = self.task.decode(observation), self.task.decode(following)
        reward = self.task.reward(before, action, after)
        if self.shaping:
            reward = reward - self.shaping * self.task.distance(after)
        return Outcome(reward, (~self.task.terminated(after)).to(reward.dtype))


class LearnedOutcome(OutcomeModel):
    """One network for both, from the transition at unit scale."""

    def __init__(
        self,
        *,
        observation: Mapping[str, SpecLike],
        action: ActionSpec | Mapping[str, object],
        units: int,
        layers: int,
    ) -> None:
        super().__init__()
        size, actions = ObservationVector(observation).size, action_spec(action).encoded_size
        self.network = MemberMLP(1, 2 * size + actions, 2, units=units, layers=layers)
        self.inputs, self.rewards = RunningMeanStd((2 * size + actions,), eps=1e-6), RunningMeanStd((), eps=1e-6)

    def forward(
        self,
        observation: Float[Tensor, "rows observation"],
        action: Float[Tensor, "rows action"],
        following: Float[Tensor, "rows observation"],
    ) -> Outcome:
        reward, logit = self._outputs(torch.cat([observation, action, following], -1))
        scale = torch.sqrt(self.rewards.variance + self.rewards.eps)
        return Outcome(self.rewards.mean + reward * scale, logit.sigmoid())

    def _outputs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        reward, logit = self.network(self.inputs(inputs).clamp(-10.0, 10.0)[None])[0].unbind(-1)
        return reward, logit

    def losses(
        self,
        observation: Float[Tensor, "rows observation"],
        action: Float[Tensor, "rows action"],
        following: Float[Tensor, "rows observation"],
        reward: Float[Tensor, " rows"],
        is_terminal: Bool[Tensor, " rows"],
        valid: Bool[Tensor, " rows"],
    ) -> dict[str, Tensor]:
        weight = valid.to(reward.dtype)
        inputs = torch.cat([observation, action, following], -1)
        self.inputs.update(inputs, weight)
        self.rewards.update(reward, weight)
        predicted, logit = self._outputs(inputs)
        total = weight.sum().clamp(min=1.0)
        ends = F.binary_cross_entropy_with_logits(logit, 1.0 - is_terminal.to(logit.dtype), weight, reduction="sum")
        error = (predicted - self.rewards(reward)).square()
        return {"reward": (weight * error).sum() / total, "continue": ends / total}
