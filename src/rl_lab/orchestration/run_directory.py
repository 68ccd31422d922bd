"""The directory of one run: making it, finding it, locking it, and the small files in it. Torch-free."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rl_lab.errors import RLLabError, RunNotFoundError, nearest

Status = Literal["running", "completed", "interrupted", "failed"]
RUN_FILE = "run.json"
_REPORTED_PACKAGES = (
    "rl-lab",
    "torch",
    "numpy",
    "gymnasium",
    "hydra-core",
    "ale-py",
    "dm-control",
    "mujoco",
    "minigrid",
)


class RunLockedError(RLLabError):
    """Another live process writes this run."""


class RunDirectory:
    """`experiments/<experiment.name>/<date-time>-s<seed>/` and what is in it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, root: Path | str, experiment: str, seed: int) -> RunDirectory:
        """A new directory; simultaneous starts get different ones."""
        parent = Path(root) / experiment
        parent.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        for attempt in range(10_000):
            path = parent / (f"{stamp}-s{seed}" if attempt == 0 else f"{stamp}-{attempt}-s{seed}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return cls(path)
        raise RLLabError(f"No free name for a run in {parent}. Remove old runs, or set run_root to another folder.")

    # The files --------------------------------------------------------------------------------------------------------

    @property
    def run_json(self) -> Path:
        return self.path / RUN_FILE

    @property
    def config_yaml(self) -> Path:
        return self.path / "config.yaml"

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
        """Write a whole file or leave the old one (config.yaml, plan.txt)."""
        write_atomic(self.path / name, text)

    def info(self) -> dict[str, Any]:
        """run.json, or nothing where there is none yet."""
        return read_json(self.run_json) or {}

    def start(self, *, device: str, parameters: Mapping[str, int], argv: Sequence[str] = (), **extra: Any) -> None:
        """Write run.json of a run that starts or goes on. `parameters`: trainable counts by component."""
        before = self.info()
        now = timestamp()
        record = {
            **before,
            "name": f"{self.path.parent.name}/{self.path.name}",
            "status": "running",
            "start": before.get("start", now),
            "resumed": [*before.get("resumed", []), now] if before else [],
            "end": None,
            "error": None,
            "device": device,
            "parameters": {"total": sum(parameters.values()), **parameters},
            "argv": list(argv) if argv or not before else before.get("argv", []),
            "versions": versions(),
            "commit": git_commit(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "pid": os.getpid(),
            **extra,
        }
        write_atomic(self.run_json, to_json(record))

    def finish(self, status: Status, error: str | None = None) -> None:
        """Close run.json. A full disk must not hide the error that ended the run."""
        record = {**self.info(), "status": status, "end": timestamp(), "error": error}
        try:
            write_atomic(self.run_json, to_json(record))
        except OSError:
            if error is None:
                raise

    def write_summary(self, values: Mapping[str, Any]) -> None:
        write_atomic(self.summary_json, to_json(values))

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

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing this run. The lock of a process that is gone does not count."""
        path = self.path / "lock.json"
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": _process_start(os.getpid())}
        while True:
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                break
            except FileExistsError:
                holder = read_json(path)
                if holder and _is_alive(holder):
                    raise RunLockedError(
                        f"{self.path} is being written by process {holder.get('pid')} on {holder.get('host')}. Wait for"
                        f" it or stop it; if it is gone for certain, remove {path}."
                    ) from None
                path.unlink(missing_ok=True)
        with os.fdopen(descriptor, "w") as file:
            json.dump(owner, file)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _process_start(pid: int) -> str:
    """Tells a process from a later one with the same id, where the system says (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_alive(holder: Mapping[str, Any]) -> bool:
    if holder.get("host") != socket.gethostname():
        return True  # cannot be looked at from here
    pid = int(holder.get("pid", 0))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is there, and another user's
    return holder.get("started", "") in ("", _process_start(pid))


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
    files = [*Path(root).glob(f"*/*/{RUN_FILE}"), *Path(root).glob(f"*/*/*/{RUN_FILE}")]
    # The folder's name is the time of the start; the file's time only orders runs of the same second.
    ordered = sorted(files, key=lambda file: (file.parent.name[:15], file.stat().st_mtime_ns))
    return [RunDirectory(file.parent) for file in ordered]


# Small files ----------------------------------------------------------------------------------------------------------


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one step: readers and a crash see the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where the file is missing or not whole."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def to_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, default=str) + "\n"


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
    """The commit that this code is at (with `-dirty` where it was changed), or None for an installed copy."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
