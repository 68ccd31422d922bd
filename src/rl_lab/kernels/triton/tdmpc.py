"""What stands between the products of TD-MPC2's networks, as Triton kernels for planning: they have no derivative.

Each reads and writes its rows once; a compiler makes a program for every row, and several passes of some. Rows may be
the beginnings of wider ones: 16-bit products are fastest with sizes that are multiples of eight.
"""

# Arguments in capitals are constants of the compiled kernel; Triton's own types stand for the others.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from rl_lab.kernels.registry import launch

TILE = 1024  # numbers that a warp has at once
STEEP = tl.constexpr(20.0)  # above it mish(x) is x
LOG2_E = tl.constexpr(1.4426950408889634)
LAYER_NORM_EPS = 1e-5

# Methods of the modules -----------------------------------------------------------------------------------------------


def layer(module: Any, x: Float[Tensor, "*lead inputs"]) -> Float[Tensor, "*lead outputs"]:
    """`TDMPCLayer.forward`: the product, then norm and activation as one kernel."""
    x = module.linear(x)
    rows, norm = x.reshape(-1, x.shape[-1]), module.norm
    if hasattr(module.activation, "group"):
        rows = norm_simplex(rows, norm.weight, norm.bias, eps=norm.eps, group=module.activation.group)
    else:
        rows = norm_mish(rows[None], norm.weight, norm.bias, eps=norm.eps)[0]
    return rows.view(x.shape)


def supports_layer(module: Any) -> str | None:
    if not isinstance(module.norm, torch.nn.LayerNorm):
        return "it has no norm"
    activation = type(module.activation).__name__
    if activation == "SimNorm":
        return None if module.activation.group.bit_count() == 1 else "simplex is no power of two"
    return None if activation == "Mish" else f"its activation is {activation}"


def ensemble_layer(
    module: Any, x: Float[Tensor, "chosen rows inputs"], members: Int[Tensor, " chosen"] | None
) -> Float[Tensor, "chosen rows outputs"]:
    """`EnsembleLayer.forward`: the product, then bias, norm and Mish as one kernel; an output layer has the product
    alone."""
    product = module.linear
    if module.norm is None:
        return product(x, members)
    weight = product.weight if members is None else product.weight[members]
    if weight.shape[1] > x.shape[-1]:
        x = F.pad(x, (0, weight.shape[1] - x.shape[-1]))
    return norm_mish(
        torch.bmm(x, weight), module.norm.weight, module.norm.bias, eps=LAYER_NORM_EPS, bias=product.bias,
        members=members,
    )[..., : product.out_features]  # fmt: skip


def supports_ensemble_layer(module: Any) -> str | None:
    activation = type(module.activation).__name__
    if module.norm is None:
        return None if activation == "Identity" else "it has no norm"
    return None if activation == "Mish" else f"its activation is {activation}"


def two_hot_mean(module: Any, logits: Float[Tensor, "*lead bins"]) -> Float[Tensor, "*lead"]:
    """`TwoHot.mean`; rows of logits may be the beginnings of wider ones."""
    logits, bins = _evenly_spaced(logits), module.bins
    out = bins.new_empty(logits.shape[:-1])
    width = logits.stride(-2) if logits.ndim > 1 else logits.shape[-1]
    programs, tiles = _tiles(logits.shape[-1], out.numel())
    launch(
        two_hot_mean_kernel, (programs,), logits, bins, out, out.numel(),
        CLASSES=logits.shape[-1], WIDTH=width, SQUASHED=module.spacing == "linear", **tiles,
    )  # fmt: skip
    return out


def supports_two_hot_mean(module: Any) -> str | None:
    return None


# Functions ------------------------------------------------------------------------------------------------------------


def norm_mish(
    x: Float[Tensor, "networks rows width"],
    scale: Float[Tensor, "*members units"],
    shift: Float[Tensor, "*members units"],
    *,
    eps: float,
    bias: Float[Tensor, "all_members 1 width"] | None = None,
    members: Int[Tensor, " networks"] | None = None,
) -> Float[Tensor, "networks rows width"]:
    """mish(norm(x + bias) · scale + shift), with zeros in what is wider than `units`."""
    x = x.contiguous()
    out, (networks, rows, width) = x.new_empty(x.shape), x.shape
    programs, tiles = _tiles(width, rows)
    launch(
        norm_mish_kernel, (programs, networks),
        x, scale if bias is None else bias, scale, shift, scale if members is None else members, out, rows,
        EPS=eps, UNITS=scale.shape[-1], WIDTH=width, HAS_BIAS=bias is not None, CHOSEN=members is not None,
        FAST=x.is_cuda, **tiles,
    )  # fmt: skip
    return out


def norm_simplex(
    x: Float[Tensor, "rows size"],
    scale: Float[Tensor, " size"],
    shift: Float[Tensor, " size"],
    *,
    eps: float,
    group: int,
) -> Float[Tensor, "rows size"]:
    """SimNorm of norm(x) · scale + shift, for groups of a power of two; rows may be the beginnings of wider ones."""
    rows, size = x.shape
    out = x.new_empty(rows, size)
    programs, tiles = _tiles(size, rows)
    launch(
        norm_simplex_kernel, (programs,),
        x, scale, shift, out, rows, EPS=eps, UNITS=size, WIDTH=x.stride(0), GROUP=group, FAST=x.is_cuda, **tiles,
    )  # fmt: skip
    return out


