"""What lies between the matrix products of small networks on the CPU, each as one pass over float32 arrays (Numba).

A pass does all there is to do with a row while that lies in the cache: bias, norm, activation, and their derivatives.
Sums are in a fixed order, so results repeat exactly on one machine. Arrays are [rows, size] unless said otherwise, and
those that are written to overlap no others.

Compiled code is kept beside this file, or in Numba's own cache where that cannot be written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.nn.fusion import has_numba

# Sums may be taken in vectors and products contracted; what is not finite stays so.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


def _compiled(function: Callable[..., Any], **settings: Any) -> Any:
    """By Numba. Without it nothing here is called: see `in_float32_on_host`."""
    if not has_numba():
        return function
    from numba import njit

    return njit(function, **settings)


def inline(function: Callable[..., Any]) -> Any:
    """A part of kernels, for what they do with each number."""
    return _compiled(function, inline="always", fastmath=_FAST, error_model="numpy")


def part(function: Callable[..., None]) -> Any:
    """A part of kernels, for what they do with rows: it is compiled once for all of them."""
    return _compiled(function, nogil=True, fastmath=_FAST, error_model="numpy")


def kernel(function: Callable[..., None]) -> Any:
    """Compiled at its first call for arrays of a kind. Where another kernel calls it, it becomes a part of that: a call
    would be bound to whichever copy of its code the process has loaded first, and copies may round differently."""
    settings: dict[str, Any] = {"nogil": True, "fastmath": _FAST, "error_model": "numpy", "forceinline": True}
    try:
        compiled = _compiled(function, cache=True, **settings)
    except RuntimeError:  # there is no place to keep compiled code in
        return _compiled(function, **settings)
    if has_numba():
        kept = compiled._cache._cache_file
        # By itself Numba compiles a kernel anew when its own file changes, and a kernel has parts from other files.
        kept._source_stamp = _files()
        kept._load_index = _nothing_where_classes_are_gone(kept._load_index)
    return compiled


def _nothing_where_classes_are_gone(load: Callable[[], dict]) -> Callable[[], dict]:
    """Numba finds the classes of records that a kernel was compiled for before it looks whether the code is old."""

    def load_index() -> dict:
        try:
            return load()
        except (AttributeError, ImportError):
            return {}

    return load_index


@cache
def _files() -> tuple[tuple[str, float, int], ...]:
    """All that kernels are made from, as it is now."""
    folder = Path(__file__).parent
    found = {path.name: path.stat() for path in sorted([*folder.glob("*kernel*.py"), *folder.glob("host_*.py")])}
    return tuple((name, stat.st_mtime, stat.st_size) for name, stat in found.items())


_f = np.float32
ZERO, ONE, TWO = _f(0.0), _f(1.0), _f(2.0)


# Functions of a number: written so that the compiler can make vectors of them ----------------------------------------


@inline
def exp(x: Any) -> Any:
    """To the last digit or two; by a polynomial between ±ln(2)/2, times a power of two."""
    x = _f(-87.0) if x < _f(-87.0) else x
    x = _f(88.0) if x > _f(88.0) else x
    power = np.floor(x * _f(1.44269504) + _f(0.5))
    rest = x - power * _f(0.693359375) + power * _f(2.12194440e-4)
    series = _f(1.9875691500e-4) * rest + _f(1.3981999507e-3)
    series = series * rest + _f(8.3334519073e-3)
    series = series * rest + _f(4.1665795894e-2)
    series = series * rest + _f(1.6666665459e-1)
    series = series * rest + _f(5.0000001201e-1)
    scale = np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (series * rest * rest + rest + ONE) * scale


@inline
def log(x: Any) -> Any:
    """Of a normal number above 0, to the last digit or two; by a polynomial between √½ and √2, and a power of two."""
    digits = _f(x).view(np.int32)
    power = np.int32((digits - np.int32(0x3F3504F3)) >> np.int32(23))
    rest = np.int32(digits - (power << np.int32(23))).view(np.float32) - ONE
    series = _f(7.0376836292e-2) * rest - _f(1.1514610310e-1)
    series = series * rest + _f(1.1676998740e-1)
    series = series * rest - _f(1.2420140846e-1)
    series = series * rest + _f(1.4249322787e-1)
    series = series * rest - _f(1.6668057665e-1)
    series = series * rest + _f(2.0000714765e-1)
    series = series * rest - _f(2.4999993993e-1)
    series = series * rest + _f(3.3333331174e-1)
    square = rest * rest
    below = series * rest * square - _f(0.5) * square - _f(power) * _f(2.12194440e-4)
    return rest + below + _f(power) * _f(0.693359375) + x * ZERO  # what is not finite stays so


def _largest(row: Any) -> Any:
    """Of numbers; NaN among them may go unseen."""
    result = row[0]
    for j in range(1, row.shape[0]):
        result = row[j] if row[j] > result else result
    return result


largest = _compiled(_largest, fastmath={"nnan", "nsz"})


@inline
def sigmoid(x: Any) -> Any:
    return ONE / (ONE + exp(-x))


@inline
def tanh(x: Any) -> Any:
    return TWO * sigmoid(TWO * x) - ONE


# RMS norm, scale and SiLU ---------------------------------------------------------------------------------------------


@inline
def _inverse_size(x: Any, eps: Any) -> Any:
    """1 / the root mean square of a row."""
    total = ZERO
    for j in range(x.shape[0]):
        total += x[j] * x[j]
    return ONE / np.sqrt(total / _f(x.shape[0]) + _f(eps))


@kernel
def norm_silu(x: Any, biases: Any, scales: Any, eps: Any) -> None:
    """silu(norm(x + bias)·scale), in place; with several biases and scales [count, size] the rows take turns."""
    for i in range(x.shape[0]):
        bias, scale = biases[i % biases.shape[0]], scales[i % scales.shape[0]]
        for j in range(x.shape[1]):
            x[i, j] += bias[j]
        factor = _inverse_size(x[i], eps)
        for j in range(x.shape[1]):
            y = x[i, j] * factor * scale[j]
            x[i, j] = y * sigmoid(y)


@kernel
def norm_silu_to(x: Any, scales: Any, eps: Any, out: Any) -> None:
    """The same to another place, of what has its bias already."""
    for i in range(x.shape[0]):
        factor, scale = _inverse_size(x[i], eps), scales[i % scales.shape[0]]
        for j in range(x.shape[1]):
            y = x[i, j] * factor * scale[j]
            out[i, j] = y * sigmoid(y)


@kernel
def norm_silu_to_backward(grad: Any, x: Any, scales: Any, eps: Any, by_x: Any) -> None:
    """From the derivative by `out` to that by `x`."""
    for i in range(x.shape[0]):
        factor, scale = _inverse_size(x[i], eps), scales[i % scales.shape[0]]
        along = ZERO
        for j in range(x.shape[1]):
            normed = x[i, j] * factor
            y = normed * scale[j]
            share = sigmoid(y)
            slope = grad[i, j] * scale[j] * share * (ONE + y * (ONE - share))
            along += slope * normed
            by_x[i, j] = slope
        along *= factor / _f(x.shape[1])
        for j in range(x.shape[1]):
            by_x[i, j] = (by_x[i, j] - x[i, j] * along) * factor


@kernel
def norm_silu_scale_backward(grad: Any, x: Any, scales: Any, eps: Any, by_scales: Any) -> None:
    """To that by the scales."""
    by_scales[:] = ZERO
    for i in range(x.shape[0]):
        factor, scale = _inverse_size(x[i], eps), scales[i % scales.shape[0]]
        by_scale = by_scales[i % scales.shape[0]]
        for j in range(x.shape[1]):
            normed = x[i, j] * factor
            y = normed * scale[j]
            share = sigmoid(y)
            by_scale[j] += grad[i, j] * share * (ONE + y * (ONE - share)) * normed


@kernel
def norm_silu_kept(x: Any, bias: Any, scale: Any, eps: Any, factors: Any, out: Any) -> None:
    """`norm_silu` to another place, with what the derivative needs: `x` becomes the normed vector, `factors` [rows] are
    what the norm multiplied it with."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] += bias[j]
        factor = _inverse_size(x[i], eps)
        factors[i] = factor
        for j in range(x.shape[1]):
            x[i, j] *= factor
        for j in range(x.shape[1]):
            y = x[i, j] * scale[j]
            out[i, j] = y * sigmoid(y)


