"""The table of scores: one row for each file that `rl-lab reproduce` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rl_lab.errors import RLLabError
from rl_lab.experiment.learning_code import digests
from rl_lab.experiment.prepare import prepare

RELIABILITY = "reliability.json"
ENOUGH_SEEDS = 5  # for an interquartile mean and its interval
# Overrides that say how a run is watched, kept and fed, not what is learned: the file has them, the table does not.
_HOW = (
    "logging.", "checkpoint.every=", "evaluation.video=", "evaluation.imagination=", "evaluation.final_episodes=",
    "evaluation.num_envs=", "environment.workers=", "training.overlap=",
)  # fmt: skip
FORMER, UNKNOWN, CHOSEN, STOPPED = "†", "‡", "best", "stopped"
NOTES = (
    "Up to four seeds have their mean and range, five or more their interquartile mean with its 95 % interval. "
    f"`{CHOSEN}`: the agent that did best in the evaluations while training is scored, not the last. `{STOPPED}`: "
    "those evaluations ended the run. Where either holds, their env steps stand beside those of training; files from "
    f"before they were counted say so. {FORMER}: code or settings that the row rests on have changed since. {UNKNOWN}: "
    "it cannot be told, because the row's commit is not in the history."
)


def result_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.json")) if path.name != RELIABILITY]


def scores_table(folder: Path, *, marked: bool = False) -> str:
    """Every experiment with its score. `marked`: with what must be known to judge it, and the note that explains it."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in result_files(folder)]
    if not results:
        return "No scores are recorded yet: `rl-lab reproduce` writes them."
    head = [
        "Experiment",
        "Environment",
        "Env steps",
        "Score",
        "Return of each seed",
        "Episodes",
        "Time a seed",
        "Device",
    ]
    lines = [head, ["---"] * len(head), *(_row(result, marked) for result in results)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{table}\n\n{NOTES}" if marked else table


def _row(result: dict[str, Any], marked: bool) -> list[str]:
    runs, protocol = result["rows"], result["protocol"]
    shown = [line for line in result["overrides"] if not line.startswith(_HOW)]
    words = [*(f"`{word}`" for word in [result["experiment"], *shown]), *selection(result)]
    marks = row_marks(result) if marked else [""] * len(runs)
    texts = _texts([run["return_mean"] for run in runs])
    returns = [f"{text}{mark}" for text, mark in zip(texts, marks, strict=True)]
    return [
        " ".join(words), protocol["environment"], _env_steps(result), summary(result), ", ".join(returns),
        str(protocol["episodes"]), _minutes(run["wall_s"] for run in runs),
        ", ".join(dict.fromkeys(run["device"] for run in runs)),
    ]  # fmt: skip


def summary(result: dict[str, Any]) -> str:
    """Interquartile mean and interval of five or more seeds; mean and range of fewer."""
    returns = [run["return_mean"] for run in result["rows"]]
    if len(returns) >= ENOUGH_SEEDS:
        middle, low, high = _texts([result["iqm"], *result["ci95"]])
        return f"IQM {middle} [{low}, {high}]"
    middle, low, high = _texts([fmean(returns), min(returns), max(returns)])
    return middle if len(returns) == 1 else f"{middle} ({low} to {high})"


def _texts(scores: Sequence[float]) -> list[str]:
    """As many digits as tell them apart: returns of some tasks are at most 1."""
    digits = 3 if max(map(abs, scores)) < 10.0 else 1
    return [f"{score:.{digits}f}" for score in scores]


def selection(result: dict[str, Any]) -> list[str]:
    """Whether evaluations while training chose the agent, and whether they ended the run."""
    phases = result["config"]["training"].get("phases") or []
    ends = [phase.get("until") for phase in phases if isinstance(phase.get("until"), dict)]
    stopped = any(str(end.get("metric", "")).startswith("eval/") for end in ends)
    return [CHOSEN] * ("highest" in result["protocol"]["selection"]) + [STOPPED] * stopped


def row_marks(result: dict[str, Any]) -> list[str]:
    """For each row the mark of a change, or none: its digests beside those that a run would have now."""
    try:
        now = digests(prepare([f"+experiment={result['experiment']}", *result["overrides"]]).config)
    except RLLabError:  # the experiment, or a setting, is there no more
        return [FORMER] * len(result["rows"])
    return [_mark(run, now) for run in result["rows"]]


def _mark(run: dict[str, Any], now: dict[str, str]) -> str:
    if run.get("code") is None:
        return UNKNOWN
    return FORMER if any(run[name] != digest for name, digest in now.items()) else ""


def _env_steps(result: dict[str, Any]) -> str:
    runs = result["rows"]
    training = _range([run["env_steps"] for run in runs])
    if not selection(result):
        return training
    evaluations = [run.get("evaluation_env_steps") for run in runs]
    counted = _range([steps for steps in evaluations if steps is not None])
    return f"{training} + {counted if None not in evaluations else 'not counted'} in evaluations"


def _range(steps: list[int]) -> str:
    if not steps:
        return "–"
    low, high = min(steps), max(steps)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _minutes(seconds: Iterable[float]) -> str:
    times = sorted(seconds)
    low, high = f"{times[0] / 60:.1f}", f"{times[-1] / 60:.1f}"
    return f"{low} min" if low == high else f"{low} to {high} min"
