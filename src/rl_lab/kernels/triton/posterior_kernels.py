"""The steps of the posterior scan as Triton kernels: five forward and five backward.

A step has few rows (the batch), so its time is that of starting kernels and of waiting for memory. A kernel ends where
a layer needs what all others have computed. A norm's row sums are left in parts, one per tile of columns, by the kernel
that writes the row, and added up by those that read it. Inside a kernel the warps share the inner dimension of the
product: tensors are [PARTS of the inner dimension, ROWS, columns].

Symbols as in `posterior_scan`; the plain form is `BlockRSSM.observe`.
"""

# Arguments in capitals are constants of the compiled kernel; Triton's own types stand for the others.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(16)  # the smallest matrix that tensor cores take
NORM_EPS = tl.constexpr(1e-4)


@triton.jit
def row_index(batch):
    """Rows of this program, and which of them exist; both [1, ROWS, 1]."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    return rows[None, :, None], rows[None, :, None] < batch


@triton.jit
def inner_index(start, PARTS: tl.constexpr, PART: tl.constexpr):
    """[PARTS, PART]: a stretch of the inner dimension."""
    return start + tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]


@triton.jit
def load_weight(weight, inner, columns, stride_inner, stride_column):
    return tl.load(weight + inner[:, :, None] * stride_inner + columns[None, None, :] * stride_column)


@triton.jit
def load_rows(x, rows, exists, stride, inner):
    return tl.load(x + rows * stride + inner[:, None, :], mask=exists, other=0.0)


@triton.jit
def row_sum(x):
    """[1, ROWS, n] → [1, ROWS, 1]"""
    return tl.sum(x, 2)[:, :, None]


@triton.jit
def sum_of_parts(parts, rows, exists, count: tl.constexpr, batch, PADDED: tl.constexpr):
    """[count, batch] → [1, ROWS, 1]"""
    index = tl.arange(0, PADDED)[:, None, None]
    return tl.sum(tl.load(parts + index * batch + rows, mask=(index < count) & exists, other=0.0), 0)[None, :, :]


@triton.jit
def norm_silu(x, squares, size: tl.constexpr, weight, inner):
    y = x.to(tl.float32) * tl.rsqrt(squares / size + NORM_EPS) * tl.load(weight + inner)[:, None, :]
    return y * tl.sigmoid(y)


@triton.jit
def multiply(
    total, x, rows, exists, stride, start, size: tl.constexpr, weight, columns, stride_inner, stride_column,
    PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """total + x[:, start : start + size] @ weight[:, columns]"""
    for at in range(0, size, PARTS * PART):
        inner = inner_index(at, PARTS, PART)
        right = load_weight(weight, inner, columns, stride_inner, stride_column)
        total = tl.dot(load_rows(x, rows, exists, stride, start + inner), right, total, input_precision="ieee")
    return total


@triton.jit
def multiply_normed(
    total, x, squares, rows, exists, stride, start, size: tl.constexpr, norm, weight, columns,
    stride_inner, stride_column, batch, tiles: tl.constexpr, PADDED_TILES: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """total + norm_silu(x[:, start : start + size]) @ weight[:, columns]; `squares` are the norm's sums in parts."""
    summed = sum_of_parts(squares, rows, exists, tiles, batch, PADDED_TILES)
    for at in range(0, size, PARTS * PART):
        inner = inner_index(at, PARTS, PART)
        left = norm_silu(load_rows(x, rows, exists, stride, start + inner), summed, size, norm, start + inner)
        right = load_weight(weight, inner, columns, stride_inner, stride_column)
        total = tl.dot(left.to(weight.dtype.element_ty), right, total, input_precision="ieee")
    return total


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def group_index(groups: tl.constexpr, CLASSES: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of this program, whole groups padded to a power of two, and which of them exist; both [COLUMNS]."""
    lane = tl.arange(0, COLUMNS)
    if CLASSES == PADDED:
        return tl.program_id(0) * COLUMNS + lane, lane >= 0  # without gaps: memory is read in wide pieces
    group = tl.program_id(0) * (COLUMNS // PADDED) + lane // PADDED
    real = (group < groups) & (lane % PADDED < CLASSES)
    return tl.where(real, group * CLASSES + lane % PADDED, 0), real


@triton.jit
def softmax(logits, real, PADDED: tl.constexpr, COLUMNS: tl.constexpr):
    """Over each group: [1, ROWS, COLUMNS] → [ROWS, groups, PADDED]"""
    logits = tl.where(real[None, None, :], logits, float("-inf")).reshape(ROWS, COLUMNS // PADDED, PADDED)
    weights = tl.exp(logits - tl.maximum(tl.max(logits, 2), -1e30)[:, :, None])
    return weights / tl.maximum(tl.sum(weights, 2), 1e-30)[:, :, None]


# Forward --------------------------------------------------------------------------------------------------------------


@triton.jit
def stoch_kernel(
    stoch, weight, bias, keep, inputs_pre, squares,
    batch, stoch_size: tl.constexpr, hidden: tl.constexpr, stride_inner, stride_column,
    PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The stoch layer before its norm: the second half of `inputs_pre` and of its sums of squares."""
    rows, exists = row_index(batch)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    total = multiply(
        total, stoch, rows, exists, stoch_size, 0, stoch_size, weight, columns, stride_inner, stride_column,
        PARTS, PART,
    )  # fmt: skip
    kept = tl.load(keep + rows, mask=exists, other=0.0)
    result = tl.sum(total, 0)[None, :, :] * kept + tl.load(bias + hidden + columns)[None, None, :]
    tl.store(inputs_pre + rows * 2 * hidden + hidden + columns[None, None, :], result, mask=exists)
    tl.store(squares + (hidden // COLUMNS + tl.program_id(0)) * batch + rows, row_sum(result * result), mask=exists)


@triton.jit
def core_kernel(
    inputs_pre, inputs_squares, inputs_norm, inputs_weight, deter, keep, block_weight, action_part, core_pre, squares,
    batch, deter_size: tl.constexpr, block_size: tl.constexpr, hidden: tl.constexpr,
    stride_inputs_inner, stride_inputs_column, stride_block, stride_block_inner, stride_block_column,
    tiles: tl.constexpr, PADDED_TILES: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, OWN_PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The core layer before its norm: a block's own part of the state, and both input layers."""
    rows, exists = row_index(batch)
    first = tl.program_id(0) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    block = first // block_size
    total = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    total = multiply(
        total, deter, rows, exists, deter_size, block * block_size, block_size, block_weight + block * stride_block,
        columns - block * block_size, stride_block_inner, stride_block_column, PARTS, OWN_PART,
    )  # fmt: skip
    total *= tl.load(keep + rows, mask=exists, other=0.0)
    for half in tl.static_range(2):
        total = multiply_normed(
            total, inputs_pre, inputs_squares + half * tiles * batch, rows, exists, 2 * hidden, half * hidden, hidden,
            inputs_norm, inputs_weight + half * hidden * stride_inputs_inner, columns,
            stride_inputs_inner, stride_inputs_column, batch, tiles, PADDED_TILES, PARTS, PART,
        )  # fmt: skip
    place = rows * deter_size + columns[None, None, :]
    result = tl.sum(total, 0)[None, :, :] + tl.load(action_part + place, mask=exists, other=0.0)
    result = result.to(core_pre.dtype.element_ty)
    tl.store(core_pre + place, result, mask=exists)
    result = result.to(tl.float32)
    tl.store(squares + tl.program_id(0) * batch + rows, row_sum(result * result), mask=exists)


@triton.jit
def gates_kernel(
    core_pre, squares, core_norm, weight, bias, previous, keep, deter, gates,
    batch, deter_size: tl.constexpr, block_size: tl.constexpr, stride_block, stride_inner, stride_column,
    tiles: tl.constexpr, PADDED_TILES: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gates, and the new deterministic state."""
    rows, exists = row_index(batch)
    first = tl.program_id(0) * COLUMNS
    block = first // block_size
    columns = first - block * block_size + tl.arange(0, COLUMNS)
    reset = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    candidate = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    update = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    own = weight + block * stride_block
    summed = sum_of_parts(squares, rows, exists, tiles, batch, PADDED_TILES)
    for at in range(0, block_size, PARTS * PART):
        inner = inner_index(at, PARTS, PART)
        left = load_rows(core_pre, rows, exists, deter_size, block * block_size + inner)
        left = norm_silu(left, summed, deter_size, core_norm, block * block_size + inner).to(weight.dtype.element_ty)
        by_reset = load_weight(own, inner, columns, stride_inner, stride_column)
        by_candidate = load_weight(own, inner, columns + block_size, stride_inner, stride_column)
        by_update = load_weight(own, inner, columns + 2 * block_size, stride_inner, stride_column)
        reset = tl.dot(left, by_reset, reset, input_precision="ieee")
        candidate = tl.dot(left, by_candidate, candidate, input_precision="ieee")
        update = tl.dot(left, by_update, update, input_precision="ieee")
    at = block * 3 * block_size + columns[None, None, :]
    kind = gates.dtype.element_ty
    # Rounded as they are stored: the backward step sees the same gates.
    reset = (tl.sum(reset, 0)[None, :, :] + tl.load(bias + at)).to(kind)
    candidate = (tl.sum(candidate, 0)[None, :, :] + tl.load(bias + at + block_size)).to(kind)
    update = (tl.sum(update, 0)[None, :, :] + tl.load(bias + at + 2 * block_size)).to(kind)
    place = gates + rows * 3 * deter_size + at
    tl.store(place, reset, mask=exists)
    tl.store(place + block_size, candidate, mask=exists)
    tl.store(place + 2 * block_size, update, mask=exists)
    place = rows * deter_size + block * block_size + columns[None, None, :]
    kept = tl.load(keep + rows, mask=exists, other=0.0)
    before = tl.load(previous + place, mask=exists, other=0.0) * kept
    new = tanh(tl.sigmoid(reset.to(tl.float32)) * candidate.to(tl.float32))
    result = before + tl.sigmoid(update.to(tl.float32) - 1.0) * (new - before)
    tl.store(deter + place, result.to(deter.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["first_tile"])
def dense_kernel(
    deter, weight, embed_part, inputs_bias, next_keep, posterior_pre, posterior_squares, next_inputs_pre,
    next_inputs_squares, batch, deter_size: tl.constexpr, hidden: tl.constexpr,
    first_tile, stride_inner, stride_column,
    PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Products of a deterministic state with the posterior layer and with the next step's deter layer."""
    rows, exists = row_index(batch)
    tile = first_tile + tl.program_id(0)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    total = multiply(
        total, deter, rows, exists, deter_size, 0, deter_size, weight, columns, stride_inner, stride_column,
        PARTS, PART,
    )  # fmt: skip
    result = tl.sum(total, 0)[None, :, :]
    if tile * COLUMNS < hidden:
        place = rows * hidden + columns[None, None, :]
        result += tl.load(embed_part + place, mask=exists, other=0.0)
        tl.store(posterior_pre + place, result, mask=exists)
        tl.store(posterior_squares + tile * batch + rows, row_sum(result * result), mask=exists)
    else:
        columns -= hidden
        kept = tl.load(next_keep + rows, mask=exists, other=0.0)
        result = result * kept + tl.load(inputs_bias + columns)[None, None, :]
        tl.store(next_inputs_pre + rows * 2 * hidden + columns[None, None, :], result, mask=exists)
        tile -= hidden // COLUMNS
        tl.store(next_inputs_squares + tile * batch + rows, row_sum(result * result), mask=exists)


@triton.jit
def logits_kernel(
    posterior_pre, squares, norm, weight, bias, noise, logits, stoch,
    batch, hidden: tl.constexpr, groups: tl.constexpr, unimix: tl.constexpr, stride_inner, stride_column,
    tiles: tl.constexpr, PADDED_TILES: tl.constexpr, CLASSES: tl.constexpr, PADDED: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The posterior's logits, and a sample of it."""
    rows, exists = row_index(batch)
    columns, real = group_index(groups, CLASSES, PADDED, COLUMNS)
    place, there = rows * groups * CLASSES + columns[None, None, :], exists & real[None, None, :]
    clocks = tl.load(noise + place, mask=there, other=1.0).reshape(ROWS, COLUMNS // PADDED, PADDED)
    total = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    total = multiply_normed(
        total, posterior_pre, squares, rows, exists, hidden, 0, hidden, norm, weight, columns,
        stride_inner, stride_column, batch, tiles, PADDED_TILES, PARTS, PART,
    )  # fmt: skip
    result = (tl.sum(total, 0)[None, :, :] + tl.load(bias + columns)[None, None, :]).to(logits.dtype.element_ty)
    tl.store(logits + place, result, mask=there)
    probs = softmax(result.to(tl.float32), real, PADDED, COLUMNS) * (1.0 - unimix) + unimix / CLASSES
    rates = tl.where(real.reshape(1, COLUMNS // PADDED, PADDED), probs / clocks, -1.0)
    chosen = tl.arange(0, PADDED)[None, None, :] == tl.argmax(rates, 2)[:, :, None]
    tl.store(stoch + place, chosen.reshape(1, ROWS, COLUMNS).to(stoch.dtype.element_ty), mask=there)


# Backward -------------------------------------------------------------------------------------------------------------
#
# The gradient through norm_silu is `steep - mean(share)·drag`, where steep = slope·grad and share = steep·x: slope and
# drag follow from the forward pass alone. So a kernel that has computed a gradient leaves `steep` and the sums of
# `share` in parts; the next one multiplies `steep` with its weights, and the product of `drag` with them has been
# computed for all steps beforehand.


@triton.jit
def leave_gradient(grad, place, tile, rows, exists, kept_grad, slope, x, steep, shares, batch):
    """Store a gradient of a layer with a norm: as it is, and as the kernels after this one take it."""
    tl.store(kept_grad + place, grad.to(kept_grad.dtype.element_ty), mask=exists)
    steeped = grad * tl.load(slope + place, mask=exists, other=0.0)
    tl.store(steep + place, steeped.to(steep.dtype.element_ty), mask=exists)
    share = steeped * tl.load(x + place, mask=exists, other=0.0)
    tl.store(shares + tile * batch + rows, row_sum(share), mask=exists)


@triton.jit
def logits_gradient_kernel(
    later_steep, later_shares, later_drag, later_keep, weight, grad_stoch, logits, grad_logits, result,
    batch, hidden: tl.constexpr, groups: tl.constexpr, unimix: tl.constexpr, stride_inner, stride_column,
    tiles: tl.constexpr, PADDED_TILES: tl.constexpr, CLASSES: tl.constexpr, PADDED: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Through the stoch layer of the step after and the straight-through sample."""
    rows, exists = row_index(batch)
    columns, real = group_index(groups, CLASSES, PADDED, COLUMNS)
    place, there = rows * groups * CLASSES + columns[None, None, :], exists & real[None, None, :]
    grad = tl.load(grad_stoch + place, mask=there, other=0.0).to(tl.float32)
    probs = softmax(tl.load(logits + place, mask=there, other=0.0).to(tl.float32), real, PADDED, COLUMNS)
    total = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    total = multiply(
        total, later_steep, rows, exists, 2 * hidden, hidden, hidden, weight, columns,
        stride_inner, stride_column, PARTS, PART,
    )  # fmt: skip
    share = sum_of_parts(later_shares + tiles * batch, rows, exists, tiles, batch, PADDED_TILES) / hidden
    through = tl.sum(total, 0)[None, :, :] - share * tl.load(later_drag + place, mask=there, other=0.0)
    grad += through * tl.load(later_keep + rows, mask=exists, other=0.0)
    grad = grad.reshape(ROWS, COLUMNS // PADDED, PADDED)
    grad = (1.0 - unimix) * probs * (grad - tl.sum(probs * grad, 2)[:, :, None])
    grad = grad.reshape(1, ROWS, COLUMNS) + tl.load(grad_logits + place, mask=there, other=0.0)
    tl.store(result + place, grad.to(result.dtype.element_ty), mask=there)


@triton.jit
def posterior_gradient_kernel(
    grad_logits, weight, slope, posterior_pre, grad_posterior, steep, shares,
    batch, stoch_size: tl.constexpr, hidden: tl.constexpr, stride_inner, stride_column,
    PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Through the posterior's last layer."""
    rows, exists = row_index(batch)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    total = multiply(
        total, grad_logits, rows, exists, stoch_size, 0, stoch_size, weight, columns, stride_inner, stride_column,
        PARTS, PART,
    )  # fmt: skip
    leave_gradient(
        tl.sum(total, 0)[None, :, :], rows * hidden + columns[None, None, :], tl.program_id(0), rows, exists,
        grad_posterior, slope, posterior_pre, steep, shares, batch,
    )  # fmt: skip


@triton.jit
def gates_gradient_kernel(
    posterior_steep, posterior_shares, posterior_drag, dense_weight,
    later_inputs_steep, later_inputs_shares, later_deter_drag,
    later_core_steep, later_core_shares, later_block_drag, block_weight, later_keep,
    grad_deter, through_gate, gates, previous, keep, grad_gates,
    batch, deter_size: tl.constexpr, block_size: tl.constexpr, hidden: tl.constexpr,
    stride_dense_inner, stride_dense_column, stride_block, stride_block_inner, stride_block_column,
    hidden_tiles: tl.constexpr, PADDED_HIDDEN_TILES: tl.constexpr, tiles: tl.constexpr, PADDED_TILES: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, OWN_PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """All that reaches the new deterministic state, then through the gates. `through_gate` is carried on in place."""
    rows, exists = row_index(batch)
    first = tl.program_id(0) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    block = first // block_size
    place = rows * deter_size + columns[None, None, :]
    total = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    grad = tl.load(grad_deter + place, mask=exists, other=0.0).to(tl.float32)
    total = multiply(
        total, later_core_steep, rows, exists, deter_size, block * block_size, block_size,
        block_weight + block * stride_block, columns - block * block_size,
        stride_block_inner, stride_block_column, PARTS, OWN_PART,
    )  # fmt: skip
    total = multiply(
        total, later_inputs_steep, rows, exists, 2 * hidden, 0, hidden, dense_weight + hidden * stride_dense_inner,
        columns, stride_dense_inner, stride_dense_column, PARTS, PART,
    )  # fmt: skip
    kept = tl.load(later_keep + rows, mask=exists, other=0.0)
    total *= kept
    share = sum_of_parts(later_core_shares, rows, exists, tiles, batch, PADDED_TILES) / deter_size
    drag = share * tl.load(later_block_drag + place, mask=exists, other=0.0)
    share = sum_of_parts(later_inputs_shares, rows, exists, hidden_tiles, batch, PADDED_HIDDEN_TILES) / hidden
    drag += share * tl.load(later_deter_drag + place, mask=exists, other=0.0)
    grad += tl.load(through_gate + place, mask=exists, other=0.0) - drag * kept
    total = multiply(
        total, posterior_steep, rows, exists, hidden, 0, hidden, dense_weight, columns,
        stride_dense_inner, stride_dense_column, PARTS, PART,
    )  # fmt: skip
    share = sum_of_parts(posterior_shares, rows, exists, hidden_tiles, batch, PADDED_HIDDEN_TILES) / hidden
    grad += tl.sum(total, 0)[None, :, :] - share * tl.load(posterior_drag + place, mask=exists, other=0.0)
    at = rows * 3 * deter_size + block * 2 * block_size + columns[None, None, :]
    reset = tl.sigmoid(tl.load(gates + at, mask=exists, other=0.0).to(tl.float32))
    candidate = tl.load(gates + at + block_size, mask=exists, other=0.0).to(tl.float32)
    update = tl.sigmoid(tl.load(gates + at + 2 * block_size, mask=exists, other=0.0).to(tl.float32) - 1.0)
    new = tanh(reset * candidate)
    own_keep = tl.load(keep + rows, mask=exists, other=0.0)
    before = tl.load(previous + place, mask=exists, other=0.0) * own_keep
    grad_new = grad * update * (1.0 - new * new)
    kind = grad_gates.dtype.element_ty
    tl.store(grad_gates + at, (grad_new * candidate * reset * (1.0 - reset)).to(kind), mask=exists)
    tl.store(grad_gates + at + block_size, (grad_new * reset).to(kind), mask=exists)
    tl.store(grad_gates + at + 2 * block_size, (grad * (new - before) * update * (1.0 - update)).to(kind), mask=exists)
    tl.store(through_gate + place, grad * (1.0 - update) * own_keep, mask=exists)


@triton.jit
def core_gradient_kernel(
    grad_gates, weight, slope, core_pre, grad_core, steep, shares,
    batch, deter_size: tl.constexpr, block_size: tl.constexpr, stride_block, stride_inner, stride_column,
    PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Through the gate layer."""
    rows, exists = row_index(batch)
    first = tl.program_id(0) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    block = first // block_size
    total = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    total = multiply(
        total, grad_gates, rows, exists, 3 * deter_size, block * 3 * block_size, 3 * block_size,
        weight + block * stride_block, columns - block * block_size, stride_inner, stride_column, PARTS, PART,
    )  # fmt: skip
    leave_gradient(
        tl.sum(total, 0)[None, :, :], rows * deter_size + columns[None, None, :], tl.program_id(0), rows, exists,
        grad_core, slope, core_pre, steep, shares, batch,
    )  # fmt: skip


@triton.jit
def inputs_gradient_kernel(
    core_steep, core_shares, core_drag, weight, slope, inputs_pre, grad_inputs, steep, shares,
    batch, deter_size: tl.constexpr, hidden: tl.constexpr, stride_inner, stride_column,
    tiles: tl.constexpr, PADDED_TILES: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Through the core layer to the two input layers."""
    rows, exists = row_index(batch)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    total = multiply(
        total, core_steep, rows, exists, deter_size, 0, deter_size, weight, columns, stride_inner, stride_column,
        PARTS, PART,
    )  # fmt: skip
    place = rows * 2 * hidden + columns[None, None, :]
    share = sum_of_parts(core_shares, rows, exists, tiles, batch, PADDED_TILES) / deter_size
    grad = tl.sum(total, 0)[None, :, :] - share * tl.load(core_drag + place, mask=exists, other=0.0)
    leave_gradient(grad, place, tl.program_id(0), rows, exists, grad_inputs, slope, inputs_pre, steep, shares, batch)