@kernel
def norm_silu_backward(
    grad: Any, normed: Any, factors: Any, scale: Any, by_x: Any, by_scale: Any, by_bias: Any
) -> None:
    """From the derivative by the outputs to that by `x + bias`; its sum over the rows, and that by the scale, are added
    to what is there."""
    rows, size = grad.shape
    for i in range(rows):
        # What lies along the normed vector does not change its direction, so it has no effect.
        along = ZERO
        for j in range(size):
            y = normed[i, j] * scale[j]
            share = sigmoid(y)
            slope = grad[i, j] * share * (ONE + y * (ONE - share))
            pull = slope * normed[i, j]
            by_scale[j] += pull
            along += pull * scale[j]
            by_x[i, j] = slope * scale[j]
        along /= _f(size)
        for j in range(size):
            step = (by_x[i, j] - normed[i, j] * along) * factors[i]
            by_x[i, j] = step
            by_bias[j] += step


# Categorical samples --------------------------------------------------------------------------------------------------

SIDE = 64  # rows side by side


@kernel
def sample_one_hot(logits: Any, noise: Any, unimix: Any, out: Any) -> None:
    """One-hots of the first of exponential clocks, whose rates are (1 - unimix)·softmax + unimix/classes.

    A row is too short for vectors. So some rows at a time are turned, and lie side by side in a vector for each class.
    """
    rows, classes = logits.shape
    rates, clocks = np.ones((classes, SIDE), np.float32), np.ones((classes, SIDE), np.float32)
    tops, totals, best = np.empty(SIDE, np.float32), np.empty(SIDE, np.float32), np.empty(SIDE, np.float32)
    choice, share = np.empty(SIDE, np.int32), _f(unimix) / (_f(classes) * (ONE - _f(unimix)))
    for first in range(0, rows, SIDE):
        count = min(SIDE, rows - first)
        for i in range(count):
            for j in range(classes):
                rates[j, i], clocks[j, i] = logits[first + i, j], noise[first + i, j]
        tops[:] = rates[0]
        for j in range(1, classes):
            for i in range(SIDE):
                tops[i] = rates[j, i] if rates[j, i] > tops[i] else tops[i]
        totals[:] = ZERO
        for j in range(classes):
            own = rates[j]
            for i in range(SIDE):
                own[i] = exp(own[i] - tops[i])
            for i in range(SIDE):
                totals[i] += own[i]
        best[:], choice[:] = _f(-1.0), 0
        for j in range(classes):
            own, clock, number = rates[j], clocks[j], np.int32(j)
            for i in range(SIDE):
                own[i] = (own[i] + totals[i] * share) / clock[i]
            for i in range(SIDE):
                choice[i] = number if own[i] > best[i] else choice[i]
            for i in range(SIDE):
                best[i] = own[i] if own[i] > best[i] else best[i]
        for i in range(count):
            for j in range(classes):
                out[first + i, j] = ZERO
            out[first + i, choice[i]] = ONE


