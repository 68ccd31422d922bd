"""The tree of sums behind prioritised sampling."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rl_lab.buffers.sum_tree import SumTree


@pytest.mark.parametrize("size", [1, 5, 32, 33, 1024, 5000])
def test_finds_the_leaf_at_a_point(size: int) -> None:
    """A point belongs to the leaf whose stretch of the summed masses it lies in."""
    rng = np.random.default_rng(size)
    masses = rng.random(size) + 0.01
    tree = SumTree(size)
    tree.fill(masses)
    points = rng.random(200) * tree.total
    expected = np.searchsorted(np.cumsum(masses), points, side="right")
    assert tree.total == pytest.approx(masses.sum())
    np.testing.assert_array_equal(tree.find(points), np.minimum(expected, size - 1))


def test_leaves_without_mass_are_never_found() -> None:
    """Not even by a point at the very end, where rounding could push it over."""
    rng = np.random.default_rng(0)
    masses = rng.random(3000) * (rng.random(3000) < 0.1)
    masses[-500:] = 0.0
    tree = SumTree(3000)
    tree.fill(masses)
    points = np.append(rng.random(20_000), [0.0, np.nextafter(1.0, 0.0), 1.0]) * tree.total
    assert (masses[tree.find(points)] > 0.0).all()


def test_changes_equal_a_tree_that_was_filled_at_once() -> None:
    """To the last bit, after any number of changes: nothing drifts, and a restored tree is the same."""
    rng = np.random.default_rng(1)
    changed, filled = SumTree(2000), SumTree(2000)
    for count in (1, 7, 64, 900, 3000):
        leaves = rng.integers(0, 2000, count)
        changed.set(leaves, rng.random(count) ** 9)
    filled.fill(changed.leaves)
    for left, right in zip(changed._flat, filled._flat, strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_later_of_two_masses_stays() -> None:
    """A record that stands in a batch twice keeps one priority."""
    tree = SumTree(10)
    tree.set(np.array([3, 3]), np.array([5.0, 2.0]))
    assert tree.total == 2.0


def test_a_million_leaves_are_fast_enough() -> None:
    """200,000 changes a second in batches of 64, with room for a busy machine (CPU time)."""
    rng = np.random.default_rng(0)
    tree = SumTree(1_000_000)
    tree.fill(rng.random(1_000_000))
    leaves, masses = rng.integers(0, 1_000_000, (300, 64)), rng.random((300, 64))
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        for row, mass in zip(leaves, masses, strict=True):
            tree.set(row, mass)
        best = min(best, time.process_time() - start)
    assert leaves.size / best > 200_000
