"""MuZero's prediction f: the policy and the value of a latent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.muzero.layers import MLP, PlaneHead, ResidualBlock
from rl_lab.components.spaces import action_spec
from rl_lab.nn.distributions import MultiCategorical
from rl_lab.nn.support import Support
from rl_lab.specs import ActionSpec

HALF_LOG_TWO_PI = 0.9189385332046727
EDGE = 1.0 - 1e-6  # continuous actions are taken as if they were no further out
INITIAL_RAW_STD = 0.5413  # softplus of it is 1


class PredictionOutput(NamedTuple):
    """Raw outputs."""

    policy: Float[Tensor, "rows params"]
    value: Float[Tensor, "rows bins"]


class CategoricalPolicy:
    """Discrete actions: one categorical for each component, independent of each other."""

    def __init__(self, spec: ActionSpec) -> None:
        self.classes, self.outputs = spec.classes, spec.encoded_size

    def sample(self, params: Float[Tensor, "rows params"], count: int) -> Float[Tensor, "rows count action"]:
        wide = params[:, None].expand(-1, count, -1)
        return MultiCategorical(wide, self.classes, unimix=0.0).sample()

    def log_prob(
        self, params: Float[Tensor, "*lead params"], action: Float[Tensor, "*lead action"]
    ) -> Float[Tensor, "*lead"]:
        return MultiCategorical(params, self.classes, unimix=0.0).log_prob(action)

    def entropy(self, params: Float[Tensor, "*lead params"]) -> Float[Tensor, "*lead"]:
        return MultiCategorical(params, self.classes, unimix=0.0).entropy()


class SquashedNormalPolicy:
    """Continuous actions: tanh of a normal; its deviation is at least `min_std` and begins near 1."""

    def __init__(self, spec: ActionSpec, *, min_std: float = 0.1) -> None:
        self.outputs, self.min_std = 2 * spec.encoded_size, min_std

    def _normal(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = params.chunk(2, -1)
        return mean, F.softplus(raw + INITIAL_RAW_STD) + self.min_std

    def sample(self, params: Float[Tensor, "rows params"], count: int) -> Float[Tensor, "rows count action"]:
        mean, std = (part[:, None] for part in self._normal(params))
        return torch.tanh(mean + std * torch.randn(len(params), count, mean.shape[-1], device=params.device))

    def log_prob(
        self, params: Float[Tensor, "*lead params"], action: Float[Tensor, "*lead action"]
    ) -> Float[Tensor, "*lead"]:
        mean, std = self._normal(params)
        action = action.clamp(-EDGE, EDGE)
        normal = -0.5 * ((torch.atanh(action) - mean) / std).square() - std.log() - HALF_LOG_TWO_PI
        return (normal - torch.log(1.0 - action.square())).sum(-1)

    def entropy(self, params: Float[Tensor, "*lead params"]) -> Float[Tensor, "*lead"]:
        """Entropy of the normal distribution before tanh."""
        return (self._normal(params)[1].log() + 0.5 + HALF_LOG_TWO_PI).sum(-1)


class PolicyValueNetwork(nn.Module):
    """Layers that both share, then a head for each whose last layer begins at 0."""

    def __init__(
        self,
        *,
        latent_shape: Sequence[int],
        action: ActionSpec | Mapping[str, Any],
        units: int = 128,
        layers: int = 1,  # shared ones
        norm: bool = True,
        blocks: int = 1,
        head_units: int = 32,
        bins: int,
        limit: float,  # of the transformed value
    ) -> None:
        super().__init__()
        spec = action_spec(action)
        self.policy: CategoricalPolicy | SquashedNormalPolicy
        self.policy = CategoricalPolicy(spec) if spec.kind == "discrete" else SquashedNormalPolicy(spec)
        self.has_logits = len(spec.classes) == 1
        self.support = Support(bins=bins, limit=limit)
        sizes = self.policy.outputs, bins
        size = latent_shape[0]
        if len(latent_shape) == 3:
            self.trunk: nn.Module = nn.Sequential(*(ResidualBlock(size) for _ in range(blocks)))
            places = latent_shape[1] * latent_shape[2]
            heads: list[nn.Module] = [PlaneHead(size, places, output, units=head_units) for output in sizes]
        else:
            wide = [size, *[units] * layers]
            self.trunk = nn.Sequential(*list(MLP([*wide, 1], norm=norm))[:-1])
            heads = [MLP([wide[-1], head_units, output], norm=norm, zero_output=True) for output in sizes]
        self.policy_head, self.value_head = heads

    def forward(self, latent: Float[Tensor, rows * latent]) -> PredictionOutput:
        features = self.trunk(latent)
        return PredictionOutput(self.policy_head(features).float(), self.value_head(features).float())
