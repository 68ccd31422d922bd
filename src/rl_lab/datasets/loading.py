"""From the episodes of files to the records that a run draws its batches from: in memory, or where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rl_lab.buffers.storage import row_bytes
from rl_lab.datasets.formats.base import Reader
from rl_lab.datasets.formats.folder import FolderReader
from rl_lab.datasets.importing import ImportReport, RecordImporter
from rl_lab.datasets.statistics import FieldStatistics, StatisticsCollector
from rl_lab.datasets.storage import SMALL_FIELD, DatasetStorage, RecordStore
from rl_lab.environments.adapter import ActionConverter
from rl_lab.errors import DataError
from rl_lab.records import OBSERVATION_PREFIX, FieldSpec

UNLIMITED = 1 << 62  # bytes


class LoadedRecords(NamedTuple):
    """The records of a dataset, and what was seen on the way."""

    storage: DatasetStorage
    statistics: dict[str, FieldStatistics]
    report: ImportReport


def load_records(
    readers: Sequence[Reader],
    *,
    fields: Mapping[str, FieldSpec],  # those of the run
    actions: ActionConverter | None,
    settings: Mapping[str, Any],  # of the RecordImporter
    episodes: tuple[int, int | None],  # [from, to) of each reader
    budget: int,  # bytes in memory; what exceeds them is read from files
    folder: Path,  # for such files
) -> LoadedRecords:
    """Take in every episode: checked, converted and counted."""
    in_place = _fields_in_place(readers, fields, budget) if episodes[0] == 0 else {}
    taken = {name: spec for name, spec in fields.items() if name not in in_place}
    importer, collector = RecordImporter(taken, actions, **settings), StatisticsCollector()
    store = RecordStore(folder, UNLIMITED if in_place else budget)
    start, stop = episodes
    for reader in readers:
        for records in importer.records(reader, first=start, stop=stop):
            collector.add(records)
            store.append(records)
    if not importer.report.episodes:
        raise DataError(f"{', '.join(str(reader.path) for reader in readers)}: no episodes. The dataset is empty.")
    storage = store.finish()
    if in_place:
        (reader,) = readers
        assert isinstance(reader, FolderReader)
        files = {name: (reader.file(name), spec) for name, spec in in_place.items()}
        storage = DatasetStorage(storage.arrays, files, storage.rows)
    return LoadedRecords(storage, collector.result(), importer.report)


def _fields_in_place(readers: Sequence[Reader], fields: Mapping[str, FieldSpec], budget: int) -> dict[str, FieldSpec]:
    """Observations of a dataset folder that are read where they lie: too large for memory, and stored as the run has
    them."""
    if len(readers) != 1 or not isinstance(readers[0], FolderReader):
        return {}
    reader = readers[0]
    sizes = {name: row_bytes(spec) * reader.records for name, spec in reader.fields.items()}
    if sum(sizes.values()) <= budget:
        return {}
    large = {
        name: spec
        for name, spec in reader.fields.items()
        if sizes[name] > SMALL_FIELD and name.startswith(OBSERVATION_PREFIX) and fields.get(name) == spec
    }
    reader.leave_out(large)
    return large
