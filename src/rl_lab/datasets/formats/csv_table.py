"""CSV: one row a step. Columns `obs_0`, `obs_1` … of other programs, or RL Lab's records (`observation.key[0]` …)."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.datasets.columns import Steps, recognise
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.formats.base import Format, Reader, ReadOptions, unreadable
from rl_lab.datasets.formats.records_layout import episodes_of_records, metadata_text, record_parts
from rl_lab.errors import DataError
from rl_lab.records import Fields

COMMENT = "# rl_lab "  # before the metadata, on the first line
NUMBERED = re.compile(r"(.+?)(?:_(\d+)|\[(\d+)\])")


class CsvReader(Reader):
    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self._dtypes: dict[str, str] | None = None
        with open(path, newline="", encoding="utf-8") as file:
            first = file.readline()
            if first.startswith(COMMENT):
                try:
                    content = json.loads(first.removeprefix(COMMENT))
                except ValueError as error:
                    raise unreadable(path, error) from error
                self._dtypes = content.pop("dtypes")
                self.attributes = Attributes.from_dict(content)

    def episodes(self) -> Iterator[Episode]:
        columns = self._columns()
        if self._dtypes is not None:
            self._check_whole()
            typed = {name: value.astype(self._dtypes[name]) for name, value in columns.items()}
            yield from episodes_of_records(typed, str(self.path))
            return
        roles = recognise(list(columns), self.options.mapping, str(self.path))
        self.notes = list(roles.notes)
        action = columns[roles.action]
        if np.array_equal(action, np.rint(action)) and action.shape[1:] == ():
            columns[roles.action] = action.astype(np.int64)
        yield from Steps(columns, roles, str(self.path)).episodes(self.options.alignment_or("after"))

    def _check_whole(self) -> None:
        """RL Lab ends every line: a last one without its end may hold half of a number."""
        if not self.path.read_bytes().endswith(b"\n"):
            raise DataError(f"{self.path}: its last line is not complete. The file was cut off.")

    def _columns(self) -> dict[str, np.ndarray]:
        """Columns of one name with numbers behind it become one array with that many entries."""
        head, values = self._table()
        groups: dict[str, list[tuple[int, int]]] = {}
        for position, title in enumerate(head):
            match = NUMBERED.fullmatch(title)
            name, index = (match[1], int(match[2] or match[3])) if match else (title, -1)
            groups.setdefault(name, []).append((index, position))
        columns = {}
        for name, members in groups.items():
            places = [position for _, position in sorted(members)]
            columns[name] = values[:, places[0]] if members[0][0] < 0 else values[:, places]
        return columns

    def _table(self) -> tuple[list[str], np.ndarray]:
        with open(self.path, newline="", encoding="utf-8") as file:
            rows = csv.reader(line for line in file if not line.startswith("#"))
            head = next(rows, [])
            if not head:
                raise DataError(f"{self.path}: the file is empty. Expected a line with the names of the columns first.")
            table = [self._numbers(number, row, head) for number, row in enumerate(rows) if row]
        return head, np.asarray(table, np.float64).reshape(len(table), len(head))

    def _numbers(self, number: int, row: list[str], head: list[str]) -> list[float]:
        if len(row) != len(head):
            raise DataError(
                f"{self.path}, row {number}: {len(row)} values, expected {len(head)}. The file may be cut off."
            )
        numbers = []
        for title, text in zip(head, row, strict=True):
            try:
                numbers.append({"True": 1.0, "False": 0.0}[text] if text in ("True", "False") else float(text))
            except ValueError:
                raise DataError(f"{self.path}, field '{title}', row {number}: '{text}' is not a number.") from None
        return numbers


class Csv(Format):
    name, suffix = "csv", ".csv"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.suffix == ".csv"

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> Reader:
        return CsvReader(path, options)

    @classmethod
    def write(cls, path: Path, episodes: Iterable[Episode], attributes: Attributes) -> None:
        """Records, one a line. The shortest text that gives the same number back."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = None
            for part in record_parts(episodes):
                if writer is None:
                    dtypes = {name: str(value.dtype) for name, value in part.items()}
                    file.write(COMMENT + json.dumps({**json.loads(metadata_text(attributes)), "dtypes": dtypes}) + "\n")
                    writer = csv.writer(file)
                    writer.writerow([title for name, value in part.items() for title in _titles(name, value)])
                writer.writerows(_lines(part))
            if writer is None:
                raise DataError("There is no episode to write: the dataset is empty.")


def _titles(name: str, value: np.ndarray) -> list[str]:
    if value.ndim > 2:
        raise DataError(
            f"Field '{name}' has shape {value.shape[1:]}: a CSV holds numbers and vectors. Use another format."
        )
    return [name] if value.ndim == 1 else [f"{name}[{index}]" for index in range(value.shape[1])]


def _lines(part: Fields) -> Iterator[list[Any]]:
    columns = [value.reshape(len(value), -1) for value in part.values()]
    for row in range(len(columns[0])):
        yield [_text(number) for column in columns for number in column[row]]


def _text(number: Any) -> str:
    """Digits from which the same number is read back."""
    if isinstance(number, np.bool_ | np.integer):
        return str(int(number))
    return f"{number:.9g}" if number.dtype == np.float32 else repr(float(number))
