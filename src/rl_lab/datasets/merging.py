"""Several datasets as one, in any format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.files import AUTO, open_dataset, write_dataset
from rl_lab.datasets.formats.base import Reader, ReadOptions
from rl_lab.errors import DataError


def merge_datasets(
    paths: Sequence[str | Path],
    output: Path,
    *,
    format_name: str = AUTO,
    read_format: str = AUTO,
    options: ReadOptions | None = None,
) -> Path:
    """Write the episodes of all datasets, in order, to a new one. One dataset alone is converted."""
    readers = [open_dataset(path, format_name=read_format, options=options) for path in paths]
    try:
        attributes = _common(readers)
        return write_dataset(output, _episodes(readers), attributes, format_name=format_name)
    finally:
        for reader in readers:
            reader.close()


def _common(readers: Sequence[Reader]) -> Attributes:
    first = readers[0]
    for reader in readers[1:]:
        if reader.attributes.action_units != first.attributes.action_units:
            raise DataError(
                f"{reader.path} has actions in {reader.attributes.action_units} units and {first.path} in "
                f"{first.attributes.action_units} units: they cannot be merged."
            )
        one, other = first.attributes.environment, reader.attributes.environment
        if None not in (one, other) and one != other:
            raise DataError(f"{first.path} is of {one} and {reader.path} of {other}: they cannot be merged.")
    sources = {reader.attributes.recorded_from for reader in readers} - {None}
    return replace(first.attributes, recorded_from=", ".join(sorted(map(str, sources))) or None)


def _episodes(readers: Sequence[Reader]) -> Iterator[Episode]:
    shapes: dict[str, tuple[int, ...]] | None = None
    for reader in readers:
        for number, episode in enumerate(reader.episodes()):
            own = {key: value.shape[1:] for key, value in episode.observation.items()}
            own |= {"action": episode.action.shape[1:], "reward": () if episode.reward is not None else (-1,)}
            if shapes is not None and own != shapes:
                names = sorted(name for name in own.keys() | shapes.keys() if own.get(name) != shapes.get(name))
                raise DataError(
                    f"{reader.path}, episode {number}: the fields {', '.join(names)} are not those of the episodes "
                    "before it."
                )
            shapes = own
            yield episode