@kernel
def straight_through_backward(by_sample: Any, logits: Any, unimix: Any, by_logits: Any) -> None:
    """Add to `by_logits` the derivative by a sample's logits, taken as that of its probabilities."""
    rows, classes = logits.shape
    for i in range(rows):
        top, total, along = largest(logits[i]), ZERO, ZERO
        for j in range(classes):
            weight = exp(logits[i, j] - top)
            total += weight
            along += weight * by_sample[i, j]
        along /= total
        share = (ONE - _f(unimix)) / total
        for j in range(classes):
            by_logits[i, j] += share * exp(logits[i, j] - top) * (by_sample[i, j] - along)


@kernel
def unimix_probs(logits: Any, unimix: Any, probs: Any, log_probs: Any) -> None:
    """(1 - unimix)·softmax + unimix/classes, and its logarithm."""
    rows, classes = logits.shape
    for i in range(rows):
        top = largest(logits[i])
        for j in range(classes):
            probs[i, j] = logits[i, j] - top
    # A row is too short for vectors, all of them together are not.
    flat, logs = probs.reshape(-1), log_probs.reshape(-1)
    for k in range(flat.shape[0]):
        flat[k] = exp(flat[k])
    even = _f(unimix) / _f(classes)
    for i in range(rows):
        total = ZERO
        for j in range(classes):
            total += probs[i, j]
        share = (ONE - _f(unimix)) / total
        for j in range(classes):
            probs[i, j] = probs[i, j] * share + even
    for k in range(flat.shape[0]):
        logs[k] = log(flat[k])


