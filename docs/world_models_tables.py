"""The tables of docs/world_models.md, out of results/."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

MISSING = "Not recorded yet."
CAR_RACING = ("og_wm_carracing", "og_wm_carracing_untrained", "og_wm_carracing_small")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def temperature_table(folder: Path) -> str:
    """Of og_wm_dream_temperatures: the score in the dream and in the game, after the search in that dream; and of
    og_wm_game, whose search was in the game."""
    rows = []
    if (result := read(folder / "og_wm_dream_temperatures.json")) is not None:
        phases = result["config"]["training"]["phases"]
        searches = [phase for phase in phases if "temperature" in phase.get("options", {})]
        for phase in sorted(searches, key=lambda phase: phase["options"]["temperature"]):
            rows.append([f"in the dream, τ = {phase['options']['temperature']:g}", *scores(result, phase)])
    if (result := read(folder / "og_wm_game.json")) is not None:
        rows.append(["in the game", *scores(result, result["config"]["training"]["phases"][-1])])
    return table(["Evolved", "Generations", "Virtual score", "Real score"], rows) if rows else MISSING


def scores(result: dict[str, Any], phase: dict[str, Any]) -> list[str]:
    """Generations of a phase, and the returns in dream and game that it ended with."""
    keys = ("workflow/dream_return_mean", "eval/return_mean")
    return [str(phase["duration_cycles"]), *(mean(result, phase["name"], key) or "" for key in keys)]


def car_racing_table(folder: Path) -> str:
    """Of the runs on CarRacing: what V and M reached, and the score of 100 fresh episodes."""
    rows = []
    for name in CAR_RACING:
        result = read(folder / f"{name}.json")
        if result is None:
            continue
        vision = [last_loss(result, f"train/loss/v_{part}") for part in ("reconstruction", "kl")]
        memory = [
            mean(result, "assess", f"workflow/m_{part}", digits=2) or ""
            for part in ("loss", "loss_if_nothing_changed", "loss_shuffled_actions", "share_better")
        ]
        runs = result["rows"]
        returns = ", ".join(f"{run['return_mean']:.0f} ± {run['return_std']:.0f}" for run in runs)
        generations = mean(result, "C", "workflow/generation", digits=0) or ""
        minutes = f"{fmean(run['wall_s'] for run in runs) / 60:.0f} min, {runs[0]['device']}"
        rows.append([f"`{name}`", " + ".join(vision), *memory, generations, returns, minutes])
    head = ["Experiment", "V: reconstruction + KL", "M: loss", "nothing changes", "other actions", "share better"]
    return table([*head, "Generations", "Return of 100 episodes", "Time"], rows) if rows else MISSING


def generation_table(path: Path) -> str:
    """What benchmarks/evolution.py wrote."""
    result = read(path)
    if result is None:
        return MISSING
    rows = [
        [name, f"{1e3 * result[key]['wall_s']:.0f} ms", f"{1e3 * result[key]['cpu_s']:.0f} ms"]
        for name, key in (("one by one", "one_by_one"), ("in one batch", "batched"))
    ]
    rows.append(["times as fast", *(f"{result['times_as_fast'][clock]:.1f}" for clock in ("wall_s", "cpu_s"))])
    return table(["", "Wall", "CPU"], rows)


def backends_table(path: Path) -> str:
    """What benchmarks/car_racing.py wrote."""
    result = read(path)
    if result is None:
        return MISSING
    names = (("gymnasium", "Gymnasium, every frame drawn"), ("rl_lab", "RL Lab"), ("envpool", "envpool"))
    played = result.get("played", {})
    rows = []
    for key, name in names:
        if key not in result["cpu_ms_per_decision"]:
            continue
        own = played.get({"rl_lab": "sync"}.get(key, key))
        score = f"{own['return_mean']:.0f} ± {own['return_std']:.0f}" if own else ""
        error = f"{own['reconstruction']:.1f}" if own else ""
        rows.append([name, f"{result['cpu_ms_per_decision'][key]:.1f} ms", score, error])
    return table(["", "CPU time of a decision", "Return of the same agent", "V's squared error"], rows)


def last_loss(result: dict[str, Any], key: str) -> str:
    """A loss of V at its last update, which is logged when the next phase has begun."""
    return mean(result, "encode", key) or mean(result, "V", key) or ""


def mean(result: dict[str, Any], phase: str, key: str, *, digits: int = 1) -> str | None:
    """A metric that the phase ended with, the mean over seeds; None where it was not logged."""
    values = [row["phases"][phase][key] for row in result["rows"] if key in row.get("phases", {}).get(phase, {})]
    return f"{fmean(values):.{digits}f}" if values else None


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
