"""The image encoder of DQN (Mnih et al., 2015)."""

from __future__ import annotations

from jaxtyping import Float, UInt8
from torch import Tensor, nn

from rl_lab.components.encoders.images import flatten_lead
from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import compute_dtype
from rl_lab.nn.plain_mlp import orthogonal_

SMALLEST = 36  # below this the last convolution has nothing left


class NatureCNN(nn.Module):
    """Convolutions 8×8 stride 4, 4×4 stride 2 and 3×3 stride 1 of depth, 2·depth and 2·depth channels, then a layer of
    16·depth units; ReLU after each. `depth` 32 is the published size. Weights are orthogonal."""

    shrinks_by = 1

    def __init__(self, *, height: int, width: int, channels: int, depth: int = 32) -> None:
        super().__init__()
        if min(height, width) < SMALLEST:
            raise ConfigError(
                f"image_encoder=nature needs images of at least {SMALLEST}×{SMALLEST}; these are {height}×{width}. Set "
                "environment.image_size=64, or take image_encoder=impala."
            )
        wide = 2 * depth
        self.convs = nn.Sequential(
            orthogonal_(nn.Conv2d(channels, depth, 8, stride=4)), nn.ReLU(),
            orthogonal_(nn.Conv2d(depth, wide, 4, stride=2)), nn.ReLU(),
            orthogonal_(nn.Conv2d(wide, wide, 3)), nn.ReLU(),
        )  # fmt: skip
        rows, columns = (((size - 8) // 4 + 1 - 4) // 2 + 1 - 2 for size in (height, width))
        self.output_size = 16 * depth
        self.dense = nn.Sequential(orthogonal_(nn.Linear(rows * columns * wide, self.output_size)), nn.ReLU())

    def forward(self, image: UInt8[Tensor, "*lead height width channels"]) -> Float[Tensor, "*lead output_size"]:
        rows = flatten_lead(image)
        x = (rows.to(compute_dtype(image.device)) / 255.0).permute(0, 3, 1, 2)
        return self.dense(self.convs(x).flatten(1)).reshape(*image.shape[:-3], self.output_size)
