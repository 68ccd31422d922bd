"""The loops of the posterior scan: which kernels each step launches, and with which tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rl_lab.kernels.registry import launch
from rl_lab.kernels.triton import posterior_kernels as kernels
from rl_lab.kernels.triton.posterior_scan import (
    Path,
    PathGradients,
    ScanInputs,
    ScanShape,
    ScanWeights,
    norm_tables,
    with_first,
)

WARPS = 4
SHARED = 16 * WARPS  # the warps of a program share layers whose sizes are multiples of it: each multiplies 16 or more
TILE = 16  # columns
CHUNK = 1024 * TILE  # numbers of a weight that a program loads at once


def power_of_two_in(size: int, limit: int) -> int:
    """The largest power of two that divides `size`, at most `limit`."""
    return min(size & -size, limit)


class Tables(NamedTuple):
    """Derivatives of every step's norms, computed at once before the backward loop: see the kernels."""

    core_slope: Tensor  # [T, B, D]
    inputs_slope: Tensor  # [T, B, 2U]
    posterior_slope: Tensor  # [T, B, U]
    core_drag: Tensor  # [T, B, 2U] through the core layer
    block_drag: Tensor  # [T, B, D] through the core layer's blocks
    deter_drag: Tensor  # [T, B, D] through the deter layer
    stoch_drag: Tensor  # [T, B, Z] through the stoch layer
    posterior_drag: Tensor  # [T, B, D] through the posterior layer


def backward_tables(path: Path, weights: ScanWeights, shape: ScanShape) -> Tables:
    hidden, dtype = weights.stoch.shape[1], weights.stoch.dtype
    deter_pre, stoch_pre = path.inputs_pre.chunk(2, -1)
    deter_norm, stoch_norm = weights.inputs_norm.chunk(2)
    core_slope, core = norm_tables(path.core_pre, weights.core_norm)
    deter_slope, deter = norm_tables(deter_pre, deter_norm)
    stoch_slope, stoch = norm_tables(stoch_pre, stoch_norm)
    posterior_slope, posterior = norm_tables(path.posterior_pre, weights.posterior_norm)
    core, deter, stoch, posterior = (part.to(dtype) for part in (core, deter, stoch, posterior))
    by_block = core.flatten(0, 1).unflatten(-1, (shape.blocks, -1)).transpose(0, 1)
    by_block = torch.bmm(by_block, weights.block.transpose(1, 2)).transpose(0, 1)
    return Tables(
        core_slope, torch.cat([deter_slope, stoch_slope], -1), posterior_slope,
        core_drag=core @ weights.inputs.t(),
        block_drag=by_block.reshape(core.shape),
        deter_drag=deter @ weights.dense[:, hidden:].t(),
        stoch_drag=stoch @ weights.stoch.t(),
        posterior_drag=posterior @ weights.dense[:, :hidden].t(),
    )  # fmt: skip


def precompile(weights: ScanWeights, shape: ScanShape, batch: int) -> None:
    """Compile all kernels, for `batch` rows: two steps without memory or result."""
    weights = ScanWeights(*(weight.to("meta") for weight in weights))
    deter, hidden, stoch = weights.dense.shape[0], weights.stoch.shape[1], weights.stoch.shape[0]

    def empty(*sizes: int, dtype: torch.dtype = weights.stoch.dtype) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    inputs = ScanInputs(
        deter=empty(batch, deter), stoch=empty(batch, stoch), keep=empty(2, batch, 1, dtype=torch.float32),
        action_part=empty(2, batch, deter), embed_part=empty(2, batch, hidden),
        noise=empty(2, batch, shape.groups, shape.classes, dtype=torch.float32),
    )  # fmt: skip
    loops = PosteriorLoops(inputs, weights, shape)
    path = loops.forward()
    loops.backward((path.deter, path.stoch, path.logits), path, backward_tables(path, weights, shape))


