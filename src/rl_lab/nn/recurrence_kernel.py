"""A linear recurrence over time as one kernel, for a loop would be one for each step. It needs `triton`."""

# Triton's own types stand for the arguments.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

COLUMNS = 16


@triton.jit
def after(later_slope, later, slope, base):
    """One step of the recurrence after another, as one step."""
    return later_slope * slope, base + slope * later


@triton.jit(do_not_specialize=["steps", "columns"])
def recurrence_kernel(
    base, slope, last, out, steps, columns, base_time, base_column, slope_time, slope_column,
    TIME: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    time = tl.arange(0, TIME)[:, None]
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (time < steps) & (column < columns)
    own = tl.load(base + time * base_time + column * base_column, mask=inside, other=0.0)
    factor = tl.load(slope + time * slope_time + column * slope_column, mask=inside, other=1.0)
    factor, own = tl.associative_scan((factor, own), 0, after, reverse=True)
    final = tl.load(last + column, mask=column < columns, other=0.0)
    tl.store(out + time * columns + column, own + factor * final, mask=inside)


def recurrence(base: Tensor, slope: Tensor, last: Tensor) -> Tensor:
    """x_t = base_t + slope_t·x_{t+1} for [time, columns], where x after the end is `last`."""
    steps, columns = base.shape
    out = torch.empty_like(base, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(base):
        recurrence_kernel[(triton.cdiv(columns, COLUMNS),)](
            base, slope, last.contiguous(), out, steps, columns, *base.stride(), *slope.stride(),
            TIME=triton.next_power_of_2(steps), COLUMNS=COLUMNS,
        )  # fmt: skip
    return out


class Recurrence(torch.autograd.Function):
    """`recurrence` with gradients: they follow the same recurrence, from the first step on."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, slope: Tensor, last: Tensor) -> Tensor:
        out = recurrence(base, slope, last)
        ctx.save_for_backward(slope, out, last)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope, out, last = ctx.saved_tensors
        # g_t = grad_t + slope_{t-1}·g_{t-1}: backwards in time, so that slopes move by one; the first meets nothing.
        flipped = slope.roll(1, 0).flip(0)
        by_base = recurrence(grad.flip(0), flipped, torch.zeros_like(last)).flip(0)
        by_slope = by_base * torch.cat([out[1:], last.unsqueeze(0)])
        return by_base, by_slope, slope[-1] * by_base[-1]
