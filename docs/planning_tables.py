"""Tables of what plans by diffusion: Diffuser in the mazes of D4RL, the diffusion planner by β."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

from world_models_tables import MISSING, table

# Maze2D by D4RL: the returns that score 0 and 100, and the published score of Diffuser with a PD controller.
POINT_MAZES = {
    "diffuser_point_maze": (23.85, 161.86, 113.9),
    "diffuser_point_maze_medium": (13.13, 277.39, 121.5),
    "diffuser_point_maze_large": (6.7, 273.99, 123.0),
}


def point_maze_table(folder: Path) -> str:
    """Normalised scores of Diffuser in the mazes of D4RL, each seed and their mean, beside the published ones."""
    rows = []
    for name, (low, high, reported) in POINT_MAZES.items():
        if not (folder / f"{name}.json").exists():
            continue
        result = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        returns = [row["return_mean"] for row in result["rows"]]
        scores = [100.0 * (value - low) / (high - low) for value in returns]
        wall = fmean(row["wall_s"] for row in result["rows"]) / 60.0
        seeds = ", ".join(f"{score:.1f}" for score in scores)
        rows.append(
            [f"`{name}`", f"{fmean(scores):.1f}", seeds, f"{fmean(returns):.1f}", str(reported), f"{wall:.0f} min"]
        )
    head = ["Experiment", "Normalised", "Seeds", "Return", "Published (PD)", "A run, CPU"]
    return table(head, rows) if rows else MISSING


def diffusion_planner_table(path: Path) -> str:
    """What benchmarks/diffusion_planner.py wrote: planners and β down."""
    if not path.exists():
        return MISSING
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for row in result["rows"]:
        seeds, settings = row["seeds"], row["settings"]
        named = f"β = {settings['beta']:g}, execute: {settings['execute']}" if "beta" in settings else ""
        means = [
            f"{fmean(seed[name] for seed in seeds):.1f}" if name in seeds[0] else ""
            for name in ("effective_samples", "prior_kl", "cpu_ms_per_decision")
        ]
        returns = [seed["return_mean"] for seed in seeds]
        listed = f"{fmean(returns):.1f} ({', '.join(f'{value:.1f}' for value in returns)})"
        rows.append(
            [
                f"`{row['planner']}`" if row["planner"].isidentifier() else row["planner"],
                named,
                f"{row['model_steps']:,}",
                listed,
                *means,
            ]
        )
    head = ["", "", "Model steps", "Return, mean (seeds)", "Effective samples", "KL, nats", "CPU ms"]
    return table(head, rows) + f"\n\n{result['episodes']} episodes for each of {len(seeds)} seeds."


def detour_table(folder: Path) -> str:
    """How often imitators of the two-way detour arrive, and on which side they pass, seed by seed."""
    rows = []
    for name in ("bc_detour_mse", "bc_detour_gmm", "diffusion_policy_detour"):
        if not (folder / f"{name}.json").exists():
            continue
        seeds = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        arrived = ", ".join(f"{100 * row['return_mean']:.0f} %" for row in seeds)
        above = ", ".join(f"{100 * row['shares']['above']:.0f} %" if "shares" in row else "not kept" for row in seeds)
        rows.append([f"`{name}`", arrived, above])
    return table(["Experiment", "Success", "Above"], rows) if rows else MISSING