def _evenly_spaced(x: Float[Tensor, "*lead width"]) -> Float[Tensor, "*lead width"]:
    """The tensor, or a copy where its rows do not follow each other at one distance."""
    strides, shape = x.stride(), x.shape
    even = all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(x.ndim - 2))
    return x if even and strides[-1] == 1 else x.contiguous()


def _tiles(width: int, rows: int) -> tuple[int, dict[str, int]]:
    """The number of programs, and each one's tile. A row stays in one warp where that can hold it: several would
    wait for each other."""
    columns = triton.next_power_of_2(width)
    tile = max(1, TILE // columns)
    return triton.cdiv(rows, tile), {"ROWS": tile, "COLUMNS": columns, "num_warps": max(1, columns // TILE)}


# Kernels --------------------------------------------------------------------------------------------------------------


@triton.jit
def exponential(x, FAST: tl.constexpr):
    """e^x; with FAST, without the instructions that keep the last digits of the smallest numbers."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2_E], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp(x)


@triton.jit
def inverse(x, FAST: tl.constexpr):
    """1 / x, likewise."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def normed(value, known, EPS: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr):
    """LayerNorm of rows, without scale and shift. `value` is 0 where a column is not known."""
    centred = value - (tl.sum(value, 1) / UNITS)[:, None]
    if UNITS < COLUMNS:
        centred = tl.where(known, centred, 0.0)
    return centred * (1.0 / tl.sqrt(tl.sum(centred * centred, 1) / UNITS + EPS))[:, None]


@triton.jit(do_not_specialize=["rows"])
def norm_mish_kernel(
    x, bias, scale, shift, members, out, rows,
    EPS: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, CHOSEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """mish(norm(x + bias) · scale + shift) of [networks, rows, WIDTH]; with CHOSEN, `members` says which networks."""
    network, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Every row reads bias, scale and shift for itself, as it reads its numbers: to share them, threads would wait.
    column = tl.broadcast_to(tl.arange(0, COLUMNS)[None, :], [ROWS, COLUMNS])
    known, inside = column < UNITS, (row < rows)[:, None] & (column < WIDTH)
    own = tl.load(members + network) if CHOSEN else network
    place = (network.to(tl.int64) * rows + row)[:, None] * WIDTH + column
    value = tl.load(x + place, mask=inside & known, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + own * WIDTH + column, mask=known, other=0.0).to(tl.float32)
    factor = tl.load(scale + own * UNITS + column, mask=known, other=0.0).to(tl.float32)
    added = tl.load(shift + own * UNITS + column, mask=known, other=0.0).to(tl.float32)
    z = normed(value, known, EPS, UNITS, COLUMNS) * factor + added
    # x·tanh(log(1 + e^x)) = x·n / (n + 2) with n = e^x (e^x + 2); what is not a number stays so
    growth = exponential(tl.minimum(z, STEEP), FAST)
    growth = growth * (growth + 2.0)
    tl.store(out + place, (z * growth * inverse(growth + 2.0, FAST)).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def norm_simplex_kernel(
    x, scale, shift, out, rows,
    EPS: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """A softmax within every GROUP columns of norm(x) · scale + shift."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.broadcast_to(tl.arange(0, COLUMNS)[None, :], [ROWS, COLUMNS])
    known = column < UNITS
    inside, wide = (row < rows)[:, None] & known, row.to(tl.int64)[:, None]
    value = tl.load(x + wide * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(scale + column, mask=known, other=0.0).to(tl.float32)
    added = tl.load(shift + column, mask=known, other=0.0).to(tl.float32)
    z = normed(value, known, EPS, UNITS, COLUMNS) * factor + added
    groups = tl.reshape(z, [ROWS, COLUMNS // GROUP, GROUP])
    share = exponential(groups - tl.max(groups, 2)[:, :, None], FAST)
    share = tl.reshape(share * inverse(tl.sum(share, 2), FAST)[:, :, None], [ROWS, COLUMNS])
    tl.store(out + wide * UNITS + column, share.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def two_hot_mean_kernel(
    logits, bins, out, rows,
    CLASSES: tl.constexpr, WIDTH: tl.constexpr, SQUASHED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The mean of the bins by softmax(logits); with SQUASHED, symexp of it."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    known = column < CLASSES
    inside = (row < rows)[:, None] & known[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    value = tl.load(logits + place, mask=inside, other=-float("inf")).to(tl.float32)
    # Rows beyond the end have no largest number; they are not stored.
    share = tl.where(known[None, :], tl.exp(value - tl.max(value, 1)[:, None]), 0.0)
    worth = tl.load(bins + column, mask=known, other=0.0)
    mean = tl.sum(share * worth[None, :], 1) / tl.sum(share, 1)
    if SQUASHED:
        size = tl.exp(tl.abs(mean)) - 1.0
        mean = tl.where(mean < 0.0, -size, size)
    tl.store(out + row, mean, mask=row < rows)
