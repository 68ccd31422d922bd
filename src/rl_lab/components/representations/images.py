"""The convolutions of World Models (Ha & Schmidhuber, 2018): unpadded, stride 2, for images of 64×64."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.spaces import SpecLike, observation_specs, split_keys
from rl_lab.errors import ConfigError

SIZE = 64


class ImageKeys:
    """The image keys of an observation, joined on channels: uint8 [*lead, 64, 64, channels] per key ↔ one float batch
    [rows, channels, 64, 64] from 0 to 1."""

    def __init__(self, observation: Mapping[str, SpecLike], *, learner: str) -> None:
        self.specs, others = split_keys(observation_specs(observation))
        if not self.specs:
            raise ConfigError(
                f"{learner} encodes images, and this observation has none ({', '.join(others)}). For vectors there is "
                "components/representations@components.representation=identity, as in +experiment=world_models_state; "
                "or set environment.observation=pixels."
            )
        for key, spec in self.specs.items():
            if spec.shape[:2] != (SIZE, SIZE):
                raise ConfigError(
                    f"{learner} takes images of {SIZE}×{SIZE}; observation.{key} is {spec.shape[0]}×{spec.shape[1]}. "
                    f"Set environment.image_size={SIZE}."
                )
        self.ignored = list(others)
        self.channels = sum(spec.shape[2] for spec in self.specs.values())

    def join(self, observation: Mapping[str, Tensor]) -> tuple[Float[Tensor, "rows channels 64 64"], torch.Size]:
        """The images of all keys as one batch, and the leading dimensions that they had."""
        parts = [observation[key] for key in self.specs]
        image = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        rows = image.reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2).float() / 255.0
        return rows, image.shape[:-3]

    def split(self, image: Float[Tensor, "rows channels 64 64"], lead: torch.Size) -> dict[str, Tensor]:
        """The image of each key, [*lead, 64, 64, channels of the key]."""
        parts = image.permute(0, 2, 3, 1).split([spec.shape[2] for spec in self.specs.values()], -1)
        return {key: part.reshape(*lead, *part.shape[1:]) for key, part in zip(self.specs, parts, strict=True)}

    def wiring(self, learner: str) -> dict[str, str]:
        seen = {key: f"{learner}: {SIZE}×{SIZE}×{spec.shape[2]} image" for key, spec in self.specs.items()}
        return seen | {key: "not seen: the learner encodes images" for key in self.ignored}


class ConvEncoder(nn.Sequential):
    """64 → 31 → 14 → 6 → 2 pixels with depth, 2, 4 and 8·depth channels, ReLU after each, then flat: 32·depth."""

    def __init__(self, *, channels: int, depth: int) -> None:
        widths = [channels, depth, 2 * depth, 4 * depth, 8 * depth]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Conv2d(inputs, outputs, 4, stride=2), nn.ReLU()]
        super().__init__(*layers, nn.Flatten())
        self.output_size = 4 * widths[-1]


class ConvDecoder(nn.Module):
    """A linear layer to 32·depth channels of one pixel, then 1 → 5 → 13 → 30 → 64 pixels; a sigmoid at the end.

    `begin_with` gives the first images: before any update the output is their mean colour. Far from it the first
    updates all point one way, and kill the ReLUs where most of a picture is one colour.
    """

    def __init__(self, *, latent_size: int, channels: int, depth: int) -> None:
        super().__init__()
        self.dense = nn.Linear(latent_size, 32 * depth)
        self.convs = nn.Sequential(
            nn.ConvTranspose2d(32 * depth, 4 * depth, 5, stride=2), nn.ReLU(),
            nn.ConvTranspose2d(4 * depth, 2 * depth, 5, stride=2), nn.ReLU(),
            nn.ConvTranspose2d(2 * depth, depth, 6, stride=2), nn.ReLU(),
        )  # fmt: skip
        self.last = nn.ConvTranspose2d(depth, channels, 6, stride=2)
        self.register_buffer("begun", torch.tensor(False))
        self._is_begun = False  # the same, without asking the device

    @torch.no_grad()
    def begin_with(self, image: Float[Tensor, "rows channels 64 64"]) -> None:
        """Set the bias of the last layer, once in a model's life."""
        begun: Any = self.begun
        if not self._is_begun and not bool(begun):
            assert self.last.bias is not None
            self.last.bias.copy_(torch.logit(image.mean((0, 2, 3)), eps=0.01))
            begun.fill_(True)
        self._is_begun = True

    def forward(self, latent: Float[Tensor, "rows latent"]) -> Float[Tensor, "rows channels 64 64"]:
        return torch.sigmoid(self.last(self.convs(self.dense(latent)[:, :, None, None])))


def squared_error(image: Float[Tensor, "rows c h w"], other: Float[Tensor, "rows c h w"]) -> Float[Tensor, " rows"]:
    """The sum over all pixels and channels: its scale against the KL is that of a unit Gaussian for each value."""
    return (image - other).square().sum((1, 2, 3))
