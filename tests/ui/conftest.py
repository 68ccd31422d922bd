"""Run directories for the pages: made by hand where only their files matter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

MakeRun = Callable[..., Path]

CONFIG = """environment:
  id: CartPole-v1
experiment:
  name: {experiment}
  seed: {seed}
training:
  total_timesteps: 1000
workflow:
  _target_: rl_lab.workflows.dreamer_v3.DreamerV3
size: tiny
"""


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(
        experiment: str = "demo", seed: int = 0, *, status: str = "completed", rows: int = 3, name: str = ""
    ) -> Path:
        folder = tmp_path / "runs" / experiment / (name or f"20260101-000000-s{seed}")
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(CONFIG.format(experiment=experiment, seed=seed))
        info = {"status": status, "parameters": {"total": 7}, "start": "2026-01-01T00:00:00+00:00"}
        (folder / "run.json").write_text(json.dumps(info))
        lines = [
            {"env_steps": 100 * (step + 1), "updates": step, "wall_s": float(step), "phase": "train",
             "eval/return_mean": 10.0 * step + seed}
            for step in range(rows)
        ]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return make
