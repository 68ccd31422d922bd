"""Our scores beside those that the authors published, task by task; their files are in docs/published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import curves
from scores import all_results, summary, task

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "results"
WINDOWS = {100_000: 20_000, 250_000: 25_000, 500_000: 50_000}  # frames at which learning is compared, and before them
MARKS = tuple(WINDOWS)
NEAR = 0.02  # an evaluation so close to a mark, as a share of it, counts as one at it
ATARI_STEPS = 100_000
ATARI_METHODS = {
    "dreamerv3": "DreamerV3", "EfficientZero": "EfficientZero", "Simulus": "Simulus", "DIAMOND": "DIAMOND",
    "delta-iris": "Δ-IRIS", "STORM": "STORM", "REM": "REM", "IRIS": "IRIS", "TWM": "TWM", "SimPLe": "SimPLe",
    "HUMAN": "human", "RANDOM": "random",
}  # fmt: skip


def published(name: str) -> dict[str, Any]:
    return json.loads((DOCS / "published" / f"{name}.json").read_text(encoding="utf-8"))


# DeepMind Control -----------------------------------------------------------------------------------------------------


def control_table() -> str:
    """Ours / theirs at the same numbers of frames, measured alike, and our score on fresh episodes at the end."""
    rows = []
    for result in all_results(RESULTS):
        name = re.fullmatch(r"dm_control/(.+)-v0", result["protocol"]["environment"])
        if name is None:
            continue
        theirs = published_at(result, name[1])
        marks = [beside(_at(result, mark), theirs.get(mark)) for mark in MARKS]
        frames = max(run["frames"] for run in result["rows"])
        device = " on a CPU" if result["rows"][0]["device"] == "cpu" else ""
        rows.append([
            task(result), f"`{result['experiment']}`{device}", str(len(result["rows"])), *marks,
            f"{summary(result)} at {frames // 1000:,}k", last_published(result, name[1]),
        ])  # fmt: skip
    head = ["Task", "Experiment", "Seeds", *(f"{mark // 1000}k" for mark in MARKS), "Fresh episodes", "Published"]
    return _table(head, sorted(rows))


def beside(ours: float | None, theirs: float | None) -> str:
    if ours is None and theirs is None:
        return ""
    return " / ".join("–" if score is None else f"{score:.0f}" for score in (ours, theirs))


def published_at(result: dict[str, Any], name: str) -> dict[int, float]:
    """The authors' returns by frames: those of our pages for this experiment, and TD-MPC2's file."""
    pages = [page[result["experiment"]].scores for page in curves.published().values() if result["experiment"] in page]
    points = pages[0] if pages else {}
    if result["experiment"].startswith("tdmpc2"):
        points = points | {int(frames): score for frames, score, _ in published("tdmpc2").get(name, {}).values()}
    return points


def last_published(result: dict[str, Any], name: str) -> str:
    """What the authors report of the task at the end of their budget, with its seeds."""
    if result["experiment"].startswith("tdmpc"):
        points = [point for point in published("tdmpc2").get(name, {}).values() if point[0] <= MARKS[-1]]
        return f"TD-MPC2 {points[-1][1]:.0f} at {int(points[-1][0]) // 1000:,}k, 3 seeds" if points else "–"
    kind = "dmc_vision" if "pixels" in task(result) else "dmc_proprio"
    record, key = published("dreamer")[f"{kind}/dreamerv3"], f"dmc_{name.replace('-', '_')}"
    if key not in record["tasks"]:
        return "–"
    return f"DreamerV3 {record['tasks'][key]:.0f} at {record['at'] // 1000:,}k, {record['seeds']} seeds"


def _at(result: dict[str, Any], mark: int) -> float | None:
    """Our mean over the seeds at that number of frames, where every seed has one, measured as the authors did: TD-MPC2
    by evaluations, the Dreamers by the training episodes before it."""
    measure = _evaluated if result["experiment"].startswith("tdmpc") else _trained
    values = [measure(run, mark) for run in result["rows"]]
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _evaluated(run: dict[str, Any], mark: int) -> float | None:
    near = [score for frames, score in zip(*curves.evaluations(run), strict=True) if abs(frames - mark) <= NEAR * mark]
    return near[-1] if near else None


def _trained(run: dict[str, Any], mark: int) -> float | None:
    low = mark - WINDOWS[mark]
    within = [score for frames, score in zip(*curves.episodes(run), strict=True) if low <= frames <= mark]
    reached = run["frames"] >= (1.0 - NEAR) * mark
    return fmean(within) if within and reached else None


def draw_control() -> None:
    """A panel for each task of DeepMind Control: every experiment's evaluations, and the published numbers."""
    of_task: dict[str, list[dict[str, Any]]] = {}
    for result in all_results(RESULTS):
        if result["protocol"]["environment"].startswith("dm_control/"):
            of_task.setdefault(task(result), []).append(result)
    panels = [_task_panel(name, results) for name, results in sorted(of_task.items())]
    if panels:
        curves.svg_file(DOCS / "pictures" / "curves_control.svg", panels, columns=2, width=7.6, height=2.9)


