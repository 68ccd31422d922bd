"""Where a run comes from, and whether its small files are still as they were written. Torch-free.

A run directory has a `manifest.json` with the SHA-256 of config.yaml and run.json, so that a damaged or edited file is
noticed. Beside the hashes stand the marks of runs that were made here: HMACs, keyed with a secret in the user's own
state directory, of the configuration together with the place of the directory. One mark names its path, the other its
inode, and either will do: a directory may be moved, or the machine restarted. Neither survives a copy to another place
or another machine, and neither holds for another configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rl_lab.orchestration.files import read_json, to_json, write_atomic
from rl_lab.reading import read_bytes

MANIFEST = "manifest.json"
CONFIG_FILE, RUN_FILE = "config.yaml", "run.json"
PROTECTED = (CONFIG_FILE, RUN_FILE)
_KEY_BYTES = 32
_VERSIONS = 2  # hashes of a file that count: the newest, and the one before it, in case its replacement was cut off
_log = logging.getLogger(__name__)


class Origin(NamedTuple):
    """The manifest's facts about a run."""

    is_local: bool  # made by this user on this machine, at this place, with this configuration
    changed: tuple[str, ...]  # protected files that are not as they were written


def origin_of(folder: Path, config: bytes | None = None) -> Origin:
    """Look a run over. `config` is the content of config.yaml where the caller has read it already."""
    manifest = read_json(folder / MANIFEST) or {}
    files = manifest.get("files")
    hashes: dict[str, Any] = files if isinstance(files, dict) else {}
    contents = {name: _read(folder / name) for name in PROTECTED}
    if config is not None:
        contents[CONFIG_FILE] = config
    changed = tuple(name for name, content in contents.items() if not _matches(content, hashes.get(name)))
    marks = manifest.get("marks")
    key, text = _key(), contents[CONFIG_FILE]
    if key is None or text is None or not isinstance(marks, list) or CONFIG_FILE in changed:
        return Origin(False, changed)
    known = [mark for mark in marks if isinstance(mark, str) and mark.isascii()]
    is_local = any(hmac.compare_digest(mark, ours) for ours in _marks(key, folder, folder, text) for mark in known)
    return Origin(is_local, changed)


def write_protected(
    folder: Path,
    name: str,
    text: str,
    *,
    place: Path | None = None,
    mark: bool = False,
    write: Callable[[Path, str], None] = write_atomic,
) -> None:
    """Replace config.yaml or run.json and note its hash. `mark` says that the configuration is this user's own.

    The manifest is written first and keeps the hash of the file before, so that a crash at any moment leaves files that
    it vouches for. `place` is where the directory will be, if that is not where it is now; `write` puts a text into a
    file.
    """
    manifest = read_json(folder / MANIFEST) or {}
    files = manifest.get("files") if isinstance(manifest.get("files"), dict) else {}
    assert isinstance(files, dict)
    before = [value for value in _list(files.get(name)) if isinstance(value, str)]
    content = text.encode()
    files[name] = list(dict.fromkeys([_digest(content), *before]))[:_VERSIONS]
    marks = [value for value in _list(manifest.get("marks")) if isinstance(value, str)]
    key = _key(create=True) if mark else None
    if key is not None:
        marks = list(dict.fromkeys([*_marks(key, folder, place or folder, content), *marks]))[: 2 * _VERSIONS]
    write(folder / MANIFEST, to_json({"files": files, "marks": marks}))
    write(folder / name, text)


def _marks(key: bytes, folder: Path, place: Path, config: bytes) -> Iterator[str]:
    """The marks of a configuration in a directory: by its path and by its inode."""
    for kind, value in (("path", str(place.resolve())), ("inode", str(os.stat(folder).st_ino))):
        message = "\0".join(["rl-lab run", kind, value, _digest(config)]).encode()
        yield hmac.new(key, message, hashlib.sha256).hexdigest()


def _matches(content: bytes | None, hashes: Any) -> bool:
    """Whether a file is one that the manifest lists; what it does not list cannot be compared."""
    return hashes is None or (content is not None and _digest(content) in _list(hashes))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(path: Path) -> bytes | None:
    try:
        return read_bytes(path)
    except OSError:
        return None


# The key --------------------------------------------------------------------------------------------------------------


def key_file() -> Path:
    """The secret of this user on this machine."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "rl-lab" / "run-key"


def _key(*, create: bool = False) -> bytes | None:
    """The secret; None where there is none, or where none can be kept."""
    path = key_file()
    key = _read(path)
    if key is None and create:
        try:
            _create_key(path)
        except OSError as error:
            _log.warning("%s cannot be written (%s): runs made now will not be known as this user's own.", path, error)
        key = _read(path)
    return key if key is not None and len(key) == _KEY_BYTES else None


def _create_key(path: Path) -> None:
    """Several processes may do so at once: the first file to be linked stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
