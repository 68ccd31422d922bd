"""Random numbers on the CPU as one kernel: see `rl_lab.nn.host_kernels`.

Philox 4×32 with ten rounds (Salmon et al., 2011), as GPUs have it: each block of four numbers is a function of the seed
and of its place alone, so that many are computed side by side, where torch's own generator makes one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_lab.nn.host_kernels import kernel, log

_f, _word, _wide = np.float32, np.uint32, np.uint64
_HALF_WORD = _wide(32)
_FACTORS = _wide(0xD2511F53), _wide(0xCD9E8D57)
_STEPS = _word(0x9E3779B9), _word(0xBB67AE85)  # of the key, between rounds
_ROUNDS = 10
_BLOCKS = 64  # side by side


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
            # A number in (0, 1) with these leading digits.
            own[k] = -log((_f(np.int32(flat[k] >> _word(9))) + _f(0.5)) * _f(2.0**-23))
