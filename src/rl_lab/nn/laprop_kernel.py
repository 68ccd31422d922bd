"""The element-wise part of a LaProp step as one kernel: each number is read and written once. It needs `triton`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def advance_kernel(  # type: ignore[no-untyped-def]
    work, momentum, second_moment, segments, factors, scalars, size,
    eps: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    grad = tl.load(work + at, mask=inside, other=0.0)
    factor = tl.load(factors + tl.load(segments + at // ROW, mask=inside, other=0), mask=inside, other=0.0)
    grad = tl.where(tl.abs(grad) < float("inf"), grad, 0.0) * factor
    second = tl.load(second_moment + at, mask=inside, other=0.0)
    second += tl.load(scalars) * (grad * grad - second)
    grad = grad / (tl.sqrt(second / tl.load(scalars + 1)) + eps)
    first = tl.load(momentum + at, mask=inside, other=0.0)
    first += tl.load(scalars + 2) * (grad - first)
    tl.store(second_moment + at, second, mask=inside)
    tl.store(momentum + at, first, mask=inside)
    tl.store(work + at, first * tl.load(scalars + 3), mask=inside)


def advance(
    work: Tensor, momentum: Tensor, second_moment: Tensor, segments: Tensor, factors: Tensor, scalars: Tensor,
    *, eps: float, row: int,
) -> None:  # fmt: skip
    """Gradients in `work` become the step to subtract. `scalars`: the second moment's weight and bias correction, the
    momentum's weight, and the rate."""
    grid = (triton.cdiv(work.numel(), BLOCK),)
    with torch.cuda.device_of(work):
        advance_kernel[grid](
            work, momentum, second_moment, segments, factors, scalars, work.numel(), eps=eps, ROW=row, BLOCK=BLOCK
        )
