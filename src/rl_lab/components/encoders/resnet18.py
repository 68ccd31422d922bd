"""The image encoder of Diffusion Policy: ResNet-18 from scratch, group norms, and a spatial softmax at its end."""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from rl_lab.components.encoders.images import flatten_lead
from rl_lab.errors import ConfigError

GROUP = 16  # channels of a group of the norm


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(1, channels // GROUP), channels)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a skip, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = _norm(outputs), _norm(outputs)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), _norm(outputs))

    def forward(self, x: Float[Tensor, "row inputs h w"]) -> Float[Tensor, "row outputs h2 w2"]:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.skip(x))


class SpatialSoftmax(nn.Module):
    """`keypoints` maps, each a distribution over places; the output is where each expects to be, x and y in [-1, 1]."""

    places: Tensor

    def __init__(self, channels: int, height: int, width: int, *, keypoints: int) -> None:
        super().__init__()
        self.maps = nn.Conv2d(channels, keypoints, 1)
        y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
        self.register_buffer("places", torch.stack([x.flatten(), y.flatten()], -1), persistent=False)

    def forward(self, x: Float[Tensor, "row channels h w"]) -> Float[Tensor, "row keypoints xy"]:
        return self.maps(x).flatten(2).softmax(-1) @ self.places


class KeypointResNet(nn.Module):
    """ResNet-18 → spatial softmax → linear. Images are scaled to [-1, 1] and cropped: at random while training, all
    frames of a sequence alike, and in the middle otherwise."""

    def __init__(
        self, *, height: int, width: int, channels: int, crop: int | None, keypoints: int, features: int, base: int
    ) -> None:
        super().__init__()
        if crop is not None and crop > min(height, width):
            raise ConfigError(f"crop={crop} does not fit into images of {height} × {width}: choose a smaller one.")
        self.crop, self.output_size = crop, features
        widths = [base, 2 * base, 4 * base, 8 * base]
        self.stem = nn.Conv2d(channels, base, 7, stride=2, padding=3, bias=False)
        self.stem_norm = _norm(base)
        self.blocks = nn.Sequential(
            *(
                BasicBlock(inputs if first else outputs, outputs, stride=2 if first and stage else 1)
                for stage, (inputs, outputs) in enumerate(zip([base, *widths], widths, strict=False))
                for first in (True, False)
            )
        )
        rows, columns = (-(-(crop or size) // 32) for size in (height, width))
        self.pool = SpatialSoftmax(widths[-1], rows, columns, keypoints=keypoints)
        self.output = nn.Linear(2 * keypoints, features)

    def forward(self, image: UInt8[Tensor, "batch time height width channels"]) -> Float[Tensor, "batch time features"]:
        lead = image.shape[:-3]
        x = flatten_lead(self._cropped(image)).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        x = F.max_pool2d(F.relu(self.stem_norm(self.stem(x))), 3, stride=2, padding=1)
        return self.output(self.pool(self.blocks(x)).flatten(1)).unflatten(0, lead)

    def _cropped(self, image: Tensor) -> Tensor:
        if self.crop is None:
            return image
        batch, _, height, width, _ = image.shape
        room = torch.tensor([height - self.crop, width - self.crop], device=image.device)
        if not self.training:
            top, left = (int(part) // 2 for part in room.tolist())
            return image[:, :, top : top + self.crop, left : left + self.crop]
        offset = (torch.rand(batch, 2, device=image.device) * (room + 1)).long()
        steps = torch.arange(self.crop, device=image.device)
        rows, columns = (offset[:, axis, None] + steps for axis in (0, 1))
        sequence = torch.arange(batch, device=image.device)[:, None, None]
        # Indices around a slice come first: [batch, row, column, time, channel].
        return image[sequence, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2, 4)
