"""The kernels between convolutions compute what the plain layers do: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.encoders.images import scale_image
from rl_lab.nn.convolutions import PooledConv, UpsampleConv
from rl_lab.nn.layers import RMSNorm

pytest.importorskip("triton")
from rl_lab.kernels.triton import images as functions  # after the check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A power of two of channels; and sizes with a remainder: rows, channels, one pixel, more sites than a tile.
SIZES = {"even": (2, 4, 4, 16), "uneven": (3, 6, 2, 13), "one pixel": (5, 2, 2, 3), "many": (9, 8, 16, 8)}


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs, so that each has several tiles; convolutions with whole factors."""
    monkeypatch.setattr(functions, "PROGRAMS", 2)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


def assert_equal(got: Tensor, expected: Tensor, inputs: Sequence[Tensor], *, tolerance: float = 1e-5) -> None:
    """In value and in gradient."""
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    above = torch.randn_like(expected)
    gradients = (torch.autograd.grad(output, inputs, above) for output in (got, expected))
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance * float(right.abs().max()))


def norm_of(channels: int) -> tuple[RMSNorm, Tensor]:
    norm = RMSNorm(channels).to(DEVICE)
    torch.nn.init.normal_(norm.weight, 1.0, 0.5)
    return norm, normal(channels)


@pytest.mark.parametrize("sizes", SIZES)
def test_pooling_of_pixels(sizes: str) -> None:
    """2×2 max-pooling, bias, norm and activation."""
    rows, height, width, channels = SIZES[sizes]
    (norm, bias), x = norm_of(channels), normal(rows, height, width, channels)
    with torch.no_grad():
        x[0] = 0.5  # of equal ones the first gets the gradient
    pooled = F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
    expected = F.silu(norm(pooled + bias))
    views = x.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 1, 3, 2, 4, 5)
    got = functions.pooled_norm_silu(views, bias, norm.weight, eps=norm.eps)
    assert_equal(got, expected, [x, bias, norm.weight])


def test_pooling_passes_on_what_is_not_a_number() -> None:
    """It must reach the check of the loss, whichever of the four it is."""
    norm, bias = norm_of(4)
    for phase in range(4):
        x = torch.zeros(1, 2, 2, 2, 2, 4, device=DEVICE)
        x.view(4, 4, 4)[1, phase] = float("nan")
        out = functions.pooled_norm_silu(x, bias, norm.weight, eps=norm.eps)
        assert out.view(4, 4).isnan().all(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("sizes", SIZES)
def test_norm_of_an_image_by_phases(sizes: str) -> None:
    """Phases become pixels in their places; channels that only fill up are left out and get no gradient."""
    rows, height, width, channels = SIZES[sizes]
    (norm, bias), phases = norm_of(channels), normal(rows, height, width, 4 * channels + 4)
    parts = phases[..., :-4].unflatten(-1, (2, 2, -1)).permute(0, 1, 3, 2, 4, 5)
    expected = F.silu(norm(parts.reshape(rows, 2 * height, 2 * width, channels) + bias))
    got = functions.placed_norm_silu(phases, bias, norm.weight, eps=norm.eps)
    assert_equal(got, expected, [phases, bias, norm.weight])


@pytest.mark.parametrize("channels", [1, 3])
def test_image_by_phases(channels: int) -> None:
    """Scaled, every 2×2 pixels as channels of one, filled up with zeros."""
    image = torch.randint(0, 256, (3, 6, 10, channels), dtype=torch.uint8, device=DEVICE)
    phases = scale_image(image).unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 1, 3, 2, 4, 5).flatten(3)
    expected = F.pad(phases, (0, -4 * channels % 8))
    torch.testing.assert_close(functions.scaled_phases(image, torch.float32), expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_error_of_a_drawn_image(channels: int) -> None:
    """Squared error of the sigmoid, summed over the image."""
    image = torch.randint(0, 256, (3, 36, 20, channels), dtype=torch.uint8, device=DEVICE)
    phases, bias = normal(3, 18, 10, 16), normal(channels)
    parts = phases[..., : 4 * channels].unflatten(-1, (2, 2, -1)).permute(0, 1, 3, 2, 4, 5).reshape(image.shape)
    expected = (torch.sigmoid(parts + bias) - image / 255.0).square().sum((1, 2, 3))
    assert_equal(functions.image_error(phases, bias, image), expected, [phases, bias])


@pytest.mark.parametrize("inputs", [3, 8])
def test_convolutions_by_phases(inputs: int) -> None:
    """As the layers compute them, in value and in gradient."""
    x = normal(2, 6, 4, inputs)
    layer: Callable = UpsampleConv(inputs, 5).to(DEVICE)
    got = functions.phase_conv(x, layer.weight, pool=False)
    parts = got[..., :20].unflatten(-1, (2, 2, -1)).permute(0, 1, 3, 2, 4, 5).reshape(2, 12, 8, 5)
    assert_equal(parts, layer(x), [x, layer.weight], tolerance=1e-4)
    pooled: Callable = PooledConv(inputs, 4).to(DEVICE)
    by_phases = x.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 1, 3, 2, 4, 5).flatten(3)
    got = functions.phase_conv(F.pad(by_phases, (0, -4 * inputs % 8)), pooled.weight, pool=True)
    largest = got.unflatten(-1, (4, -1)).amax(-2)
    assert_equal(largest, pooled(x), [x, pooled.weight], tolerance=1e-4)
