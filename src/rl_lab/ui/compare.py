"""Several runs side by side as data for charts and tables: groups over seeds, intervals, settings that differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_lab.metrics.charts import thin
from rl_lab.metrics.comparison import (
    group_curve,
    group_runs,
    minutes_at_speed,
    score_group,
    setting_differences,
    value_text,
)
from rl_lab.metrics.run_files import RunFiles, read_run

POINTS = 400  # of one curve
SETTINGS = 200
MAX_RUNS = 60


def compare(folders: Sequence[tuple[str, Path]], metric: str, axis: str) -> dict[str, Any]:
    """Groups of runs with their curves of `metric` over `axis` (env_steps, frames, updates, minutes) and scores."""
    runs = {run_id: read_run(folder) for run_id, folder in folders[:MAX_RUNS]}
    ids = {id(run): run_id for run_id, run in runs.items()}
    grouped = group_runs(list(runs.values()))
    names = sorted({name for run in runs.values() for name in run.names()})
    return {
        "metric": metric,
        "metrics": names,
        "groups": [_group(label, members, ids, metric, axis) for label, members in grouped.items()],
        "differences": [
            {"key": key, "values": list(map(value_text, values))}
            for key, values in list(setting_differences(list(grouped.values())).items())[:SETTINGS]
        ],
    }


def _group(label: str, members: list[RunFiles], ids: dict[int, str], metric: str, axis: str) -> dict[str, Any]:
    score = score_group(label, members)
    curves = [_curve(run, metric, axis) for run in members]
    drawn = [(x, y) for x, y in curves if len(x)]
    middle: dict[str, Any] | None = None
    if len(drawn) > 1:
        grid, center, low, high = group_curve(drawn)
        middle = {"x": grid.tolist(), "y": center.tolist()}
        if len(drawn) > 2:
            middle |= {"low": low.tolist(), "high": high.tolist()}
    return {
        "label": label,
        "iqm": score.iqm,
        "ci95": score.ci95,
        "middle": middle,
        "runs": [
            {
                "id": ids[id(run)],
                "name": own.name,
                "seed": own.seed if isinstance(own.seed, int | float) else str(own.seed),
                "status": own.status,
                "return_mean": own.return_mean,
                "return_std": own.return_std,
                "is_final": own.is_final,
                "env_steps": own.env_steps,
                "wall_s": own.wall_s,
                "x": x.tolist(),
                "y": y.tolist(),
            }
            for run, own, (x, y) in zip(members, score.runs, curves, strict=True)
        ],
    }


def _curve(run: RunFiles, metric: str, axis: str) -> tuple[Any, Any]:
    x, y = run.series(metric, {"minutes": "wall_s", "frames": "env_steps"}.get(axis, axis))
    if axis == "minutes":
        x = minutes_at_speed(run, x)
    if axis == "frames":
        repeat = run.setting("environment.action_repeat")
        x = x * (repeat if isinstance(repeat, int) else 1)
    x, y, _, _ = thin(x, y, POINTS)
    return x, y
