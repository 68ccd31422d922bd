"""Whole runs of Dreamers with another world model in one line: they train, imagine, and go on exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import QUIET, TINY_DREAMER
from rl_lab.experiment.imagination import imagine_run
from rl_lab.experiment.train import run_training

TRANSFORMER = "components/representation_learners@components.rssm=transformer"
BASE = [*TINY_DREAMER[:-1], *QUIET, "logging.every=8", "evaluation.imagination=false", "evaluation.every=1000"]


def updates(run: Path) -> dict[int, dict[str, object]]:
    """The rows with losses by env steps, without the wall clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if k != "wall_s" and not k.startswith("time/")} for row in rows]
    return {row["env_steps"]: row for row in kept if "train/loss/total" in row}


@pytest.mark.parametrize("variant", [TRANSFORMER])
def test_a_run_in_two_parts_equals_the_whole(tmp_path: Path, variant: str) -> None:
    """What the agent remembers of the running episode is saved with it. Then its model imagines."""
    whole = run_training([*BASE, variant, "training.total_timesteps=64", f"run_root={tmp_path}/a"]).folder
    part = run_training([*BASE, variant, "training.total_timesteps=40", f"run_root={tmp_path}/b"]).folder
    run_training([f"training.resume_path={part}", "training.total_timesteps=64", "logging.console=off"])
    assert len(updates(whole)) > 2
    assert updates(part) == updates(whole)
    paths = imagine_run(whole, context=3, horizon=5)
    assert all(path.stat().st_size for path in paths)