def _task_panel(name: str, results: list[dict[str, Any]]) -> curves.Panel:
    ours: list[curves.Series] = []
    points: dict[str, dict[int, float]] = {"published, Dreamer": {}, "published, TD-MPC": {}}
    colours = dict(zip(dict.fromkeys(result["experiment"] for result in results), curves.COLOURS, strict=False))
    for result in results:
        experiment, end = result["experiment"], max(run["frames"] for run in result["rows"])
        for run in result["rows"]:
            label = None if any(series.label == experiment for series in ours) else experiment
            frames, returns = curves.evaluations(run)
            ours.append(curves.Series(frames, returns, label, colour=colours[experiment], kind="both", width=1.0))
        kind = "published, TD-MPC" if experiment.startswith("tdmpc") else "published, Dreamer"
        published = published_at(result, name.removesuffix(", pixels"))
        points[kind] |= {at: score for at, score in published.items() if at <= end}
    theirs = [
        curves.Series(list(shown), list(shown.values()), label, colour=colour, kind="dots", width=3)
        for (label, shown), colour in zip(points.items(), (curves.PUBLISHED, "#777777"), strict=True)
        if shown
    ]
    return curves.Panel([*ours, *theirs], title=name, x_label="frames", y_label="return", from_zero=True)


# Atari 100k -----------------------------------------------------------------------------------------------------------


def atari_table() -> str:
    """The games that we have at 100k env steps across; down ours and every method whose authors published theirs."""
    record = published("atari100k")
    ours: dict[str, dict[str, Any]] = {}
    for result in all_results(RESULTS):
        game = re.fullmatch(r"ALE/(.+)-v5", result["protocol"]["environment"])
        if game is not None and max(run["env_steps"] for run in result["rows"]) <= 1.01 * ATARI_STEPS:
            ours[game[1]] = result
    games = sorted(ours)
    cells = [f"{summary(ours[game])}, {len(ours[game]['rows'])} seeds".replace(" 1 seeds", " 1 seed") for game in games]
    rows = [["**RL Lab**", *(f"{cell}: `{ours[game]['experiment']}`" for cell, game in zip(cells, games, strict=True))]]
    rows += [[label, *(f"{record[name][game]:,.0f}" for game in games)] for name, label in ATARI_METHODS.items()]
    return _table(["", *games], rows)


# MinAtar --------------------------------------------------------------------------------------------------------------


def minatar_table() -> str:
    """Games down, algorithms across: scores with seeds and env steps, and the env steps per second of the whole run."""
    found = {}
    for result in all_results(RESULTS):
        game = re.fullmatch(r"MinAtar/(.+)-v1", result["protocol"]["environment"])
        if game is not None:
            found[game[1], result["experiment"].partition("_minatar")[0]] = result
    algorithms = sorted({algorithm for _, algorithm in found})
    rows = [
        [game, *(_minatar_cell(found.get((game, algorithm))) for algorithm in algorithms)]
        for game in sorted({game for game, _ in found})
    ]
    return _table(["Game", *(f"`{algorithm}_minatar`" for algorithm in algorithms)], rows)


def _minatar_cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "–"
    runs = result["rows"]
    steps = max(run["env_steps"] for run in runs)
    rate = sum(run["env_steps"] for run in runs) / sum(run["wall_s"] for run in runs)
    return f"{summary(result)}; {len(runs)} seeds, {steps // 1000:,}k env steps, {rate:,.0f} a second"


def _table(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return "None is recorded yet."
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])
