"""Checkpoints: written whole or not at all, checked when they are read, loaded without executing code."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_lab import ranks
from rl_lab.data_sources.base import DataSource
from rl_lab.errors import CheckpointError
from rl_lab.orchestration.files import read_json

VERSION = 1
MANIFEST, AGENT_FILE, TRAINING_FILE, SOURCES = "manifest.json", "agent.pt", "training.pt", "sources"
AGENT_KEYS = ("components", "controllers", "workflow_state")  # what it takes to act
BEST = "best"
SHARED_KEYS = ("components", "controllers", "optimizers")  # the same on every rank
_MANIFEST_KEYS = {"version": int, "workflow": str, "step": int, "files": dict}


def share_file(rank: int) -> str:
    """The training state of a rank."""
    return TRAINING_FILE if rank == 0 else f"training-{rank}.pt"


def share_folder(rank: int) -> str:
    """The data sources of a rank."""
    return SOURCES if rank == 0 else f"{SOURCES}-{rank}"


@dataclass(frozen=True)
class Share:
    """The part of a checkpoint that one rank wrote."""

    state: dict[str, Any]
    sources: dict[str, dict[str, Any]]
    folder: Path  # with the large arrays of its data sources


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    workflow: str
    step: int
    state: dict[str, Any]  # of this rank; of the first one where there were other ranks than now
    # This rank's, or all where there were other ranks than now; none where only the agent was asked for.
    shares: list[Share] = field(default_factory=list)
    ranks: int = 1  # that made it
    env_steps: int | None = None  # of the agent in best/, which `step` counts together with offline updates

    @property
    def is_of_these_ranks(self) -> bool:
        """Whether as many ranks made it as there are now."""
        return self.ranks == ranks.count()

    def restore_source(self, name: str, source: DataSource, own: slice) -> None:
        """`own`: the environments of this rank, counted over all ranks."""
        if any(name not in share.sources for share in self.shares):
            raise CheckpointError(f"{self.path} holds no data source '{name}': it was made with another configuration.")
        saved = [(share.sources[name], share.folder / name) for share in self.shares]
        if self.is_of_these_ranks:
            source.load_state_dict(*saved[0])
        else:
            source.load_shares(saved, own)


class CheckpointManager:
    """The checkpoints of one run: `step-<n>/`, the link `latest`, and `best/`, which holds what it takes to act."""

    def __init__(self, folder: Path, *, workflow: str, keep: int = 2) -> None:
        self.folder, self.workflow, self.keep = Path(folder), workflow, keep

    # Writing ----------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], sources: Mapping[str, DataSource]) -> Path:
        """Write `step-<step>`; when this returns, it is safely on disk and `latest`."""
        target = self.folder / f"step-{step}"

        def fill(folder: Path) -> None:
            ranks.shared(folder)
            agent = {key: value for key, value in state.items() if key in AGENT_KEYS}
            _save(agent, folder / AGENT_FILE)
            _save_training(state, sources, folder, left_out=AGENT_KEYS)
            ranks.wait_for_all()

        if ranks.is_first():
            self._write(target, fill, step, ranks=ranks.count())
            self._point_latest(target)
            self._prune(step)
        else:
            _save_training(state, sources, ranks.shared(None), left_out=SHARED_KEYS)
            ranks.wait_for_all()
        ranks.wait_for_all()
        for source in sources.values():
            source.committed()
        return target

    def save_best(self, step: int, state: Mapping[str, Any], score: float, *, env_steps: int | None = None) -> Path:
        """Keep what it takes to act as `best/`; the score is that of its own evaluation."""
        agent = {key: value for key, value in state.items() if key in AGENT_KEYS}
        target = self.folder / BEST
        if not ranks.is_first():
            return target
        self._write(target, lambda folder: _save(agent, folder / AGENT_FILE), step, score=score, env_steps=env_steps)
        return target

    def _write(self, target: Path, fill: Any, step: int, **extra: Any) -> None:
        temporary = self.folder / f".tmp-{target.name}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            fill(temporary)
            manifest = {
                "version": VERSION,
                "workflow": self.workflow,
                "step": step,
                **extra,
                "files": _describe(temporary),
            }
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
            _sync_tree(temporary)
            self._put_in_place(temporary, target)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            shutil.rmtree(temporary, ignore_errors=True)
            last = self.latest()
            kept = f"The last one, {last}, is whole." if last else "There is no earlier one."
            raise CheckpointError(
                f"The checkpoint of step {step} could not be written to {self.folder}: {error}. {kept} Free some space"
                " (see also checkpoint.keep and the replay's capacity), then go on with training.resume_path."
            ) from error

    def _put_in_place(self, temporary: Path, target: Path) -> None:
        old = self.folder / f".old-{target.name}"
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)  # `recover` brings it back if the process dies before the next line is done
        os.rename(temporary, target)
        _sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _point_latest(self, target: Path) -> None:
        link = self.folder / f".latest-{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        os.replace(link, self.folder / "latest")
        _sync(self.folder)

    def _prune(self, step: int) -> None:
        """Keep the newest ones; those beyond `step` belong to a future that was given up."""
        found = self.available()
        for number in [number for number in found if number > step] + [n for n in found if n <= step][: -self.keep]:
            self._remove(found[number])

    def forget_after(self, step: int) -> None:
        """Remove what is younger than `step`, which the run went back to: it belongs to a future that was given up."""
        found = self.available()
        if step in found:
            self._point_latest(found[step])
        for number, path in found.items():
            if number > step:
                self._remove(path)
        best = self.best()
        if best is not None and not self._step_of(best) <= step:
            self._remove(best)

    def _remove(self, path: Path) -> None:
        """Take its name away first: a process that is killed in between leaves no half of a checkpoint behind."""
        gone = self.folder / f".tmp-{path.name}-{os.getpid()}"
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _step_of(self, path: Path) -> float:
        """The step that a manifest states; infinite where it states none."""
        step = (read_json(path / MANIFEST) or {}).get("step")
        return step if isinstance(step, int) else math.inf

    # Finding ----------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Tidy up after a process that was killed while it wrote. Call it before the first save."""
        for old in self.folder.glob(".old-*"):
            target = self.folder / old.name.removeprefix(".old-")
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.rename(old, target)
        for left_over in [*self.folder.glob(".tmp-*"), *self.folder.glob(".latest-*")]:
            if left_over.is_symlink() or left_over.is_file():
                left_over.unlink()
            else:
                shutil.rmtree(left_over, ignore_errors=True)

    def available(self) -> dict[int, Path]:
        """The checkpoints by step, oldest first."""
        found = {}
        for path in self.folder.glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isdecimal() and path.is_dir():
                found[int(number)] = path
        return dict(sorted(found.items()))

    def newest_first(self) -> list[Path]:
        """The checkpoints to go back to: `latest`, then the older ones."""
        latest = self.latest()
        steps = list(self.available().values())
        older = steps[: steps.index(latest)] if latest in steps else steps
        return [*([latest] if latest is not None else []), *reversed([path for path in older if path != latest])]

    def latest(self) -> Path | None:
        """The newest checkpoint: where `latest` points, or the highest step where that link is missing."""
        link = self.folder / "latest"
        if (link / MANIFEST).is_file():
            return link.resolve()
        found = list(self.available().values())
        return found[-1] if found else None

    def best(self) -> Path | None:
        path = self.folder / BEST
        return path if (path / MANIFEST).is_file() else None

    # Reading ----------------------------------------------------------------------------------------------------------

    def load(self, path: Path | None = None, *, agent_only: bool = False) -> Checkpoint:
        """Read and verify a checkpoint (the latest one). `agent_only` leaves training state and data sources out."""
        path = path or self.latest()
        if path is None:
            raise CheckpointError(f"There is no checkpoint in {self.folder}: the run was stopped before its first one.")
        manifest = self._verified_manifest(path, agent_only=agent_only)
        state, shares, count = self._read(path, AGENT_FILE, AGENT_KEYS), list[Share](), _ranks_in(manifest)
        if not agent_only:
            first = self._read(path, TRAINING_FILE, ("state", "sources"))
            state = {**state, **first["state"]}
            for rank in (ranks.rank(),) if count == ranks.count() else range(count):
                read = first if rank == 0 else self._read(path, share_file(rank), ("state", "sources"))
                shares.append(Share({**state, **read["state"]}, read["sources"], path / share_folder(rank)))
            state = shares[0].state
        env_steps = manifest.get("env_steps")
        env_steps = env_steps if isinstance(env_steps, int) else None
        return Checkpoint(path, manifest["workflow"], manifest["step"], state, shares, count, env_steps)

    def _verified_manifest(self, path: Path, *, agent_only: bool) -> dict[str, Any]:
        manifest = read_json(path / MANIFEST)
        if manifest is None:
            how = "is missing" if not (path / MANIFEST).exists() else "is damaged"
            raise CheckpointError(f"{path / MANIFEST} {how}, so this is no whole checkpoint.{self._fallback(path)}")
        for key, kind in _MANIFEST_KEYS.items():
            if not isinstance(manifest.get(key), kind):
                raise CheckpointError(
                    f"{path / MANIFEST} is damaged: '{key}' is {manifest.get(key)!r}.{self._fallback(path)}"
                )
        if manifest["version"] > VERSION:
            raise CheckpointError(
                f"{path} has checkpoint version {manifest['version']}; this RL Lab reads up to {VERSION}."
                " Update RL Lab."
            )
        if manifest["workflow"] != self.workflow:
            raise CheckpointError(
                f"{path} was made by the workflow '{manifest['workflow']}', but this run is '{self.workflow}'."
                " Resume it with its own experiment."
            )
        if not agent_only and TRAINING_FILE not in manifest["files"]:
            raise CheckpointError(
                f"{path} holds only what it takes to act. Training resumes from {self.folder}/latest."
            )
        files: dict[str, Any] = manifest["files"]
        for name in [AGENT_FILE] if agent_only else list(files):
            problem = _file_problem(path / name, files.get(name))
            if problem:
                raise CheckpointError(f"{path / name} {problem}.{self._fallback(path)}")
        return manifest

    def _read(self, path: Path, name: str, keys: Sequence[str]) -> dict[str, Any]:
        try:
            value: Any = torch.load(path / name, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for a damaged file
            text = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{path / name} cannot be read: {text}.{self._fallback(path)}") from error
        missing = [key for key in keys if not isinstance(value, dict) or not isinstance(value.get(key), dict)]
        if missing:
            raise CheckpointError(
                f"{path / name} is not what a checkpoint holds: it has no '{missing[0]}'.{self._fallback(path)}"
            )
        return dict(value)

    def _fallback(self, path: Path) -> str:
        older = [str(other) for other in self.available().values() if other.resolve() != path.resolve()]
        if older:
            return f" An older checkpoint exists: resume with training.resume_path={older[-1]}"
        return " There is no other checkpoint in this run."


def ranks_of(path: Path) -> int:
    """The number of ranks that made a checkpoint."""
    return _ranks_in(read_json(path / MANIFEST) or {})


def _ranks_in(manifest: Mapping[str, Any]) -> int:
    count = manifest.get("ranks", 1)
    return count if isinstance(count, int) and count > 0 else 1


def _save_training(
    state: Mapping[str, Any], sources: Mapping[str, DataSource], folder: Path, *, left_out: Sequence[str]
) -> None:
    """The training state of this rank and its data sources."""
    saved = {}
    for name, source in sources.items():
        place = folder / share_folder(ranks.rank()) / name
        place.mkdir(parents=True)
        saved[name] = source.state_dict(place)
    own = {key: value for key, value in state.items() if key not in left_out}
    _save({"state": own, "sources": saved}, folder / share_file(ranks.rank()))


def _save(value: Mapping[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(dict(value), file)


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file."""
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": _checksum(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _checksum(path: Path) -> str:
    value = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def _file_problem(path: Path, entry: Any) -> str | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("bytes"), int):
        return "is not described in the manifest, which is damaged"
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"is truncated: {size} bytes instead of {entry['bytes']}" if size < entry["bytes"] else "has grown"
    if _checksum(path) != entry.get("crc32"):
        return "is damaged: its checksum does not match"
    return None


def _sync_tree(folder: Path) -> None:
    paths: Iterable[Path] = [*folder.rglob("*"), folder]
    for path in paths:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
