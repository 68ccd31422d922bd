"""Threads that share rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rl_lab.nn.host_threads import only_small, rows_shared, share_rows


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    try:
        with rows_shared():
            yield
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [8, 101, 1000])
def test_parts_are_all_rows_in_order(two_threads: None, rows: int) -> None:
    """Each part in a thread of its own, and their number follows from the rows alone."""
    parts = share_rows(lambda first, end: (threading.get_ident(), range(first, end)), rows, least=4)
    assert len({thread for thread, _ in parts}) == len(parts) == 2
    assert [row for _, part in parts for row in part] == list(range(rows))


def test_few_rows_and_parts_of_parts_stay_together(two_threads: None) -> None:
    """What shares its rows while it works on shared ones waits for nobody."""
    assert share_rows(lambda first, end: end - first, 7, least=4) == [7]
    nested = share_rows(lambda first, end: share_rows(lambda *part: part, end - first, least=4), 64, least=4)
    assert nested == [[(0, 32)], [(0, 32)]]


@pytest.mark.parametrize("failing", [0, 32])
def test_errors_reach_the_caller(two_threads: None, failing: int) -> None:
    """From whatever thread; the next call finds all in order."""

    def work(first: int, end: int) -> int:
        if first == failing:
            raise ValueError(first)
        return end

    with pytest.raises(ValueError, match=str(failing)):
        share_rows(work, 64, least=4)
    assert share_rows(lambda first, end: end, 64, least=4) == [32, 64]


def test_torch_takes_one_thread_meanwhile() -> None:
    """Its own would wait for the cores that ours use; afterwards it has them back."""
    torch.set_num_threads(2)
    with rows_shared():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert len(share_rows(lambda *part: part, 64, least=4)) == 1


def test_large_layers_and_convolutions_are_left_to_torchs_threads() -> None:
    """They gain more by these."""
    assert only_small([nn.Linear(64, 64), nn.LayerNorm(64)])
    assert not only_small([nn.Linear(64, 64), nn.Linear(512, 512)])
    assert not only_small([nn.Conv2d(3, 3, 3)])
