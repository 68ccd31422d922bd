"""Dreamer v1 and v2 through the whole lab: training and resume; and that they learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.overrides import QUIET
from tests.runs import run_in_parts

from rl_lab.experiment.train import run_training

SMALL = [
    "environment.num_envs=2", "environment.backend=sync", "environment.time_limit=20", "size=tiny",
    "workflow.batch_size=2", "workflow.sequence_length=8", "workflow.horizon=3", "workflow.train_ratio=4",
    "evaluation.episodes=1", "evaluation.every=500", "logging.every=10", "checkpoint.every=20", *QUIET,
]  # fmt: skip
V1 = [
    "+experiment=dreamer_v1", "environment.id=Pendulum-v1", "training.phases.0.duration_steps=20",
    "training.phases.1.duration_updates=2",
]  # fmt: skip


def learned(run: Path) -> dict[int, dict]:
    """Rows of metrics.jsonl with losses, without the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if k != "wall_s" and not k.startswith("time/")} for row in rows]
    return {row["env_steps"]: row for row in kept if "train/loss/total" in row}


def test_a_resumed_run_equals_the_whole_one(tmp_path: Path) -> None:
    """Three optimisers and exploration noise go on exactly where the run stopped."""
    settings = [*V1, *SMALL, "evaluation.imagination=false"]
    whole = run_training([*settings, "training.total_timesteps=60", f"run_root={tmp_path}/a"]).folder
    part = run_in_parts([*settings, f"run_root={tmp_path}/b"], first=40, total=60)
    assert len(learned(whole)) > 2
    assert learned(part) == learned(whole)


@pytest.mark.learning
def test_v2_balances_the_pole(tmp_path: Path) -> None:
    """The tuned experiment; random actions earn about 22, and every seed that was tried passed 475."""
    run = run_training(["+experiment=dreamer_v2_cartpole", *QUIET, f"run_root={tmp_path}"])
    assert json.loads((run.folder / "summary.json").read_text())["eval/return_mean"] > 400


@pytest.mark.learning
def test_v1_swings_the_pendulum_up(tmp_path: Path) -> None:
    """The tuned experiment; random actions earn about -1200, and it was seen to reach -150."""
    run = run_training(["+experiment=dreamer_v1_pendulum", *QUIET, f"run_root={tmp_path}"])
    assert json.loads((run.folder / "summary.json").read_text())["eval/return_mean"] > -500
