"""Run directories that a stranger could send: every known way to have code executed by opening a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

Config = dict[str, Any]
Change = Callable[[Config], object]
MARKER = "pwned"  # the file that each of them would leave in its own folder


def hostile_run(source: Path, folder: Path, change: Change) -> Path:
    """A copy of a run with a changed configuration. Whoever sends a run can leave its manifest out, so it is gone."""
    shutil.copytree(source, folder, symlinks=True)
    (folder / "manifest.json").unlink(missing_ok=True)
    code = f"from pathlib import Path\nPath({str(folder / MARKER)!r}).touch()\n"
    (folder / "evil.py").write_text(code)
    (folder / "evilmod.py").write_text(code)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    change(config)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def _payloads(folder: Path) -> dict[str, Config]:
    """Nodes that execute something when they are built."""
    touch = f"touch {folder / MARKER}"
    code = f"open({str(folder / MARKER)!r}, 'w')"
    return {
        "os.system": {"_target_": "os.system", "command": touch},
        "subprocess": {"_target_": "subprocess.run", "args": touch, "shell": True},
        "Popen": {"_target_": "subprocess.Popen", "args": ["touch", str(folder / MARKER)]},
        "eval": {"_target_": "builtins.eval", "source": code},
        "exec": {"_target_": "builtins.exec", "_args_": [code]},
        "partial": {"_target_": "os.system", "_partial_": True, "command": touch},
        "runpy": {"_target_": "runpy.run_path", "path_name": str(folder / "evil.py")},
        "import": {"_target_": "importlib.import_module", "name": "evilmod"},
        "hydra": {"_target_": "hydra.utils.instantiate", "config": {"_target_": "os.system", "command": touch}},
        "our function": {"_target_": "rl_lab.environments.factory.import_user_module", "module": "evilmod"},
        "our process": {"_target_": "rl_lab.environments.worker_handle.WorkerHandle", "slot": 0},
        "our import": {"_target_": "rl_lab.data_sources.replay.Path"},
        "in the folder": {"_target_": "evilmod.anything"},
        "odd": {"_target_": ["os", "system"], "command": touch},
    }


def _places(node: Config) -> dict[str, Change]:
    """Where such a node can stand in a configuration."""
    replay = {"_target_": "rl_lab.data_sources.replay.SequenceReplay"}
    return {
        "components": lambda c: c.update(components={"x": node}),
        "controllers": lambda c: c.update(controllers={"x": node}),
        "optimizers": lambda c: c.update(optimizers={"x": {**node, "modules": "all"}}),
        "data_sources": lambda c: c.update(data_sources={"replay": {**replay, "capacity": node}}),
        "a list": lambda c: c["workflow"].update(extra=[[{"deep": node}]]),
        "workflow": lambda c: c.update(workflow=node),
        "phases": lambda c: c["training"].update(phases=[{"name": "x", "options": {"y": node}}]),
    }


def _others(folder: Path) -> dict[str, Change]:
    """Modules, ids, interpolations, addresses and links."""
    return {
        "module file": lambda c: c["environment"].update(module=str(folder / "evil.py")),
        "module": lambda c: c["environment"].update(module="evilmod"),
        "module in the id": lambda c: c["environment"].update(id="evilmod:CartPole-v1"),
        "two modules in the id": lambda c: c["environment"].update(id="evilmod:evilmod:CartPole-v1"),
        "id in the arguments": lambda c: c["environment"].update(
            id="GymV26Environment-v0", kwargs={"env_id": "evilmod:CartPole-v1"}
        ),
        "id in the arguments of evaluations": lambda c: (
            c["environment"].update(id="GymV26Environment-v0"),
            c["evaluation"].update(environment_kwargs={"env_id": "evilmod:CartPole-v1"}),
        ),
        "cluster of its own": lambda c: c["environment"].update(backend="ray", ray_address="127.0.0.1:9"),
        "interpolated target": lambda c: c.update(components={"x": {"_target_": "${experiment.name}"}}),
        "environment variable": lambda c: c["experiment"].update(name="${oc.env:HOME}"),
        "decoded": lambda c: c.update(components="${oc.decode:'{x: {_target_: os.system}}'}"),
        "link": lambda c: os.symlink("/etc/passwd", folder / "events.jsonl.link"),
        "pipe": lambda c: os.mkfifo(folder / "summary.pipe"),
        "pipe for a manifest": lambda c: os.mkfifo(folder / "manifest.json"),
        "pipe for run.json": lambda c: ((folder / "run.json").unlink(), os.mkfifo(folder / "run.json")),
        "device for run.json": lambda c: ((folder / "run.json").unlink(), os.symlink("/dev/zero", folder / "run.json")),
        "folder for metrics.jsonl": lambda c: ((folder / "metrics.jsonl").unlink(), (folder / "metrics.jsonl").mkdir()),
        "escape sequence": lambda c: c.update(size="\x1b]0;pwned\x07"),
        "lists in lists": lambda c: c.update(nested=_nested(100)),
        "aliases": lambda c: c.update(again=[c["environment"], c["environment"]]),
        "home of a dataset": lambda c: c["data_sources"].update(
            demos={"_target_": "rl_lab.experiment.recording.record_dataset", "request": str(folder / MARKER)}
        ),
    }


def _nested(depth: int) -> list[Any]:
    return [_nested(depth - 1)] if depth else []


def hostile_changes(folder: Path) -> Iterator[tuple[str, Change]]:
    """Every attack on a run in `folder`, by name: more than a hundred."""
    for name, node in _payloads(folder).items():
        for place, change in _places(node).items():
            yield f"{name} in {place}", change
    yield from _others(folder).items()
