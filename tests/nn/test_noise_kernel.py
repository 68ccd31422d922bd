"""Random numbers of our own on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_lab.nn.distributions import draw_noise
from rl_lab.nn.fusion import has_numba
from rl_lab.nn.noise_kernel import fill_exponential

WORD = 0xFFFFFFFF


def philox(place: int, seed: int) -> list[int]:
    """Philox 4×32-10, literally."""
    a, b, c, d = place & WORD, place >> 32, 0, 0
    left, right = seed & WORD, seed >> 32
    for _ in range(10):
        upper, lower = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (lower >> 32) ^ b ^ left, lower & WORD, (upper >> 32) ^ d ^ right, upper & WORD
        left, right = (left + 0x9E3779B9) & WORD, (right + 0xBB67AE85) & WORD
    return [a, b, c, d]


def test_the_reference_gives_the_published_numbers() -> None:
    """Of counter 0 and key 0, from the authors' table of known answers."""
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.skipif(not has_numba(), reason="needs Numba")
@pytest.mark.parametrize("size", [1, 255, 1000])
@pytest.mark.parametrize("seed", [0, 2**63 - 12345])
def test_noise_is_minus_the_logarithm_of_philox(size: int, seed: int) -> None:
    """64 blocks of four words stand side by side; the first words of all of them come first."""
    found = np.empty(size, np.float32)
    fill_exponential(np.uint64(seed), found)
    blocks = np.array([philox(place, seed) for place in range(64 * (size // 256 + 1))]).reshape(-1, 64, 4)
    words = blocks.transpose(0, 2, 1).reshape(-1)[:size]
    expected = -np.log(((words >> 9) + 0.5) / 2**23)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-9)


def test_exponential_noise_follows_the_seed_and_has_its_distribution() -> None:
    """Its distribution function is 1 - exp(-x): the largest distance stays within what chance explains."""
    torch.manual_seed(3)
    first, second = draw_noise("exponential", (200, 50), "cpu"), draw_noise("exponential", (200, 50), "cpu")
    torch.manual_seed(3)
    assert torch.equal(draw_noise("exponential", (200, 50), "cpu"), first)
    assert not torch.equal(first, second)
    ordered = first.flatten().double().sort().values
    steps = torch.arange(len(ordered), dtype=torch.float64) / len(ordered)
    assert ((1.0 - torch.exp(-ordered)) - steps).abs().max() < 1.6 / len(ordered) ** 0.5
    assert (first > 0.0).all()
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.04
