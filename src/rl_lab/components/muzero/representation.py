"""MuZero's representation h: from an observation to the latent that everything is predicted from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.muzero.layers import MLP, ResidualBlock, convolution, scale_latent
from rl_lab.components.observations import ObservationVector
from rl_lab.components.spaces import SpecLike, observation_specs, split_keys, stacked_image_shape
from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import compute_dtype
from rl_lab.specs import ObservationSpec

POOL_FROM = 96  # images of at least this size are halved once more


class Representation(nn.Module, ABC):
    """A subclass encodes; the latent is then scaled to [0, 1]. `latent_shape` is that of one row."""

    latent_shape: tuple[int, ...]

    def forward(self, observation: Mapping[str, Tensor]) -> Float[Tensor, rows * latent]:
        return scale_latent(self.encode(observation).float())

    @abstractmethod
    def encode(self, observation: Mapping[str, Tensor]) -> Float[Tensor, rows * latent]: ...

    def augment(self, observation: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Observations at random shifts, for learning; a representation of vectors leaves them as they are."""
        return observation

    @property
    def latent_size(self) -> int:
        return torch.Size(self.latent_shape).numel()

    @abstractmethod
    def wiring(self) -> dict[str, str]:
        """For people: what each key goes through."""


class VectorRepresentation(Representation):
    """An MLP over all keys end to end; discrete keys as one-hots."""

    def __init__(
        self,
        *,
        observation: Mapping[str, SpecLike],
        latent_size: int = 128,
        units: int = 128,
        layers: int = 1,  # hidden ones
        norm: bool = True,
    ) -> None:
        super().__init__()
        self.vector = ObservationVector(observation)
        self.latent_shape = (latent_size,)
        self.network = MLP([self.vector.size, *[units] * layers, latent_size], norm=norm)

    def encode(self, observation: Mapping[str, Tensor]) -> Float[Tensor, rows * latent]:
        return self.network(self.vector.join(observation))

    def wiring(self) -> dict[str, str]:
        return {key: "MLP → latent" for key in self.vector.specs}


class BoardRepresentation(Representation):
    """A board [rows, columns] of 1 (own), -1 (the other's) and 0 as two planes, and residual blocks on it."""

    def __init__(self, *, observation: Mapping[str, SpecLike], channels: int = 32, blocks: int = 1) -> None:
        super().__init__()
        specs = observation_specs(observation)
        boards = [key for key, spec in specs.items() if spec.kind == "vector" and len(spec.shape) == 2]
        if len(boards) != 1:
            raise ConfigError(f"A board network needs one observation [rows, columns]; there are {len(boards)}.")
        self.key = boards[0]
        self.latent_shape = (channels, *specs[self.key].shape)
        self.network = nn.Sequential(
            convolution(2, channels), nn.ReLU(), *(ResidualBlock(channels) for _ in range(blocks))
        )

    def encode(self, observation: Mapping[str, Tensor]) -> Float[Tensor, rows * latent]:
        board = observation[self.key]
        return self.network(torch.stack([board == 1, board == -1], 1).float())

    def wiring(self) -> dict[str, str]:
        return {self.key: "two planes → residual blocks"}


class ImageRepresentation(Representation):
    """EfficientZero's downsampling by 16 (8 for images below 96 pixels), then residual blocks."""

    def __init__(
        self, *, observation: Mapping[str, SpecLike], channels: int = 64, blocks: int = 1, shift: int = 4
    ) -> None:
        super().__init__()
        images, others = split_keys(observation_specs(observation))
        if others or not images:
            raise ConfigError(f"This network needs images alone; it was given {sorted(others) or 'no image'}.")
        self.keys, self.shift = list(images), shift
        height, width, depth = stacked_image_shape(images, multiple=8)
        pools = 2 if min(height, width) >= POOL_FROM else 1
        half = channels // 2
        layers: list[nn.Module] = [convolution(depth, half, stride=2), nn.ReLU(), ResidualBlock(half)]
        layers += [ResidualBlock(half, channels, stride=2), ResidualBlock(channels)]
        for _ in range(pools):
            layers += [nn.AvgPool2d(3, 2, 1), ResidualBlock(channels)]
        layers += [ResidualBlock(channels) for _ in range(blocks - 1)]
        self.network = nn.Sequential(*layers)
        shrink = 4 * 2**pools
        self.latent_shape = (channels, -(-height // shrink), -(-width // shrink))

    def encode(self, observation: Mapping[str, Tensor]) -> Float[Tensor, rows * latent]:
        image = torch.cat([observation[key] for key in self.keys], -1)
        pixels = image.to(compute_dtype(image.device)) / 255.0
        return self.network(pixels.permute(0, 3, 1, 2))

    def augment(self, observation: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Every image moved by up to `shift` pixels, its border repeated."""
        moved = {key: _shifted(observation[key], self.shift) for key in self.keys}
        return dict(observation) | moved

    def wiring(self) -> dict[str, str]:
        return {key: "random shifts → strided residual blocks" for key in self.keys}


def _shifted(image: Tensor, pad: int) -> Tensor:
    count, height, width, _ = image.shape
    by = torch.randint(-pad, pad + 1, (2, count, 1), device=image.device)
    down = (torch.arange(height, device=image.device) + by[0]).clamp(0, height - 1)
    right = (torch.arange(width, device=image.device) + by[1]).clamp(0, width - 1)
    number = torch.arange(count, device=image.device)[:, None, None]
    return image[number, down[:, :, None], right[:, None, :]]


def make_representation(
    *,
    observation: Mapping[str, SpecLike],
    latent_size: int = 128,
    units: int = 128,
    layers: int = 1,
    norm: bool = True,
    channels: int = 64,
    blocks: int = 1,
    board: bool = False,
    mask: str | None = None,  # the observation key that holds the action mask, which the network does not see
) -> Representation:
    """Convolutions for images, residual blocks on a `board`, an MLP for all else."""
    specs: dict[str, ObservationSpec] = observation_specs(observation)
    specs = {key: spec for key, spec in specs.items() if key != mask}
    if any(spec.kind == "image" for spec in specs.values()):
        return ImageRepresentation(observation=specs, channels=channels, blocks=blocks)
    if board:
        return BoardRepresentation(observation=specs, channels=channels, blocks=blocks)
    return VectorRepresentation(observation=specs, latent_size=latent_size, units=units, layers=layers, norm=norm)
