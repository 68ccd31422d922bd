"""The encoder of TD-MPC and TD-MPC2: from an observation to the latent that everything else is predicted from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from rl_lab.components.encoders.images import flatten_lead
from rl_lab.components.spaces import SpecLike, observation_specs, split_keys, stacked_image_shape
from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import compute_dtype, one_hot
from rl_lab.nn.tdmpc_layers import TDMPCMLP, SimNorm, Style, check_simplex, hidden_layers, linear
from rl_lab.specs import ObservationSpec

CONVOLUTIONS = {"tdmpc": ((7, 2), (5, 2), (3, 2), (3, 2)), "tdmpc2": ((7, 2), (5, 2), (3, 2), (3, 1))}  # kernel, stride
SHIFT = {"tdmpc": 4, "tdmpc2": 3}  # pixels
CHANNELS = 32  # of TD-MPC's convolutions


class ShiftedImages(nn.Module):
    """Four convolutions. TD-MPC2 hands their outputs on as the latent; TD-MPC has a linear layer after them.

    Images are moved by up to a few pixels before (`shift`), also when acting: that is part of the encoder.
    """

    def __init__(
        self, images: Mapping[str, ObservationSpec], *, latent_size: int, style: Style, simplex: int | None
    ) -> None:
        super().__init__()
        height, width, channels = stacked_image_shape(images, multiple=1)
        self.pad, self.offset = SHIFT[style], 0.5 if style == "tdmpc2" else 0.0
        self.output = nn.Identity() if simplex is None else SimNorm(simplex)
        rows, columns = (_shrunk(size, style) for size in (height, width))
        if min(rows, columns) < 1:
            raise ConfigError(
                f"Images of {height}×{width} are too small for this encoder: set environment.image_size=64."
            )
        depth = CHANNELS
        if style == "tdmpc2":
            depth = latent_size // (rows * columns)
            if depth * rows * columns != latent_size:
                raise ConfigError(
                    f"latent_size={latent_size}: TD-MPC2's image encoder has no layer after its convolutions, so for "
                    f"images of {height}×{width} it must be a multiple of {rows}·{columns} = {rows * columns}. Set "
                    "environment.image_size=64, which makes it 16."
                )
        layers: list[nn.Module] = []
        for place, (kernel, stride) in enumerate(CONVOLUTIONS[style]):
            layers += [nn.Conv2d(depth if place else channels, depth, kernel, stride=stride), nn.ReLU()]
            if style == "tdmpc":
                nn.init.orthogonal_(layers[-2].weight, nn.init.calculate_gain("relu"))  # type: ignore[arg-type]
                nn.init.zeros_(layers[-2].bias)  # type: ignore[arg-type]
        self.convolutions = nn.Sequential(*(layers[:-1] if style == "tdmpc2" else layers))
        self.dense: nn.Module = nn.Identity()
        if style == "tdmpc":
            self.dense = linear(depth * rows * columns, latent_size, style=style)

    def shift(
        self, image: UInt8[Tensor, "*lead height width channels"]
    ) -> UInt8[Tensor, "*lead height width channels"]:
        """Every image moved by whole pixels, its border repeated; the channels of one image together."""
        rows = flatten_lead(image)
        count, height, width, _ = rows.shape
        by = torch.randint(-self.pad, self.pad + 1, (2, count, 1), device=image.device)
        down = (torch.arange(height, device=image.device) + by[0]).clamp(0, height - 1)
        right = (torch.arange(width, device=image.device) + by[1]).clamp(0, width - 1)
        number = torch.arange(count, device=image.device)[:, None, None]
        return rows[number, down[:, :, None], right[:, None, :]].view(image.shape)

    def forward(self, image: UInt8[Tensor, "*lead height width channels"]) -> Float[Tensor, "*lead latent"]:
        pixels = flatten_lead(image).to(compute_dtype(image.device)) / 255.0 - self.offset
        x = self.dense(self.convolutions(pixels.permute(0, 3, 1, 2)).flatten(1))
        return self.output(x).view(*image.shape[:-3], -1)


def _shrunk(size: int, style: str) -> int:
    for kernel, stride in CONVOLUTIONS[style]:
        size = (size - kernel) // stride + 1
    return size


class TDMPCEncoder(nn.Module):
    """Vectors as they are, and discrete keys as one-hots, end to end through an MLP; images through convolutions.

    Where there are both, the latent is the mean of theirs, which of two points of simplices is one again.
    """

    def __init__(
        self,
        *,
        observation: Mapping[str, SpecLike],
        latent_size: int,
        units: int,
        layers: int,  # of the MLP, its output layer included; at least one is hidden
        simplex: int | None,  # entries of each softmax of SimNorm; null: a plain linear output
        style: Style,
    ) -> None:
        super().__init__()
        self.specs = observation_specs(observation)
        images, self.vectors = split_keys(self.specs)
        self.image_keys, self.output_size = list(images), latent_size
        if simplex is not None:
            check_simplex(latent_size, simplex)
        self.vector: TDMPCMLP | None = None
        self.image: ShiftedImages | None = None
        if self.vectors:
            size = sum(spec.encoded_size for spec in self.vectors.values())
            hidden = hidden_layers(style, units, max(layers - 1, 1))
            self.vector = TDMPCMLP(size, hidden, latent_size, style=style, simplex=simplex)
        if images:
            self.image = ShiftedImages(images, latent_size=latent_size, style=style, simplex=simplex)

    def augment(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Images at random shifts. Call it before `forward`, whether learning or acting; it draws random numbers."""
        if self.image is None:
            return dict(observation)
        shifted = self.image.shift(torch.cat([observation[key] for key in self.image_keys], -1))
        sizes = [self.specs[key].shape[-1] for key in self.image_keys]
        return dict(observation) | dict(zip(self.image_keys, shifted.split(sizes, -1), strict=True))

    def forward(self, observation: Mapping[str, Tensor]) -> Float[Tensor, "*lead latent"]:
        latents = []
        if self.vector is not None:
            parts = [self._flat(observation[key], spec) for key, spec in self.vectors.items()]
            latents.append(self.vector(parts[0] if len(parts) == 1 else torch.cat(parts, -1)))
        if self.image is not None:
            latents.append(self.image(torch.cat([observation[key] for key in self.image_keys], -1)))
        return latents[0] if len(latents) == 1 else 0.5 * (latents[0] + latents[1])

    def _flat(self, value: Tensor, spec: ObservationSpec) -> Tensor:
        lead = value.shape[: value.ndim - len(spec.shape)]
        if spec.kind == "discrete":
            parts = value.reshape(*lead, len(spec.classes)).unbind(-1)
            return torch.cat([one_hot(part, size) for part, size in zip(parts, spec.classes, strict=True)], -1)
        return value.reshape(*lead, spec.encoded_size).float()

    def wiring(self) -> dict[str, str]:
        """For people: what each key goes through, and why."""
        text = {}
        for key, spec in self.specs.items():
            shape = "×".join(map(str, spec.shape)) or "scalar"
            if spec.kind == "image":
                text[key] = f"random shifts → convolutions: {shape} {spec.dtype} is an image"
            elif spec.kind == "discrete":
                text[key] = f"one-hot ({spec.encoded_size}) → MLP: integers with {list(spec.classes)} classes"
            else:
                text[key] = f"MLP, not normalised: {shape} {spec.dtype} is a vector"
        return text
