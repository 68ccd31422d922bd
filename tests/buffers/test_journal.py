"""Undo journals on their own: whole entries are undone in reverse, a torn one is ignored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rl_lab.buffers.journal import UndoJournals
from rl_lab.errors import CheckpointError


def undone(folder: Path, number: int) -> list[tuple[int, list[int], list[int]]]:
    seen = []
    journals = UndoJournals(folder, [2, 3])
    journals.undo(number, lambda field, rows, old: seen.append((field, rows.tolist(), old.ravel().tolist())))
    journals.close()
    return seen


def write(folder: Path, number: int, entries: list[tuple[int, list[int], list[int]]]) -> list[int]:
    """Sizes of the file after each entry."""
    journals, sizes = UndoJournals(folder, [2, 3]), []
    journals.open(number)
    for field, rows, old in entries:
        journals.append(field, np.array(rows), np.array(old, np.uint8).reshape(len(rows), -1))
        sizes.append((folder / f"journal-{number:08d}.undo").stat().st_size)
    journals.close()
    return sizes


ENTRIES = [(0, [5, 7], [1, 2, 3, 4]), (1, [5], [6, 7, 8]), (0, [9], [0, 255])]


def test_entries_are_undone_from_the_newest_to_the_oldest(tmp_path):
    write(tmp_path, 3, ENTRIES)
    write(tmp_path, 4, [(1, [2], [1, 1, 1])])
    assert undone(tmp_path, 3) == [(1, [2], [1, 1, 1]), *reversed(ENTRIES)]
    assert undone(tmp_path, 3) == []  # done once, the journal is empty and later ones are gone


@pytest.mark.parametrize("damage", ["cut off", "changed"])
def test_a_torn_entry_is_ignored_wherever_it_is_torn(damage, tmp_path):
    sizes = write(tmp_path, 0, ENTRIES)
    content = (tmp_path / "journal-00000000.undo").read_bytes()
    for position in range(sizes[-1]):
        torn = content[:position] + (
            b"" if damage == "cut off" else bytes([content[position] ^ 1]) + content[position + 1 :]
        )
        (tmp_path / "journal-00000000.undo").write_bytes(torn)
        whole = sum(size <= position for size in sizes)
        assert undone(tmp_path, 0) == ENTRIES[:whole][::-1]


def test_only_old_journals_are_dropped(tmp_path):
    for number in (1, 2, 3):
        write(tmp_path, number, ENTRIES)
    UndoJournals(tmp_path, [2, 3]).drop(before=2)
    assert UndoJournals(tmp_path, [2, 3]).numbers() == [2, 3]
    with pytest.raises(CheckpointError, match="no journal 1"):
        undone(tmp_path, 1)
