"""Random numbers on the CPU as one kernel: see `rl_lab.nn.host_kernels`.

Philox 4×32 with ten rounds (Salmon et al., 2011), as GPUs have it: each block of four numbers is a function of the seed
and of its place alone, so that many are computed side by side, where torch's own generator makes one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_lab.nn.host_kernels import inline, kernel

_f, _word, _wide = np.float32, np.uint32, np.uint64
_HALF_WORD = _wide(32)
_FACTORS = _wide(0xD2511F53), _wide(0xCD9E8D57)
_STEPS = _word(0x9E3779B9), _word(0xBB67AE85)  # of the key, between rounds
_ROUNDS = 10
_BLOCKS = 64  # side by side


@inline
def minus_log(bits: Any) -> Any:
    """-ln of a number in (0, 1) with these leading digits; by a polynomial between ±ln(2)/2."""
    number = (_f(np.int32(bits >> _word(9))) + _f(0.5)) * _f(2.0**-23)
    digits = _f(number).view(np.int32)
    power = np.int32((digits - np.int32(0x3F3504F3)) >> np.int32(23))
    rest = np.int32(digits - (power << np.int32(23))).view(np.float32) - _f(1.0)
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
    return -(rest + below + _f(power) * _f(0.693359375))


@kernel
def fill_exponential(seed: Any, out: Any) -> None:
    """Exponential numbers of rate 1 into a flat array. `seed`: 64 bits."""
    first_key, second_key = _word(seed & _wide(0xFFFFFFFF)), _word(seed >> _HALF_WORD)
    words = np.empty((4, _BLOCKS), np.uint32)
    flat, size = words.reshape(-1), out.shape[0]
    for first in range(0, size, 4 * _BLOCKS):
        for i in range(_BLOCKS):
            place = _wide(first // 4 + i)
            a, b, c, d = _word(place), _word(place >> _HALF_WORD), _word(0), _word(0)
            left, right = first_key, second_key
            for _ in range(_ROUNDS):
                upper, lower = _FACTORS[0] * _wide(a), _FACTORS[1] * _wide(c)
                a, b = _word(lower >> _HALF_WORD) ^ b ^ left, _word(lower)
                c, d = _word(upper >> _HALF_WORD) ^ d ^ right, _word(upper)
                left, right = _word(left + _STEPS[0]), _word(right + _STEPS[1])
            words[0, i], words[1, i], words[2, i], words[3, i] = a, b, c, d
        own = out[first : first + 4 * _BLOCKS]
        for k in range(own.shape[0]):
            own[k] = minus_log(flat[k])