class PosteriorLoops:
    """The two loops over time, as a few fused kernels a step: tile sizes, and the launches of all steps."""

    def __init__(self, inputs: ScanInputs, weights: ScanWeights, shape: ScanShape) -> None:
        self.inputs = inputs = ScanInputs(*(part.contiguous() for part in inputs))
        self.weights, self.shape = weights, shape
        self.steps, self.batch = inputs.keep.shape[:2]
        self.deter, self.hidden, self.stoch = weights.dense.shape[0], weights.stoch.shape[1], weights.stoch.shape[0]
        self.block = self.deter // shape.blocks
        self.row_tiles = triton.cdiv(self.batch, kernels.ROWS.value)
        # Columns per program: few while that fills the GPU, more where the weights are large.
        self.deter_columns = power_of_two_in(self.block, max(TILE, min(64, self.deter // 128)))
        self.deter_tiles, self.hidden_tiles = self.deter // self.deter_columns, self.hidden // TILE
        padded = triton.next_power_of_2(shape.classes)
        self.groups, self.group_columns = {"CLASSES": shape.classes, "PADDED": padded}, max(TILE, padded)
        self.group_tiles = triton.cdiv(shape.groups * padded, self.group_columns)

    def forward(self) -> Path:
        inputs, w, shape, batch = self.inputs, self.weights, self.shape, self.batch
        hidden, deter_size = self.hidden, self.deter
        path = self._empty_path()
        deter, stoch = inputs.deter, inputs.stoch
        new = path.inputs_pre.new_empty
        inputs_squares, core_squares = new(2 * self.hidden_tiles, batch), new(self.deter_tiles, batch)
        posterior_squares = new(self.hidden_tiles, batch)
        own, across = self._tiling(self.block, self.deter_columns), self._tiling(hidden, self.deter_columns)

        def dense(deter: Tensor, t: int, tiles: range) -> None:
            """Multiply the state of step t - 1 with the posterior layer there and with the deter layer of step t."""
            before, after = max(t - 1, 0), min(t, self.steps - 1)
            launch(
                kernels.dense_kernel, (len(tiles), self.row_tiles),
                deter, w.dense, inputs.embed_part[before], w.inputs_bias, inputs.keep[after],
                path.posterior_pre[before], posterior_squares, path.inputs_pre[after], inputs_squares,
                batch, deter_size, hidden, tiles.start, *w.dense.stride(),
                **self._tiling(deter_size, TILE),
            )  # fmt: skip

        dense(deter, 0, range(self.hidden_tiles, 2 * self.hidden_tiles))
        for t in range(self.steps):
            launch(
                kernels.stoch_kernel, (self.hidden_tiles, self.row_tiles),
                stoch, w.stoch, w.inputs_bias, inputs.keep[t], path.inputs_pre[t], inputs_squares,
                batch, self.stoch, hidden, *w.stoch.stride(), **self._tiling(self.stoch, TILE),
            )  # fmt: skip
            launch(
                kernels.core_kernel, (self.deter_tiles, self.row_tiles),
                path.inputs_pre[t], inputs_squares, w.inputs_norm, w.inputs, deter, inputs.keep[t], w.block,
                inputs.action_part[t], path.core_pre[t], core_squares,
                batch, deter_size, self.block, hidden, *w.inputs.stride(), *w.block.stride(),
                **self._parts("tiles", self.hidden_tiles), **across | {"OWN_PART": self._part(self.block, across)},
            )  # fmt: skip
            launch(
                kernels.gates_kernel, (self.deter_tiles, self.row_tiles),
                path.core_pre[t], core_squares, w.core_norm, w.gates, w.gates_bias, deter, inputs.keep[t],
                path.deter[t], path.gates[t], batch, deter_size, self.block, *w.gates.stride(),
                **self._parts("tiles", self.deter_tiles), **own,
            )  # fmt: skip
            deter, stoch = path.deter[t], path.stoch[t]
            dense(deter, t + 1, range(2 * self.hidden_tiles if t + 1 < self.steps else self.hidden_tiles))
            launch(
                kernels.logits_kernel, (self.group_tiles, self.row_tiles),
                path.posterior_pre[t], posterior_squares, w.posterior_norm, w.logits, w.logits_bias, inputs.noise[t],
                path.logits[t], path.stoch[t], batch, hidden, shape.groups, shape.unimix, *w.logits.stride(),
                **self._parts("tiles", self.hidden_tiles), **self.groups, **self._tiling(hidden, self.group_columns),
            )  # fmt: skip
        return path

    def backward(self, grads: tuple[Tensor, Tensor, Tensor], path: Path, tables: Tables) -> PathGradients:
        inputs, w, shape, batch = self.inputs, self.weights, self.shape, self.batch
        hidden, deter_size = self.hidden, self.deter
        grad_deter, grad_stoch, grad_logits = (grad.contiguous() for grad in grads)
        parts = path.logits, path.posterior_pre, path.gates, path.core_pre, path.inputs_pre
        out = PathGradients(*(torch.empty_like(part, dtype=w.stoch.dtype) for part in parts))
        # Of the step that runs; the one before it reads them and then writes its own. After the last step: nothing.
        posterior_steep, core_steep, inputs_steep = (
            torch.zeros_like(part[0]) for part in (out.posterior, out.core, out.inputs)
        )
        new = tables.core_slope.new_zeros
        posterior_shares, core_shares = new(self.hidden_tiles, batch), new(self.deter_tiles, batch)
        inputs_shares, through_gate = new(2 * self.hidden_tiles, batch), new(batch, deter_size)
        previous = with_first(inputs.deter, path.deter)
        across = self._tiling(hidden, self.deter_columns)
        for t in reversed(range(self.steps)):
            later = min(t + 1, self.steps - 1)
            launch(
                kernels.logits_gradient_kernel, (self.group_tiles, self.row_tiles),
                inputs_steep, inputs_shares, tables.stoch_drag[later], inputs.keep[later], w.stoch, grad_stoch[t],
                path.logits[t], grad_logits[t], out.logits[t], batch, hidden, shape.groups, shape.unimix,
                *w.stoch.t().stride(), **self._parts("tiles", self.hidden_tiles),
                **self.groups, **self._tiling(hidden, self.group_columns),
            )  # fmt: skip
            launch(
                kernels.posterior_gradient_kernel, (self.hidden_tiles, self.row_tiles),
                out.logits[t], w.logits, tables.posterior_slope[t], path.posterior_pre[t], out.posterior[t],
                posterior_steep, posterior_shares, batch, self.stoch, hidden, *w.logits.t().stride(),
                **self._tiling(self.stoch, TILE),
            )  # fmt: skip
            launch(
                kernels.gates_gradient_kernel, (self.deter_tiles, self.row_tiles),
                posterior_steep, posterior_shares, tables.posterior_drag[t], w.dense,
                inputs_steep, inputs_shares, tables.deter_drag[later],
                core_steep, core_shares, tables.block_drag[later], w.block, inputs.keep[later],
                grad_deter[t], through_gate, path.gates[t], previous[t], inputs.keep[t], out.gates[t],
                batch, deter_size, self.block, hidden, *w.dense.t().stride(), *w.block.transpose(1, 2).stride(),
                **self._parts("hidden_tiles", self.hidden_tiles),
                **self._parts("tiles", self.deter_tiles), **across | {"OWN_PART": self._part(self.block, across)},
            )  # fmt: skip
            launch(
                kernels.core_gradient_kernel, (self.deter_tiles, self.row_tiles),
                out.gates[t], w.gates, tables.core_slope[t], path.core_pre[t], out.core[t], core_steep, core_shares,
                batch, deter_size, self.block, *w.gates.transpose(1, 2).stride(),
                **self._tiling(3 * self.block, self.deter_columns),
            )  # fmt: skip
            launch(
                kernels.inputs_gradient_kernel, (2 * self.hidden_tiles, self.row_tiles),
                core_steep, core_shares, tables.core_drag[t], w.inputs, tables.inputs_slope[t], path.inputs_pre[t],
                out.inputs[t], inputs_steep, inputs_shares, batch, deter_size, hidden, *w.inputs.t().stride(),
                **self._parts("tiles", self.deter_tiles), **self._tiling(deter_size, TILE),
            )  # fmt: skip
        return out

    def _empty_path(self) -> Path:
        new, lead = self.inputs.deter.new_empty, (self.steps, self.batch)
        wide = torch.float32
        return Path(
            deter=new(*lead, self.deter), stoch=new(*lead, self.stoch), logits=new(*lead, self.stoch),
            inputs_pre=new(*lead, 2 * self.hidden, dtype=wide), core_pre=new(*lead, self.deter),
            gates=new(*lead, 3 * self.deter), posterior_pre=new(*lead, self.hidden, dtype=wide),
        )  # fmt: skip

    def _tiling(self, inner: int, columns: int) -> dict[str, Any]:
        """Launch constants: a product of this size is shared among the warps of a program."""
        whole = inner & -inner == inner and inner * columns <= CHUNK
        chunk = inner if whole else power_of_two_in(inner, CHUNK // columns if columns == TILE else 128)
        return {"PARTS": WARPS, "PART": chunk // WARPS, "COLUMNS": columns, "num_warps": WARPS}

    @staticmethod
    def _part(inner: int, tiling: dict[str, Any]) -> int:
        return power_of_two_in(inner, tiling["PARTS"] * tiling["PART"]) // tiling["PARTS"]

    @staticmethod
    def _parts(name: str, count: int) -> dict[str, int]:
        return {name: count, f"PADDED_{name.upper()}": triton.next_power_of_2(count)}
