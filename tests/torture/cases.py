"""Very small runs of every workflow, with each storage, back end and way of collecting; and how runs are compared."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.workflows import world_models_runs

import rl_lab.metrics.report
from rl_lab.experiment.train import run_training

BASE = (
    "logging.console=off", "logging.tensorboard=false", "evaluation.video=false", "evaluation.imagination=false",
    "experiment.device=cpu", "environment.num_envs=2", "evaluation.episodes=2", "evaluation.num_envs=2",
    "logging.every=10", "checkpoint.every=24", "evaluation.every=40",
)  # fmt: skip
CARTPOLE, PENDULUM = "environment.id=CartPole-v1", "environment.id=Pendulum-v1"
DREAMER = (
    "+experiment=dreamer_v3", CARTPOLE, "size=tiny", "workflow.batch_size=2", "workflow.sequence_length=8",
    "workflow.horizon=3", "workflow.train_ratio=4", "training.total_timesteps=96",
)  # fmt: skip
SMALL_RSSM = ("workflow.batch_size=2", "workflow.sequence_length=8", "environment.time_limit=20")
CASES: dict[str, tuple[str, ...]] = {
    "random": ("+experiment=random", CARTPOLE, "training.total_timesteps=120"),
    "random, workers": ("+experiment=random", CARTPOLE, "training.total_timesteps=120", "environment.backend=process"),
    "dreamer_v3": DREAMER,
    "dreamer_v3, disk": (*DREAMER, "data_sources.replay.storage=disk"),
    "dreamer_v3, workers": (*DREAMER, "environment.backend=process"),
    "dreamer_v3, overlap": (*DREAMER, "training.overlap=true"),
    "dreamer_v3, overlap, workers, disk": (
        *DREAMER, "training.overlap=true", "environment.backend=process", "data_sources.replay.storage=disk",
    ),
    "dreamer_v1": (
        "+experiment=dreamer_v1", PENDULUM, "size=tiny", *SMALL_RSSM, "workflow.horizon=3", "workflow.train_ratio=4",
        "training.phases.0.duration_steps=20", "training.phases.1.duration_updates=2", "training.total_timesteps=72",
    ),
    "dreamer_v2": (
        "+experiment=dreamer_v2", PENDULUM, "size=tiny", *SMALL_RSSM, "workflow.horizon=3", "workflow.train_ratio=4",
        "training.phases.0.duration_steps=20", "training.total_timesteps=72",
    ),
    "planet": (
        "+experiment=planet", PENDULUM, *SMALL_RSSM, "workflow.train_ratio=4", "components.rssm.deter=16",
        "components.rssm.hidden=16", "components.rssm.stoch=4", "controllers.planner.samples=8",
        "controllers.planner.elites=2", "controllers.planner.iterations=2", "controllers.planner.horizon=3",
        "training.phases.0.duration_steps=20", "training.total_timesteps=64",
    ),
    "dqn": (
        "+experiment=dqn", CARTPOLE, "workflow.batch_size=8", "data_sources.replay.start_after=20",
        "data_source@data_sources.replay=prioritized_replay", "training.total_timesteps=120",
    ),
    "ppo": (
        "+experiment=ppo", CARTPOLE, "data_sources.stream.length=16", "workflow.batch_size=8",
        "training.total_timesteps=160",
    ),
    "tdmpc2": (
        "+experiment=tdmpc2", PENDULUM, "size=tiny", "workflow.batch_size=8", "environment.time_limit=20",
        "controllers.planner.samples=8", "controllers.planner.policy_samples=2", "controllers.planner.iterations=1",
        "controllers.planner.elites=4", "training.phases.0.duration_steps=40",
        "training.phases.1.duration_updates=6", "training.total_timesteps=72",
    ),
    "tdmpc": (
        "+experiment=tdmpc", PENDULUM, "workflow.batch_size=8", "environment.time_limit=20",
        "components.encoder.latent_size=8", "controllers.planner.samples=8", "controllers.planner.policy_samples=2",
        "controllers.planner.iterations=1", "controllers.planner.elites=4", "training.phases.0.duration_steps=40",
        "training.phases.1.duration_updates=6", "training.total_timesteps=72",
    ),
    "mpc": ("+experiment=mpc_cartpole", "controllers.planner.samples=16", "training.total_timesteps=72"),
    "bc": (
        "+experiment=bc_cartpole", "data_sources.demos.expert.episodes=3", "workflow.batch_size=8",
        "evaluation.final_episodes=2", "training.phases.0.duration_updates=60",
    ),
    "world_models": tuple(
        line for line in world_models_runs.TINY if not line.startswith(("logging", "evaluation", "experiment.device"))
    ),
    "mbmpc": (
        "+experiment=mbmpc", CARTPOLE, "workflow.batch_size=8", "training.phases.0.duration_steps=40",
        "training.phases.1.duration_updates=6", "controllers.planner.samples=32",
        "controllers.planner.horizon=3",
        "training.total_timesteps=72",
    ),
    "muzero": (
        "+experiment=muzero_cartpole", "workflow.batch_size=4", "workflow.td_steps=3", "workflow.unroll=2",
        "controllers.planner.simulations=3", "components.representation.units=8", "data_sources.replay.start_after=30",
        "evaluation.final_episodes=2", "training.total_timesteps=96",
    ),
}  # fmt: skip


def without_reports() -> None:
    """Drawing a report takes longer than all else in a very small run, and nothing here looks at it."""
    rl_lab.metrics.report.write_report = lambda folder: folder / "report.html"


def warm_up() -> None:
    """Train and go on once, so that the children, which are forks, find what is imported late and read once."""
    with tempfile.TemporaryDirectory() as root, contextlib.redirect_stdout(io.StringIO()):
        for name in ("random", "dqn", "ppo"):
            go_on(train(name, Path(root)), "training.total_timesteps=200")


def train(name: str, root: Path, *more: str) -> Path:
    """Train a case in a new run; its folder."""
    return run_training([*CASES[name], *BASE, f"run_root={root}", *more]).folder


def go_on(run: Path, *more: str) -> int:
    """Resume a run; the exit code."""
    return run_training([f"training.resume_path={run}", "logging.console=off", *more]).code


def folder_in(root: Path) -> Path | None:
    """The run that a killed process may have left."""
    found = [path.parent for path in root.glob("*/*/run.json") if not path.parent.name.startswith(".")]
    return found[0] if found else None


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock decides."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key != "wall_s" and "time/" not in key} for row in lines]


class Result(NamedTuple):
    """The parts of a run that must be equal in two runs."""

    rows: list[dict[str, Any]]
    weights: str  # a digest of everything that it takes to act, of the last checkpoint


def result_of(run: Path) -> Result:
    return Result(rows(run), weights(run / "checkpoints" / "latest"))


def weights(checkpoint: Path) -> str:
    """A digest of a checkpoint's agent.pt: names, kinds and numbers."""
    digest = hashlib.sha256()
    for name, value in leaves(torch.load(checkpoint / "agent.pt", weights_only=True)):
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def leaves(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each value in nested mappings and lists, with its dotted name."""
    if isinstance(node, dict | list | tuple):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(value, f"{name}.{key}")
    else:
        yield name, node


def checkpoints_in(run: Path) -> list[Path]:
    """Whatever has the name of a checkpoint."""
    found = [*run.glob("checkpoints/step-*"), *run.glob("checkpoints/best")]
    return sorted(found)


def events(run: Path) -> list[tuple[str, str]]:
    """Kind and message of each."""
    path = run / "events.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [(line["kind"], line["message"]) for line in lines]


def info(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "run.json").read_text())
    return content
