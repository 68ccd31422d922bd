"""Our scores beside those that the authors published, task by task; their files are in docs/published."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from scores import result_files

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "results"
MARKS = (100_000, 250_000, 500_000)  # frames at which learning is compared
NEAR = 0.02  # an evaluation so close to a mark, as a share of it, counts as one at the mark
ATARI_STEPS = 100_000
ATARI_METHODS = {
    "dreamerv3": "DreamerV3", "EfficientZero": "EfficientZero", "Simulus": "Simulus", "DIAMOND": "DIAMOND",
    "delta-iris": "Δ-IRIS", "STORM": "STORM", "REM": "REM", "IRIS": "IRIS", "TWM": "TWM", "SimPLe": "SimPLe",
    "HUMAN": "human", "RANDOM": "random",
}  # fmt: skip


def published(name: str) -> dict[str, Any]:
    return json.loads((DOCS / "published" / f"{name}.json").read_text(encoding="utf-8"))


def results() -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in result_files(RESULTS)]


# DeepMind Control -----------------------------------------------------------------------------------------------------


def control_table() -> str:
    """Ours by frames, the score on fresh episodes, and what was published of the same kind of algorithm."""
    rows = []
    for result in results():
        task = re.fullmatch(r"dm_control/(.+)-v0", result["protocol"]["environment"])
        if task is None:
            continue
        runs = result["rows"]
        scores = [run["return_mean"] for run in runs]
        final = f"{fmean(scores):.0f}" + (f" ({min(scores):.0f} to {max(scores):.0f})" if len(runs) > 1 else "")
        frames = max(run["frames"] for run in runs)
        rows.append([
            task[1], "pixels" if is_from_pixels(result) else "state", f"`{result['experiment']}`", str(len(runs)),
            *(_at(runs, mark) for mark in MARKS), f"{final} at {frames // 1000:,}k", theirs(result, task[1]),
        ])  # fmt: skip
    head = ["Task", "From", "Experiment", "Seeds", *(f"At {mark // 1000}k" for mark in MARKS), "Fresh episodes"]
    return _table([*head, "Published"], sorted(rows))


def is_from_pixels(result: dict[str, Any]) -> bool:
    return any(spec["kind"] == "image" for spec in result["config"]["_dims"]["observation"].values())


def theirs(result: dict[str, Any], task: str) -> str:
    """TD-MPC2's means of evaluations, or Dreamer's of training episodes, with frames and seeds."""
    if result["experiment"].startswith("tdmpc"):
        points = published("tdmpc2").get(task, {}).values()
        shown = [f"{score:.0f} at {int(frames) // 1000:,}k" for frames, score, _ in points if frames <= 500_000]
        return f"TD-MPC2 {', '.join(shown)}; 3 seeds" if shown else "–"
    kind = "dmc_vision" if is_from_pixels(result) else "dmc_proprio"
    record, name = published("dreamer")[f"{kind}/dreamerv3"], f"dmc_{task.replace('-', '_')}"
    if name not in record["tasks"]:
        return "–"
    return f"DreamerV3 {record['tasks'][name]:.0f} at {record['at'] // 1000:,}k; {record['seeds']} seeds"


def _at(runs: list[dict[str, Any]], mark: int) -> str:
    """The mean over the seeds of the evaluations at that number of frames, where every seed has one."""
    values = [_evaluation_near(run["curve"], mark) for run in runs]
    return f"{fmean(known):.0f}" if len(known := [value for value in values if value is not None]) == len(runs) else "–"


def _evaluation_near(curve: str, mark: int) -> float | None:
    with (RESULTS / curve).open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["eval/return_mean"]]
    near = [row for row in rows if abs(int(row["frames"]) - mark) <= NEAR * mark]
    return float(near[-1]["eval/return_mean"]) if near else None


# Atari 100k -----------------------------------------------------------------------------------------------------------


def atari_table() -> str:
    """The games that we have at 100k env steps, beside every method whose authors published theirs."""
    record = published("atari100k")
    rows = []
    for result in results():
        game = re.fullmatch(r"ALE/(.+)-v5", result["protocol"]["environment"])
        if game is None or max(run["env_steps"] for run in result["rows"]) > 1.01 * ATARI_STEPS:
            continue
        scores = [run["return_mean"] for run in result["rows"]]
        ours = f"{fmean(scores):,.1f} ({len(scores)})"
        others = [f"{record[name][game[1]]:,.1f}" for name in ATARI_METHODS]
        rows.append([game[1], f"`{result['experiment']}`", ours, *others])
    return _table(["Game", "Experiment", "Ours (seeds)", *ATARI_METHODS.values()], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return "None is recorded yet."
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])
