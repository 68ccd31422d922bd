"""What happens to images between convolutions, each as one kernel with its derivative. It needs `triton`.

Images are [rows, height, width, channels]; "by phases" every 2×2 pixels are the channels of one. Biases are added here,
not by the convolution, which would read and write the whole map once more for it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
import triton
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.kernels.registry import launch
from rl_lab.kernels.triton import image_kernels as kernels

TILE = 1024  # numbers that a program has at once
TILES = 4  # of a program that adds up over all pixels, at least
PROGRAMS = 4096  # of such programs at most: several rounds for every multiprocessor
LANES = 8  # tensor cores want channels in multiples of it


class _Layout:
    """Tile sizes, and where the pixels of the input lie: see the kernels."""

    def __init__(self, phases: Tensor, *, pool: bool) -> None:
        if pool:
            rows, self.height, self.width, _, _, self.channels = phases.shape
            row, y, x, second, third, _ = phases.stride()
            self.strides = (row, 2 * y, 2 * x, y, x, second, third)
        else:
            rows, half_height, _, half_width, _, self.channels = phases.shape
            row, y, odd_y, x, odd_x, _ = phases.stride()
            self.height, self.width = 2 * half_height, 2 * half_width
            self.strides = (row, y, x, odd_y, odd_x, 0, 0)
        self.shape = (rows, self.height, self.width, self.channels)
        self.sites = rows * self.height * self.width
        padded = triton.next_power_of_2(self.channels)
        self.tile = max(1, TILE // padded)
        self.constants = {"POOL": pool, "SITES": self.tile, "CHANNELS": padded}

    def sizes(self, eps: float) -> tuple[Any, ...]:
        return self.sites, self.height, self.width, self.channels, eps, *self.strides


class _NormSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, phases: Tensor, bias: Tensor, scale: Tensor, eps: float, pool: bool) -> Tensor:
        layout = _Layout(phases, pool=pool)
        out = phases.new_empty(layout.shape)
        kept = choice = phases  # not touched without pooling
        if pool:
            kept = phases.new_empty(layout.sites, layout.channels)
            choice = torch.empty_like(kept, dtype=torch.uint8)
        launch(
            kernels.norm_silu_kernel, (triton.cdiv(layout.sites, layout.tile),),
            phases, bias, scale, out, kept, choice, *layout.sizes(eps), **layout.constants,
        )  # fmt: skip
        ctx.save_for_backward(kept, choice, bias, scale)
        ctx.layout, ctx.eps, ctx.size_stride = layout, eps, (phases.shape, phases.stride())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, choice, bias, scale = ctx.saved_tensors
        layout: _Layout = ctx.layout
        out = torch.empty_strided(*ctx.size_stride, dtype=kept.dtype, device=kept.device)
        programs = min(PROGRAMS, triton.cdiv(layout.sites, TILES * layout.tile))
        sums = scale.new_empty(programs, 2, layout.constants["CHANNELS"])
        launch(
            kernels.norm_silu_gradient_kernel, (programs,),
            grad.contiguous(), kept, choice, bias, scale, out, sums, *layout.sizes(ctx.eps), **layout.constants,
        )  # fmt: skip
        scale_grad, bias_grad = sums.sum(0)[:, : layout.channels]
        return out, bias_grad, scale_grad, None, None


def pooled_norm_silu(
    phases: Float[Tensor, "rows height width 2 2 channels"], bias: Float[Tensor, " channels"],
    scale: Float[Tensor, " channels"], *, eps: float,
) -> Float[Tensor, "rows height width channels"]:  # fmt: skip
    """silu(norm(max of 2×2 + bias)). `phases` may be a view of any order, channels last."""
    return _NormSilu.apply(phases, bias, scale, eps, True)


def split_phases(
    phases: Float[Tensor, "rows height width phases"], channels: int
) -> Float[Tensor, "rows height width 2 2 {channels}"]:
    """A view without the channels that only fill up. Cutting none off would still copy the gradient."""
    used = phases if phases.shape[-1] == 4 * channels else phases[..., : 4 * channels]
    return used.unflatten(-1, (2, 2, -1))


def placed_norm_silu(
    phases: Float[Tensor, "rows height width phases"], bias: Float[Tensor, " channels"],
    scale: Float[Tensor, " channels"], *, eps: float,
) -> Float[Tensor, "rows height2 width2 channels"]:  # fmt: skip
    """silu(norm(phases + bias)) of an image that lies by phases, in its own order."""
    parts = split_phases(phases, bias.shape[0]).permute(0, 1, 3, 2, 4, 5)
    return _NormSilu.apply(parts, bias, scale, eps, False)


def scaled_phases(image: UInt8[Tensor, "rows height width channels"], dtype: torch.dtype) -> Tensor:
    """-0.5..0.5 by phases, with channels of zeros up to a multiple of eight."""
    rows, height, width, channels = image.shape
    slots = 4 * channels + -4 * channels % LANES
    out = torch.empty(rows, height // 2, width // 2, slots, dtype=dtype, device=image.device)
    launch(
        kernels.scaled_phases_kernel, (triton.cdiv(out.numel(), TILE),),
        image.contiguous(), out, out.numel(), height, width, channels, slots, BLOCK=TILE,
    )  # fmt: skip
    return out


class _ImageError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, phases: Tensor, bias: Tensor, image: Tensor) -> Tensor:
        rows, height, width, slots = phases.shape
        padded = triton.next_power_of_2(slots)
        tile = max(1, TILE // padded)
        sizes = height * width, width, image.shape[-1], slots, padded, tile
        out = bias.new_empty(rows)
        launch(kernels.image_error_kernel, (rows,), phases, bias, image, out, *sizes)
        ctx.save_for_backward(phases, bias, image)
        ctx.sizes = sizes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        phases, bias, image = ctx.saved_tensors
        out, sums = torch.empty_like(phases), bias.new_empty(phases.shape[0], ctx.sizes[4])
        launch(
            kernels.image_error_gradient_kernel, (phases.shape[0],),
            grad.contiguous(), phases, bias, image, out, sums, *ctx.sizes,
        )  # fmt: skip
        return out, sums.sum(0)[: 4 * bias.shape[0]].view(4, -1).sum(0), None


def image_error(
    phases: Float[Tensor, "rows height width phases"], bias: Float[Tensor, " channels"],
    image: UInt8[Tensor, "rows height2 width2 channels"],
) -> Float[Tensor, " rows"]:  # fmt: skip
    """Σ (sigmoid(phases + bias) - image / 255)² of each row."""
    return _ImageError.apply(phases.contiguous(), bias, image.contiguous())


class _PhaseWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, pool: bool, dtype: torch.dtype) -> Tensor:
        outputs, inputs = weight.shape[:2]
        wide, deep = 4 * outputs, (4 if pool else 1) * inputs
        spare_outputs, spare_inputs = -wide % LANES, -deep % LANES if pool else 0
        out = torch.empty(wide + spare_outputs, 3, 3, deep + spare_inputs, dtype=dtype, device=weight.device)
        ctx.sizes = outputs, inputs, out.shape[-1]
        ctx.pool, ctx.shape = pool, weight.shape
        launch(
            kernels.phase_weight_kernel, (triton.cdiv(out.numel(), TILE),),
            weight, out, out.numel(), *ctx.sizes, POOL=pool, BLOCK=TILE,
        )  # fmt: skip
        return out.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out = torch.empty(ctx.shape, dtype=torch.float32, device=grad.device)
        launch(
            kernels.phase_weight_gradient_kernel, (triton.cdiv(out.numel(), TILE),),
            grad.permute(0, 2, 3, 1).contiguous(), out, out.numel(), *ctx.sizes, POOL=ctx.pool, BLOCK=TILE,
        )  # fmt: skip
        return out, None, None


def phase_conv(
    x: Float[Tensor, "rows height width inputs"], weight: Float[Tensor, "outputs own_inputs 5 5"], *, pool: bool
) -> Float[Tensor, "rows height width phases"]:
    """A 5×5 convolution by phases, without bias: of `scaled_phases` (`pool`), or of an image to be doubled in size."""
    return channels_last_conv(x, _PhaseWeight.apply(weight, pool, x.dtype), padding=1)


def channels_last_conv(x: Float[Tensor, "rows height width inputs"], weight: Tensor, *, padding: int) -> Tensor:
    """Without bias."""
    return F.conv2d(x.permute(0, 3, 1, 2), weight, padding=padding).permute(0, 2, 3, 1).contiguous()


# Networks -------------------------------------------------------------------------------------------------------------


def supports_forward(encoder: Any) -> str | None:
    return "it is strided" if encoder.strided else None


def forward(encoder: Any, image: UInt8[Tensor, "*lead height width channels"]) -> Float[Tensor, "*lead features"]:
    """`DreamerCNN.forward`: one kernel before and after each convolution."""
    dtype = encoder.compute_dtype
    x = scaled_phases(image.reshape(-1, *image.shape[-3:]), dtype)
    for number, (conv, norm) in enumerate(zip(encoder.convs, encoder.norms, strict=True)):
        if number == 0:
            phases = split_phases(phase_conv(x, conv.weight, pool=True), conv.out_channels)
        else:
            pixels = channels_last_conv(x, conv.weight.to(dtype), padding=2)
            phases = pixels.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 1, 3, 2, 4, 5)
        x = pooled_norm_silu(phases, conv.bias, norm.weight, eps=norm.eps)
    return x.reshape(*image.shape[:-3], encoder.output_size)


def precompile_forward(encoder: Any, *, batch: int, dtype: torch.dtype) -> None:
    """Compile the kernels of `forward`, there and back."""
    image = torch.empty(2, *encoder.image_size, encoder.convs[0].in_channels, dtype=torch.uint8, device="meta")
    out = forward(copy.deepcopy(encoder).to("meta"), image)
    out.backward(torch.empty_like(out))


def image_loss(
    decoder: Any, deter: Tensor, stoch: Tensor, image: UInt8[Tensor, "*lead height width channels"]
) -> Tensor:
    """`DreamerCNNDecoder.image_loss`: one kernel after each convolution."""
    x = decoder.small_map(deter.reshape(-1, deter.shape[-1]), stoch.reshape(-1, stoch.shape[-1]))
    return _decode_error(decoder, x, image.reshape(-1, *image.shape[-3:])).reshape(image.shape[:-3])


def _decode_error(
    decoder: Any, x: Tensor, image: UInt8[Tensor, "rows height width channels"]
) -> Float[Tensor, " rows"]:
    last = decoder.convs[-1]
    for conv, norm in zip(decoder.convs[:-1], decoder.norms, strict=True):
        x = placed_norm_silu(phase_conv(x, conv.weight, pool=False), conv.bias, norm.weight, eps=norm.eps)
    return image_error(phase_conv(x, last.weight, pool=False), last.bias, image)


def precompile_image_loss(decoder: Any, *, batch: int, dtype: torch.dtype) -> None:
    """Compile the kernels of `image_loss`, there and back."""
    x = torch.empty(2, *decoder.map_shape, dtype=dtype, device="meta", requires_grad=True)
    size = (16 * decoder.map_shape[0], 16 * decoder.map_shape[1], decoder.convs[-1].out_channels)
    out = _decode_error(copy.deepcopy(decoder).to("meta"), x, torch.empty(2, *size, dtype=torch.uint8, device="meta"))
    out.backward(torch.empty_like(out))
