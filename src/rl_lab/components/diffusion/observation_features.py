"""The features that a diffusion policy conditions on: scaled vectors, one-hot vectors, and features of images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.encoders.resnet18 import KeypointResNet
from rl_lab.components.observations import flat_observation
from rl_lab.components.spaces import SpecLike, observation_specs
from rl_lab.nn.normalizers import LimitsNormalizer
from rl_lab.records import OBSERVATION_PREFIX


class ObservationFeatures(nn.Module):
    """Vectors with every entry brought to [-1, 1] by its limits in the data, one-hots, and images through networks of
    their own, side by side."""

    def __init__(
        self, *, observation: Mapping[str, SpecLike], crop: int | None, keypoints: int, features: int, base: int
    ) -> None:
        super().__init__()
        self.specs = observation_specs(observation)
        self.vectors = [key for key, spec in self.specs.items() if spec.kind == "vector"]
        self.images = [key for key, spec in self.specs.items() if spec.kind == "image"]
        self.limits = nn.ModuleList(LimitsNormalizer(self.specs[key].shape) for key in self.vectors)
        networks = []
        for key in self.images:
            height, width, channels = self.specs[key].shape
            networks.append(
                KeypointResNet(
                    height=height, width=width, channels=channels, crop=crop, keypoints=keypoints, features=features,
                    base=base,
                )
            )  # fmt: skip
        self.networks = nn.ModuleList(networks)
        self.output_size = sum(features if spec.kind == "image" else spec.encoded_size for spec in self.specs.values())

    def forward(self, observation: Mapping[str, Tensor]) -> Float[Tensor, "batch time features"]:
        parts = []
        for key, spec in self.specs.items():
            if key in self.images:
                parts.append(self.networks[self.images.index(key)](observation[key]))
            elif key in self.vectors:
                value = self.limits[self.vectors.index(key)](observation[key].float())
                parts.append(value.flatten(2) if value.ndim > 2 else value.unsqueeze(-1))
            else:
                parts.append(flat_observation(observation[key], spec))
        return torch.cat(parts, -1)

    def fit(self, statistics: Mapping[str, Any]) -> None:
        """Take the limits of a dataset's fields (`FieldStatistics` by name)."""
        for key, limits in zip(self.vectors, self.limits, strict=True):
            field = statistics[OBSERVATION_PREFIX + key]
            limits.fit(torch.from_numpy(field.low), torch.from_numpy(field.high))  # type: ignore[operator]

    def widen(self, observation: Mapping[str, Tensor]) -> None:
        """Widen the limits to what is seen, where there is no dataset to take them from."""
        for key, limits in zip(self.vectors, self.limits, strict=True):
            limits.update(observation[key].float())  # type: ignore[operator]
