"""Opening and writing datasets of any format. The format is recognised, or named."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.formats.base import Format, Reader, ReadOptions, readable, write_whole
from rl_lab.datasets.formats.csv_table import Csv
from rl_lab.datasets.formats.d4rl import D4rl
from rl_lab.datasets.formats.folder import Folder
from rl_lab.datasets.formats.lerobot import LeRobot
from rl_lab.datasets.formats.minari import Minari
from rl_lab.datasets.formats.npz import Npz
from rl_lab.datasets.formats.pt import Pt
from rl_lab.datasets.formats.robomimic import Robomimic
from rl_lab.datasets.formats.run import Run
from rl_lab.datasets.formats.zarr_group import Zarr
from rl_lab.errors import DataError, nearest

# In the order in which they are asked whether a path is theirs: the most particular ones first.
_ALL: tuple[type[Format], ...] = (Run, Folder, LeRobot, Minari, Zarr, Robomimic, D4rl, Npz, Pt, Csv)
FORMATS: dict[str, type[Format]] = {format_.name: format_ for format_ in _ALL}
AUTO = "auto"


def find_format(name: str) -> type[Format]:
    if name not in FORMATS:
        raise DataError(f"'{name}' is not a dataset format.{nearest(name, [AUTO, *FORMATS])}")
    return FORMATS[name]


def open_dataset(path: str | Path, *, format_name: str = AUTO, options: ReadOptions | None = None) -> Reader:
    """A reader of the file or folder at `path`."""
    path = Path(path).expanduser()
    if not path.exists():
        command = f"rl-lab data record RUN --episodes 25 --output {path}"
        raise DataError(f"{path}: no such file or folder. Record one with: {command}")
    if format_name == AUTO:
        with readable(path):
            found = next((format_ for format_ in FORMATS.values() if format_.recognises(path)), None)
        if found is None:
            raise DataError(f"{path}: not a dataset of a known format ({', '.join(FORMATS)}). Name it with format=….")
    else:
        found = find_format(format_name)
    found.require()
    with readable(path):
        return found.open(path, options or ReadOptions())


def format_of_path(path: Path) -> str:
    """The format that a path to be written asks for by its suffix; a path without one is a dataset folder."""
    if not path.suffix:
        return Folder.name
    by_suffix = {  # .hdf5: D4RL's layout, which comes after robomimic's
        suffix: format_.name for format_ in _ALL for suffix in (format_.suffix, *format_.other_suffixes) if suffix
    }
    if path.suffix not in by_suffix:
        known = ", ".join(f"{suffix} ({name})" for suffix, name in by_suffix.items())
        raise DataError(f"{path}: no format has the suffix '{path.suffix}'. Known: {known}; or name it with --format.")
    return by_suffix[path.suffix]


def write_dataset(
    path: str | Path, episodes: Iterable[Episode], attributes: Attributes, *, format_name: str = AUTO
) -> Path:
    """Write episodes to a new file or folder: whole, or not at all."""
    path = Path(path).expanduser()
    format_ = find_format(format_of_path(path) if format_name == AUTO else format_name)
    format_.require()
    with write_whole(path) as temporary:
        format_.write(temporary, episodes, attributes)
    return path
