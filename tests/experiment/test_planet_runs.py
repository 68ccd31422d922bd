"""PlaNet through the whole lab: training, resume, evaluation and pictures of what it imagines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.overrides import QUIET
from tests.runs import run_in_parts

from rl_lab.experiment.train import run_training

SMALL = [
    "+experiment=planet", "environment.id=Pendulum-v1", "environment.num_envs=2", "environment.backend=sync",
    "environment.time_limit=20",
    "workflow.batch_size=2", "workflow.sequence_length=8", "workflow.train_ratio=4", "components.rssm.deter=16",
    "components.rssm.hidden=16", "components.rssm.stoch=4", "components.encoder.units=16",
    "components.decoder.units=16", "components.reward.units=16", "controllers.planner.warm_start=true",
    "controllers.planner.samples=8", "controllers.planner.elites=2",
    "controllers.planner.iterations=2", "controllers.planner.horizon=3", "training.phases.0.duration_steps=20",
    "evaluation.episodes=1", "evaluation.every=500", "logging.every=10", "checkpoint.every=20", *QUIET,
]  # fmt: skip


def learned(run: Path) -> dict[int, dict]:
    """Rows of metrics.jsonl with losses, without the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if k != "wall_s" and not k.startswith("time/")} for row in rows]
    return {row["env_steps"]: row for row in kept if "train/loss/total" in row}


def test_a_resumed_run_equals_the_whole_one_and_leaves_pictures(tmp_path: Path) -> None:
    """Latent state, plan, noise and optimiser go on exactly where the run stopped; seed steps earn no updates."""
    whole = run_training([*SMALL, "training.total_timesteps=64", f"run_root={tmp_path}/a"]).folder
    part = run_in_parts([*SMALL, "evaluation.imagination=false", f"run_root={tmp_path}/b"], first=44, total=64)
    assert len(learned(whole)) > 2
    assert learned(part) == learned(whole)
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["env_steps"], summary["updates"]) == (64, 11)
    assert (whole / "imagination" / "picture.png").stat().st_size > 0


@pytest.mark.learning
def test_a_small_planet_swings_the_pole_up(tmp_path: Path) -> None:
    """3,000 decisions of a model a tenth of the paper's size; random actions earn about 70, and it was seen to reach
    430."""
    sizes = [f"components.{part}.units=64" for part in ("encoder", "decoder", "reward")]
    sizes += ["components.rssm.deter=64", "components.rssm.hidden=64", "components.rssm.stoch=12"]
    planner = {"samples": 64, "elites": 8, "iterations": 4}
    overrides = [f"controllers.planner.{name}={value}" for name, value in planner.items()]
    overrides += ["workflow.batch_size=16", "workflow.sequence_length=25", "workflow.train_ratio=160"]
    overrides += ["environment.num_envs=8", "environment.backend=sync", "training.total_timesteps=3_000"]
    overrides += ["evaluation.every=3_000", "evaluation.num_envs=4", "evaluation.final_episodes=4"]
    run = run_training(["+experiment=planet_cartpole_swingup", *sizes, *overrides, *QUIET, f"run_root={tmp_path}"])
    assert json.loads((run.folder / "summary.json").read_text())["eval/return_mean"] > 250
