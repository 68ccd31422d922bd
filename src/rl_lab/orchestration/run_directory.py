"""The directory of one run: making it, finding it, locking it, and the small files in it. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rl_lab.errors import RLLabError, RunNotFoundError, nearest
from rl_lab.orchestration.files import NO_ROOM, overwrite, read_json, to_json, write_atomic
from rl_lab.orchestration.provenance import CONFIG_FILE, RUN_FILE, origin_of, write_protected
from rl_lab.orchestration.run_lock import run_lock

HEARTBEAT_FILE = "heartbeat.json"
Status = Literal["running", "completed", "interrupted", "failed"]
_FILES = ("manifest.json", CONFIG_FILE, RUN_FILE, "metrics.jsonl", "events.jsonl", "summary.json", "plan.txt",
          "report.html", "lock.json", "heartbeat.json")  # fmt: skip
_FOLDERS = ("checkpoints", "videos", "imagination", "planning", "tensorboard", "data")
_REPORTED_PACKAGES = (
    "rl-lab",
    "torch",
    "numpy",
    "gymnasium",
    "hydra-core",
    "ale-py",
    "dm-control",
    "mujoco",
    "minatar",
    "minigrid",
)


class RunDirectory:
    """`experiments/<experiment.name>/<date-time>-s<seed>/` and what is in it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._inode: int | None = None

    def require_present(self) -> None:
        """Fail where the directory was deleted or exchanged since the first call: what is written now would be lost."""
        try:
            inode = self.path.stat().st_ino
        except OSError:
            inode = None
        self._inode = self._inode or inode
        if inode is None or inode != self._inode:
            raise RLLabError(
                f"{self.path} is gone: it was deleted or moved while the run wrote it. Nothing more can be saved, so"
                " the run stops. Start it anew."
            )

    @contextlib.contextmanager
    def required(self) -> Iterator[None]:
        """An error of the file system within the block says so where the directory is gone."""
        try:
            yield
        except OSError:
            self.require_present()
            raise

    def misplaced(self) -> str | None:
        """A sentence on a folder in the place of one of the run's files, or a file in that of a folder; or None."""
        for names, is_kind, kind in ((_FILES, Path.is_file, "file"), (_FOLDERS, Path.is_dir, "folder")):
            for name in names:
                if os.path.lexists(self.path / name) and not is_kind(self.path / name):
                    return f"its {name} is not the {kind} that it is in every run"
        return None

    @classmethod
    def create(
        cls, root: Path | str, experiment: str, seed: int, *, config: str | None = None, **info: Any
    ) -> RunDirectory:
        """A new directory, with config.yaml and a first run.json in it from the moment that it has its name.

        A process that is killed later leaves a run that can be started again in place. Simultaneous starts get
        different directories.
        """
        parent = Path(root) / experiment
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            raise RLLabError(
                f"run_root={root}: the folder {parent} cannot be made ({error.strerror}). Name one that can be written."
            ) from error
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        staging = parent / f".new-{os.getpid()}-{secrets.token_hex(4)}"
        for attempt in range(10_000):
            path = parent / (f"{stamp}-s{seed}" if attempt == 0 else f"{stamp}-{attempt}-s{seed}")
            if path.exists():
                continue
            try:
                staging.mkdir(exist_ok=True)
                if config is not None:
                    write_protected(staging, CONFIG_FILE, config, place=path, mark=True)
                first = {"name": f"{parent.name}/{path.name}", "status": "running", "start": timestamp(), **info}
                write_protected(staging, RUN_FILE, to_json(first))
                os.rename(staging, path)
            except OSError:
                if path.exists():  # another start took the name in between
                    continue
                shutil.rmtree(staging, ignore_errors=True)
                raise
            return cls(path)
        raise RLLabError(f"No free name for a run in {parent}. Remove old runs, or set run_root to another folder.")

    # The files --------------------------------------------------------------------------------------------------------

    @property
    def run_json(self) -> Path:
        return self.path / RUN_FILE

    @property
    def config_yaml(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def metrics_jsonl(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary_json(self) -> Path:
        return self.path / "summary.json"

    @property
    def events_jsonl(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_text(self, name: str, text: str) -> None:
        """Write a whole file or leave the old one (plan.txt)."""
        write_atomic(self.path / name, text)

    def write_config(self, text: str, *, mark: bool) -> None:
        """Replace config.yaml. `mark`: it is this user's own, and may name any code when the run is opened again."""
        write_protected(self.path, CONFIG_FILE, text, mark=mark)

    def info(self) -> dict[str, Any]:
        """run.json, or nothing where there is none yet."""
        return read_json(self.run_json) or {}

    def start(self, *, device: str, parameters: Mapping[str, int], argv: Sequence[str] = (), **extra: Any) -> None:
        """Write run.json of a run that starts or goes on. `parameters`: trainable counts by component."""
        before = self.info()
        started_before = "parameters" in before
        now = timestamp()
        record = {
            **before,
            "name": f"{self.path.parent.name}/{self.path.name}",
            "status": "running",
            "start": before["start"] if isinstance(before.get("start"), str) else now,
            "resumed": [*_times(before.get("resumed")), now] if started_before else [],
            "end": None,
            "error": None,
            "device": device,
            "parameters": {"total": sum(parameters.values()), **parameters},
            "argv": list(argv) or before.get("argv", []),
            "versions": versions(),
            "commit": git_commit(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "pid": os.getpid(),
            **extra,
        }
        write_protected(self.path, RUN_FILE, to_json(record))

    def finish(self, status: Status, error: str | None = None, **extra: Any) -> None:
        """Close run.json. On a full disk that is done in its place, where no further block is needed: how the run ended
        must be told, and the error that ended it must not be hidden by another."""
        cause = error[:1000] if error is not None else None
        record = {**self.info(), "status": status, "end": timestamp(), "error": cause, **extra}
        try:
            write_protected(self.path, RUN_FILE, to_json(record))
        except OSError:
            if error is None:
                raise
            with contextlib.suppress(OSError):
                write_protected(self.path, RUN_FILE, to_json(record), write=overwrite)

    def set_damaged_aside(self) -> str | None:
        """Copy a run.json that is not as it was written to run.damaged.json; a sentence on it, or None."""
        if RUN_FILE not in origin_of(self.path).changed:
            return None
        if not self.run_json.is_file():
            return f"{RUN_FILE} was missing: the run goes on with a new one."
        copy = self.path / "run.damaged.json"
        shutil.copyfile(self.run_json, copy)
        return f"{RUN_FILE} was not as the run had written it: the run goes on with a new one and keeps {copy.name}."

    def write_summary(self, values: Mapping[str, Any]) -> None:
        write_atomic(self.summary_json, to_json(values))

    def heartbeat(self, values: Mapping[str, Any]) -> None:
        """Renew heartbeat.json: that the run's process was alive at this time, and how far it was."""
        record = {"time": timestamp(), "host": socket.gethostname(), "pid": os.getpid(), **values}
        write_atomic(self.path / HEARTBEAT_FILE, to_json(record))

    # Events -----------------------------------------------------------------------------------------------------------

    def event(self, kind: str, message: str, env_steps: int) -> None:
        """Append one line to events.jsonl: a restarted worker, a rollback, a resume."""
        line = json.dumps({"time": timestamp(), "env_steps": env_steps, "kind": kind, "message": message})
        with open(self.events_jsonl, "a") as file:
            file.write(line + "\n")

    def events_position(self) -> int:
        return self.events_jsonl.stat().st_size if self.events_jsonl.exists() else 0

    def truncate_events(self, position: int) -> None:
        """Forget the events that came after a checkpoint."""
        if self.events_position() > position:
            os.truncate(self.events_jsonl, position)

    # The lock ---------------------------------------------------------------------------------------------------------

    def lock(self) -> AbstractContextManager[None]:
        """Keep other processes from writing this run, until the block or the process ends."""
        return run_lock(self.path)


def _times(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# Finding a run --------------------------------------------------------------------------------------------------------


def find_run(ref: str | Path, root: Path | str = "experiments") -> RunDirectory:
    """A run by its directory, its name, its experiment's name (the newest of it), or `latest`."""
    path = Path(ref).expanduser()
    if (path / RUN_FILE).is_file() or (path / "config.yaml").is_file():
        return RunDirectory(path)
    runs = list_runs(root)
    text = str(ref).rstrip("/")
    if text == "latest":
        if runs:
            return runs[-1]
        raise RunNotFoundError(f"There is no run in {Path(root).resolve()} yet. Start one with: rl-lab train")
    for matches in (
        [run for run in runs if text in (run.path.name, f"{run.path.parent.name}/{run.path.name}")],
        [run for run in runs if text == run.path.parent.name],
    ):
        if matches:
            return matches[-1]
    names = {f"{run.path.parent.name}/{run.path.name}" for run in runs} | {run.path.parent.name for run in runs}
    short = {run.path.name for run in runs}
    hint = nearest(text, names | short if len(names) <= 20 else {*sorted(names)[-20:], *short})
    raise RunNotFoundError(
        f"No run '{text}': it is neither a run directory nor the name of a run in {Path(root).resolve()}.{hint}"
        f"{'' if runs else ' There are no runs yet.'}"
    )


def list_runs(root: Path | str = "experiments") -> list[RunDirectory]:
    """Every run under `root`, the newest last."""
    found = [*Path(root).glob(f"*/*/{RUN_FILE}"), *Path(root).glob(f"*/*/*/{RUN_FILE}")]
    files = [file for file in found if not file.parent.name.startswith(".")]  # those are not made yet
    # The folder's name is the time of the start; the file's time only orders runs of the same second.
    ordered = sorted(files, key=lambda file: (file.parent.name[:15], file.stat().st_mtime_ns))
    return [RunDirectory(file.parent) for file in ordered]


# Facts ---------------------------------------------------------------------------------------------------------------


def timestamp() -> str:
    """Now, with the time zone."""
    return datetime.fromtimestamp(time.time()).astimezone().isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Python and the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in _REPORTED_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit that this code is at, with `-dirty` where tracked files differ from it; None for an installed copy.
    `results/` does not count: one row is written there while the next is measured."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)results")
    return f"{commit}-dirty" if commit and changes else commit


def _git(*arguments: str) -> str | None:
    """The output of a git command in the repository of this file; None without git or without a repository."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
