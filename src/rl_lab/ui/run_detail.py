"""One run as its page shows it: facts, evaluations, media, plan, configuration, events, commands, gauges."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from rl_lab.metrics.glossary import explain, grouped
from rl_lab.metrics.run_files import RunFiles, number, read_run, video_env_steps
from rl_lab.ui.writer import writer_of

MEDIA_FOLDERS = ("videos", "imagination", "planning")
MEDIA_TYPES = {".mp4": "video/mp4", ".gif": "image/gif", ".png": "image/png", ".webp": "image/webp"}
DEFAULTS_SECONDS = 60  # composing an experiment imports Hydra and PyTorch

psutil.cpu_percent(None)  # measures from the call before; the first one has none and would say 0 %


def detail(run_id: str, folder: Path) -> dict[str, Any]:
    """Everything about a run that changes seldom. Curves are requested separately."""
    run = read_run(folder, rows=False)
    return {
        "id": run_id,
        "path": str(folder),
        "info": {key: _text(value) for key, value in run.info.items() if key not in ("parameters", "versions", "argv")},
        "parameters": run.parameters,
        "versions": _texts(run.info.get("versions")),
        "started_with": _command(run.info.get("argv")),
        "summary": {key: value for key, value in run.summary.items() if number(value) is not None},
        "plan": run.plan,
        "config": run.config_text,
        "events": [{key: _text(event.get(key)) for key in ("time", "env_steps", "kind", "message")}
                   for event in run.events[-500:]],
        "media": media(folder),
        "imagination": _imagination(run),
        "planning": {key: number(run.planning.get(key)) for key in ("expected_mean", "received_mean")},
        "commands": commands(run),
        "action_repeat": number(run.setting("environment.action_repeat")) or 1.0,
        "checkpoints": checkpoints(folder),
        "has_report": (folder / "report.html").is_file(),
    }  # fmt: skip


def media(folder: Path) -> list[dict[str, Any]]:
    """Films and pictures by folder, with the env steps that a film was taken at."""
    found = []
    for name in MEDIA_FOLDERS:
        for path in sorted((folder / name).glob("*")) if (folder / name).is_dir() else []:
            if path.suffix in MEDIA_TYPES and path.is_file():
                steps = video_env_steps(path) if name == "videos" else None
                found.append({"folder": name, "name": path.name, "env_steps": steps, "time": path.stat().st_mtime})
    return found


def media_file(folder: Path, relative: str) -> Path | None:
    """A picture or film of the run, or None for any other path: outside the run, through a link, another type."""
    base, _, name = relative.partition("/")
    if base not in MEDIA_FOLDERS or "/" in name or "\\" in name or name.startswith(".") or "\0" in name:
        return None
    path = folder / base / name
    if path.suffix not in MEDIA_TYPES or not path.is_file():
        return None
    return path if path.resolve().parent == (folder.resolve() / base) else None


def checkpoints(folder: Path) -> list[str]:
    """Names of the whole checkpoints, oldest first, `best` last."""
    place = folder / "checkpoints"
    names = [
        path.name for path in place.glob("step-*") if path.name[5:].isdecimal() and (path / "manifest.json").is_file()
    ]
    names.sort(key=lambda name: int(name[5:]))
    return names + (["best"] if (place / "best" / "manifest.json").is_file() else [])


def commands(run: RunFiles) -> list[dict[str, str]]:
    """Commands to copy: repeat, go on, evaluate, dream, compare."""
    where = shlex.quote(str(run.folder))
    entries = [("repeat", _command(run.info.get("argv"))), ("go on", f"rl-lab train training.resume_path={where}")]
    entries += [("play episodes", f"rl-lab eval {where} --episodes 20 --video"), ("dream", f"rl-lab dream {where}")]
    return [{"name": name, "command": command} for name, command in entries if command]


def explanations(names: list[str]) -> dict[str, Any]:
    """The glossary of metric names: groups in reading order, and a sentence for each name."""
    groups = [{"title": group.title, "text": group.text, "open": group.open, "names": own}
              for group, own in grouped(names)]  # fmt: skip
    return {"groups": groups, "sentences": {name: explain(name) for name in names}}


def gauges(folder: Path) -> dict[str, Any]:
    """This machine's load, and the memory and processor share of the process that writes the run."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(folder))
    entry: dict[str, Any] = {
        "cpu_percent": psutil.cpu_percent(None),
        "memory_used": memory.total - memory.available,
        "memory_total": memory.total,
        "disk_free": disk.free,
        "disk_total": disk.total,
    }
    process = writer_of(folder)
    if process is not None:
        with contextlib.suppress(psutil.Error):  # it may end at any time
            entry["process"] = {
                "pid": process.pid,
                "memory": process.memory_info().rss,
                "cpu_percent": process.cpu_percent(0.0),
                "threads": process.num_threads(),
            }
    return entry


def config_differences(folder: Path) -> dict[str, Any]:
    """The settings that differ from the experiment's defaults, composed in a process of its own."""
    path = folder / "config.yaml"
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        return {"error": "This run has no config.yaml yet."}
    return json.loads(_differences(str(path), stamp))


@lru_cache(maxsize=256)
def _differences(path: str, stamp: int) -> str:
    command = [sys.executable, "-m", "rl_lab.ui.defaults", path]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEFAULTS_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return json.dumps({"error": "Composing the experiment's defaults took too long."})
    if done.returncode:
        return json.dumps({"error": (done.stderr.strip().splitlines() or ["The defaults cannot be composed."])[-1]})
    return done.stdout


def _imagination(run: RunFiles) -> dict[str, Any]:
    keys = run.imagination.get("keys")
    entries = {}
    for key, entry in keys.items() if isinstance(keys, dict) else ():
        if isinstance(entry, dict):
            wanted = ("error_mean", "baseline_mean", "steps_better")
            entries[str(key)] = {name: number(entry.get(name)) for name in wanted}
    return {"horizon": number(run.imagination.get("horizon")), "keys": entries}


def _command(argv: Any) -> str:
    if not isinstance(argv, list) or not argv:
        return ""
    words = [str(word) for word in argv]
    return shlex.join([Path(words[0]).name, *words[1:]])


def _texts(value: Any) -> dict[str, str]:
    return {str(key): _text(entry) for key, entry in value.items()} if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