@kernel
def unimix_probs_backward(by_probs: Any, by_log_probs: Any, probs: Any, unimix: Any, by_logits: Any) -> None:
    """From the derivatives by both to that by the logits."""
    rows, classes = probs.shape
    even = _f(unimix) / _f(classes)
    for i in range(rows):
        along, total = ZERO, ONE - _f(unimix)
        for j in range(classes):
            slope = by_probs[i, j] + by_log_probs[i, j] / probs[i, j]
            along += slope * (probs[i, j] - even)
            by_logits[i, j] = slope
        along /= total
        for j in range(classes):
            by_logits[i, j] = (probs[i, j] - even) * (by_logits[i, j] - along)


@kernel
def recurrence(base: Any, slope: Any, last: Any, out: Any) -> None:
    """x_t = base_t + slope_t·x_{t+1} of [steps, rows], where x after the end is `last`."""
    steps, rows = base.shape
    for t in range(steps - 1, -1, -1):
        following = out[t + 1] if t + 1 < steps else last
        for i in range(rows):
            out[t, i] = base[t, i] + slope[t, i] * following[i]


# The gates of a block GRU ---------------------------------------------------------------------------------------------


@kernel
def gated_update(gates: Any, before: Any, after: Any) -> None:
    """after = before + update·(tanh(reset·candidate) - before), over as many columns as a gate has.

    `gates` [rows, blocks, 3, size] are (reset | candidate | update) before their activations.
    """
    rows, blocks, _, size = gates.shape
    for i in range(rows):
        for block in range(blocks):
            own, old, new = gates[i, block], before[i, block * size :], after[i, block * size :]
            for j in range(size):
                candidate = tanh(sigmoid(own[0, j]) * own[1, j])
                new[j] = old[j] + sigmoid(own[2, j] - ONE) * (candidate - old[j])


@kernel
def gated_update_backward(by_after: Any, gates: Any, before: Any, by_gates: Any, by_before: Any) -> None:
    """From the derivative by `after` to those by the gates and by `before`.

    Each loop writes to one place, else the compiler cannot rule out that it reads what it has written. What is needed
    in between lies in the places of the results.
    """
    rows, blocks, _, size = gates.shape
    for i in range(rows):
        for block in range(blocks):
            first, last = block * size, block * size + size
            own, old, grad = gates[i, block], before[i, first:last], by_after[i, first:last]
            reset, new, by_update = by_gates[i, block, 0], by_gates[i, block, 1], by_gates[i, block, 2]
            update = by_before[i, first:last]
            for j in range(size):
                reset[j] = sigmoid(own[0, j])
            for j in range(size):
                update[j] = sigmoid(own[2, j] - ONE)
            for j in range(size):
                new[j] = tanh(reset[j] * own[1, j])
            for j in range(size):
                by_update[j] = grad[j] * (new[j] - old[j]) * update[j] * (ONE - update[j])
            for j in range(size):
                new[j] = grad[j] * update[j] * (ONE - new[j] * new[j]) * reset[j]  # by the candidate
            for j in range(size):
                reset[j] = new[j] * own[1, j] * (ONE - reset[j])
            for j in range(size):
                update[j] = grad[j] * (ONE - update[j])  # by `before`


# LaProp ---------------------------------------------------------------------------------------------------------------


@kernel
def tensor_norms(flat: Any, firsts: Any, norms: Any) -> None:
    """The norm of each tensor in a flat array; `firsts` says where it begins, and where the last one ends."""
    for tensor in range(norms.shape[0]):
        part, total = flat[firsts[tensor] : firsts[tensor + 1]], ZERO
        for k in range(part.shape[0]):
            total += part[k] * part[k]
        norms[tensor] = np.sqrt(total)


@kernel
def advance_laprop(
    gradient: Any, weights: Any, momentum: Any, second_moment: Any, firsts: Any, factors: Any, scalars: Any
) -> None:
    """One step, with every tensor's gradient times its factor. `scalars`: the new share of the second moment, what that
    is divided by, the eps of its root, the new share of the momentum, and what that is multiplied with."""
    fresh, correction, eps, share, rate = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    for tensor in range(factors.shape[0]):
        factor, first, end = factors[tensor], firsts[tensor], firsts[tensor + 1]
        slope, weight, mean, second = (
            gradient[first:end],
            weights[first:end],
            momentum[first:end],
            second_moment[first:end],
        )
        for k in range(slope.shape[0]):
            second[k] += fresh * (slope[k] * slope[k] * factor * factor - second[k])
        for k in range(slope.shape[0]):
            mean[k] += share * (slope[k] * factor / (np.sqrt(second[k] / correction) + eps) - mean[k])
        for k in range(slope.shape[0]):
            weight[k] -= rate * mean[k]
