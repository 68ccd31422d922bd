"""Synthetic run directories, as a training would leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.metrics.logger import MetricsLogger


def write_run(
    folder: Path,
    *,
    experiment: str = "dreamer_v3_cartpole",
    seed: int = 0,
    rows: int = 24,
    score: float | None = 480.0,
    lr: float = 4e-5,
    metrics: dict[str, float] | None = None,
    info: dict[str, Any] | None = None,
) -> Path:
    """A run with `rows` log times. `score` None: it is still running and has no final evaluation."""
    generator = np.random.default_rng(seed)
    logger = MetricsLogger(folder / "metrics.jsonl")
    for row in range(rows):
        progress = row / max(1, rows - 1)
        values = {
            "collect/return_mean": 20.0 + 400.0 * progress * generator.uniform(0.8, 1.0),
            "train/loss/dynamics": 4.0 - 3.0 * progress,
            "train/loss/policy": 0.1 * progress,
            "train/grad_norm": generator.lognormal(),
            "time/updates_per_s": 50.0,
            **(metrics or {}),
        }
        if row % 6 == 5:
            values |= {"eval/return_mean": 100.0 + 380.0 * progress, "eval/return_std": 20.0, "eval/episodes": 10.0}
        logger.log(env_steps=200 * (row + 1), updates=50 * (row + 1), wall_s=2.0 * row, phase="train", values=values)
    logger.close()
    status = "running" if score is None else "completed"
    record = {"status": status, "versions": {"torch": "2.13"}, "commit": "abc123", "device": "cpu", **(info or {})}
    record.setdefault("parameters", {"total": 640_867, "rssm": 600_000, "policy": 40_867})
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text(
        f"experiment: {{name: {experiment}, seed: {seed}}}\n"
        "workflow: {_target_: rl_lab.workflows.dreamer_v3.DreamerV3}\n"
        "environment: {id: CartPole-v1}\n"
        "training: {total_timesteps: 4800}\n"
        f"optimizers: {{main: {{lr: {lr:.1e}}}}}\n"
    )
    (folder / "plan.txt").write_text("Phase train: online, 4,800 env steps\n")
    event = {"time": "2025-01-02T03:04:05", "env_steps": 600, "kind": "resume", "message": "went on"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    if score is not None:
        summary = {"eval/return_mean": score, "eval/return_std": 12.5, "eval/episodes": 20, "env_steps": 200 * rows}
        (folder / "summary.json").write_text(json.dumps({**summary, "updates": 50 * rows, "wall_s": 2.0 * rows}))
    return folder
