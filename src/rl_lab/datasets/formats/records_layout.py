"""RL Lab's records as flat arrays: the layout of its own npz, pt and CSV files and of dataset folders.

Row t holds `observation.<key>`, `reward` (received on arriving), `is_first`, `is_last`, `is_terminal`, and the action
chosen after seeing it; every episode ends with a record whose action is zero. Data without rewards have no `reward`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from rl_lab.datasets.columns import Column
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.errors import DataError
from rl_lab.records import Fields

METADATA = "rl_lab"
LAYOUT_VERSION = 1
FLAGS = ("is_first", "is_last", "is_terminal")


def metadata_text(attributes: Attributes) -> str:
    return json.dumps({"version": LAYOUT_VERSION, **attributes.to_dict()})


def record_parts(episodes: Iterable[Episode]) -> Iterator[Fields]:
    """The records of each episode, without `reward` where the data have none."""
    for episode in episodes:
        records = episode.with_last_observation("auto").to_records()
        if episode.reward is None:
            del records["reward"]
        yield records


def joined_records(episodes: Iterable[Episode]) -> Fields:
    """All records end to end."""
    parts = list(record_parts(episodes))
    if not parts:
        raise DataError("There is no episode to write: the dataset is empty.")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def episodes_of_records(columns: Mapping[str, Column], place: str) -> Iterator[Episode]:
    """Episodes of columns that are records, each read when it is asked for."""
    missing = [name for name in ("action", *FLAGS) if name not in columns]
    if missing:
        raise DataError(f"{place}: the records lack {', '.join(missing)}.")
    rows = {name: column.shape[0] for name, column in columns.items()}
    if len(set(rows.values())) > 1:
        name, other = min(rows, key=rows.__getitem__), max(rows, key=rows.__getitem__)
        raise DataError(f"{place}: '{name}' has {rows[name]} rows and '{other}' has {rows[other]}: expected as many.")
    first = np.asarray(columns["is_first"][:]).astype(bool)
    if not len(first):
        return
    starts = np.unique(np.append(0, np.flatnonzero(first)))
    for start, end in zip(starts.tolist(), np.append(starts[1:], len(first)).tolist(), strict=True):
        fields = {name: np.asarray(column[start:end]) for name, column in columns.items()}
        rewarded = "reward" in fields
        if not rewarded:
            fields["reward"] = np.zeros(end - start, np.float32)
        yield Episode.from_records(fields, rewarded=rewarded)
