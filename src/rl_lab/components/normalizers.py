"""Observations and rewards brought to unit scale by running statistics, which are saved with the agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rl_lab.components.spaces import SpecLike, observation_specs
from rl_lab.nn.normalizers import RunningMeanStd
from rl_lab.records import OBSERVATION_PREFIX


class ObservationNormalizer(nn.Module):
    """Every vector key minus its mean, over its deviation, clipped. Images and discrete keys pass unchanged."""

    def __init__(self, *, observation: Mapping[str, SpecLike], clip: float) -> None:
        super().__init__()
        self.clip = clip
        specs = observation_specs(observation)
        self.keys = [key for key, spec in specs.items() if spec.kind == "vector"]
        self.statistics = nn.ModuleList(RunningMeanStd(specs[key].shape) for key in self.keys)

    def fit(self, statistics: Mapping[str, Any]) -> None:
        """Take over the statistics of a dataset's fields (`FieldStatistics` by name)."""
        for key, running in zip(self.keys, self.statistics, strict=True):
            field = statistics[OBSERVATION_PREFIX + key]
            running.mean.copy_(torch.from_numpy(field.mean))  # type: ignore[operator]
            running.variance.copy_(torch.from_numpy(field.std**2))  # type: ignore[operator]
            running.count.fill_(field.count)  # type: ignore[operator]

    def update(self, observation: Mapping[str, Tensor]) -> None:
        for key, statistics in zip(self.keys, self.statistics, strict=True):
            statistics.update(observation[key].float())  # type: ignore[operator]

    def forward(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        normal = dict(observation)
        for key, statistics in zip(self.keys, self.statistics, strict=True):
            normal[key] = statistics(normal[key].float()).clamp(-self.clip, self.clip)
        return normal


class RewardNormalizer(nn.Module):
    """Rewards over the deviation of the discounted return so far, clipped. The mean is left in."""

    def __init__(self, *, discount: float, clip: float) -> None:
        super().__init__()
        self.discount, self.clip = discount, clip
        self.statistics = RunningMeanStd(())

    def track(
        self,
        reward: Float[Tensor, "time env"],
        is_last: Bool[Tensor, "time env"],
        before: Float[Tensor, " env"],
    ) -> Float[Tensor, " env"]:
        """Take in the returns of a rollout; `before` is what `track` returned for the rollout that came before it."""
        going_on = (~is_last).to(reward.dtype) * self.discount
        returns, current = [], before
        for reward_t, going_on_t in zip(reward.unbind(0), going_on.unbind(0), strict=True):
            returns.append(current + reward_t)
            current = returns[-1] * going_on_t
        self.statistics.update(torch.stack(returns))
        return current

    def forward(self, reward: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        scale = torch.rsqrt(self.statistics.variance + self.statistics.eps)
        return (reward * scale).clamp(-self.clip, self.clip)
