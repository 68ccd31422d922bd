"""What every file format offers: recognising its files, reading episodes, and writing them whole or not at all."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from rl_lab.datasets.columns import FieldMapping
from rl_lab.datasets.episode import Alignment, Attributes, Episode
from rl_lab.errors import DataError, RLLabError

ALIGNMENTS = ("auto", "after", "before")


@dataclass(frozen=True)
class ReadOptions:
    """Choices of the user for facts that a file does not state itself."""

    mapping: FieldMapping = field(default_factory=dict)
    alignment: str = "auto"  # auto | after | before: which action stands beside an observation

    def alignment_or(self, recognised: Alignment) -> Alignment:
        if self.alignment not in ALIGNMENTS:
            raise DataError(f"alignment='{self.alignment}': expected {', '.join(ALIGNMENTS)}.")
        return recognised if self.alignment == "auto" else self.alignment  # type: ignore[return-value]


class Reader(ABC):
    """Episodes of a file or folder, one after another: never all of them in memory, where the format allows it."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path, self.options = path, options
        self.attributes = Attributes()
        self.notes: list[str] = []  # what was recognised and is worth knowing

    @abstractmethod
    def episodes(self) -> Iterator[Episode]: ...

    def __init_subclass__(cls, **options: Any) -> None:
        """Whatever a library raises while it reads a damaged file becomes one clear line, in every format alike."""
        super().__init_subclass__(**options)
        own = cls.__dict__.get("episodes")
        if own is None:
            return

        @wraps(own)
        def episodes(self: Reader) -> Iterator[Episode]:
            with readable(self.path):
                yield from own(self)

        cls.episodes = episodes  # type: ignore[method-assign]

    def close(self) -> None:  # noqa: B027
        """Release files."""


class Format(ABC):
    """A way to keep episodes in files."""

    name: ClassVar[str]
    suffix: ClassVar[str]  # of its files; "" for folders
    other_suffixes: ClassVar[tuple[str, ...]] = ()  # that mean the same
    needs: ClassVar[str | None] = None  # a module of the extra `data`

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path) -> bool:
        """Whether an existing path looks like one of this format's."""

    @classmethod
    @abstractmethod
    def open(cls, path: Path, options: ReadOptions) -> Reader: ...

    @classmethod
    @abstractmethod
    def write(cls, path: Path, episodes: Iterable[Episode], attributes: Attributes) -> None:
        """Write to a path that does not exist yet; called with a temporary one (see `write_whole`)."""

    @classmethod
    def require(cls) -> ModuleType | None:
        """The module that the format needs, or one line on how to get it."""
        if cls.needs is None:
            return None
        try:
            return import_module(cls.needs)
        except ImportError as error:
            raise DataError(
                f"The format '{cls.name}' needs {cls.needs}. Install the extra 'data': pip install 'rl-lab[data]'"
            ) from error


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`. It takes its place when the block ends well, and is removed when it does not."""
    if path.exists():
        raise DataError(f"{path} exists already: name another one, or remove it first.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-writing-{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Errors of libraries that read `path` become DataErrors."""
    try:
        yield
    except RLLabError:
        raise
    except Exception as error:  # each library has its own kinds
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception, field_name: str | None = None) -> DataError:
    """The one line for a file that is damaged or not what its name says."""
    where = f"{path}, field '{field_name}'" if field_name else str(path)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DataError(f"{where}: cannot be read ({reason}). The file is damaged, cut off, or not of this format.")
