"""Index arithmetic of the streams."""

from __future__ import annotations

import numpy as np

from rl_lab.buffers.streams import StreamIndex


def test_rows_follow_each_other_in_every_stream():
    """Blocks for all and for some environments, in the order given."""
    index = StreamIndex(num_envs=3, length=4)
    rows = index.append([None, np.array([1]), None, np.array([0, 2])])
    assert rows.tolist() == [0, 4, 8, 5, 1, 6, 9, 2, 10]
    assert index.written.tolist() == [3, 3, 3]
    assert index.append([None, None]).tolist() == [3, 7, 11, 0, 4, 8]
    assert index.held().tolist() == [4, 4, 4]


def test_previous_row_wraps_inside_its_stream():
    index = StreamIndex(num_envs=2, length=4)
    assert index.previous_rows(np.array([0, 3, 4, 5])).tolist() == [3, 2, 7, 4]


def test_ids_of_overwritten_and_future_records_are_not_found():
    index = StreamIndex(num_envs=2, length=4)
    index.append([None] * 6)
    alive, rows = index.locate(np.array([2, 4, 11, 12, -1]))  # records 1, 2, 5 and 6 of a stream, and nonsense
    assert alive.tolist() == [False, True, True, False, False]
    assert rows.tolist() == [2, 5]


def test_drawn_rows_match_drawn_ids():
    index, rng = StreamIndex(num_envs=2, length=10), np.random.default_rng(0)
    index.append([None] * 17)
    windows = index.draw(rng, count=50, window=4, online=False)
    alive, rows = index.locate(windows.ids.ravel())
    assert alive.all()
    assert rows.tolist() == windows.rows.ravel().tolist()
    assert (np.diff(windows.ids, axis=1) == 2).all()
    assert windows.ids.min() // 2 == 7
    assert windows.ids.max() // 2 == 16
