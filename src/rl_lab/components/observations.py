"""Observations as one flat vector."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.spaces import SpecLike, observation_specs, split_keys
from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import one_hot
from rl_lab.specs import ObservationSpec


def flat_observation(value: Tensor, spec: ObservationSpec) -> Float[Tensor, "*lead size"]:
    """One key [*lead, *shape] as [*lead, encoded_size]: numbers as they are, discrete entries as one-hots."""
    lead = value.shape[: value.ndim - len(spec.shape)]
    if spec.kind == "discrete":
        parts = value.reshape(*lead, len(spec.classes)).unbind(-1)
        return torch.cat([one_hot(part, size) for part, size in zip(parts, spec.classes, strict=True)], -1)
    return value.reshape(*lead, spec.encoded_size).float()


class ObservationVector:
    """All keys of an observation, in sorted order, end to end; and back. For observations without images."""

    def __init__(self, observation: Mapping[str, SpecLike]) -> None:
        self.specs = observation_specs(observation)
        images, _ = split_keys(self.specs)
        if images:
            raise ConfigError(
                f"observation.{next(iter(images))} is an image: a model of observations needs vectors. Use "
                "environment.observation=state, or a latent model such as +experiment=dreamer_v3."
            )
        self.sizes = {key: spec.encoded_size for key, spec in self.specs.items()}
        self.size = sum(self.sizes.values())

    def join(self, observation: Mapping[str, Tensor]) -> Float[Tensor, "*lead size"]:
        parts = [flat_observation(observation[key], spec) for key, spec in self.specs.items()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def split(self, vector: Float[Tensor, "*lead size"]) -> dict[str, Tensor]:
        """Each key's part in its own shape; discrete keys as their (predicted) one-hots."""
        parts = dict(zip(self.specs, vector.split(list(self.sizes.values()), -1), strict=True))
        return {
            key: part if self.specs[key].kind == "discrete" else part.reshape(*part.shape[:-1], *self.specs[key].shape)
            for key, part in parts.items()
        }
