"""The tables of scores: one row for each file that `rl-lab reproduce` wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rl_lab.environments.families import family_of
from rl_lab.errors import RLLabError
from rl_lab.experiment.learning_code import digests
from rl_lab.experiment.prepare import prepare
from rl_lab.experiment.registry import OWN_CONFIGS

RELIABILITY = "reliability.json"
ENOUGH_SEEDS = 5  # for an interquartile mean and its interval
FAMILIES = {  # of experiments, by the beginning of their names
    "PlaNet and the Dreamers": r"planet|dreamer",
    "TD-MPC": r"tdmpc",
    "MuZero": r"muzero|efficientzero",
    "World Models": r"og_wm|world_models",
    "Planning in exact or learned dynamics": r"mpc|mbmpc|distill",
    "Learning from demonstrations": r"bc|diff",
    "Model-free": r"ppo|dqn",
}
# Overrides that say how a run is watched, kept and fed, not what is learned: the file has them, the table does not.
_HOW = (
    "logging.", "checkpoint.every=", "evaluation.video=", "evaluation.imagination=", "evaluation.final_episodes=",
    "evaluation.num_envs=", "environment.workers=", "training.overlap=",
)  # fmt: skip
FORMER, UNKNOWN, CHOSEN, STOPPED = "†", "‡", "best", "stopped"
_GATE = re.compile(r"^# Gate: return (-?[\d.]+)", re.MULTILINE)


def result_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.json")) if path.name != RELIABILITY]


def all_results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in result_files(folder)]


# One short table of everything ----------------------------------------------------------------------------------------


def scores_table(folder: Path) -> str:
    """Every experiment with its score."""
    results = all_results(folder)
    if not results:
        return "No scores are recorded yet: `rl-lab reproduce` writes them."
    head = ["Experiment", "Environment", "Env steps", "Score", "Seeds", "Time a seed", "Device"]
    return _table(head, [
        [
            _name(result), result["protocol"]["environment"], _env_steps(result), summary(result),
            str(len(result["rows"])), _minutes(run["wall_s"] for run in result["rows"]), _devices(result),
        ]
        for result in results
    ])  # fmt: skip


# What must be known to judge them -------------------------------------------------------------------------------------


def scores_by_family(folder: Path) -> str:
    """For each family of algorithms a table, and the notes that its rows need."""
    parts = []
    results = all_results(folder)
    for title, pattern in FAMILIES.items():
        members = [result for result in results if re.match(pattern, result["experiment"])]
        if members:
            parts += [f"### {title}", _family_table(members), *_family_notes(members)]
    missing = [result["experiment"] for result in results if not family(result)]
    assert not missing, f"no family of docs/scores.py takes {missing}"
    return "\n\n".join(parts)


def family(result: dict[str, Any]) -> str | None:
    return next((title for title, pattern in FAMILIES.items() if re.match(pattern, result["experiment"])), None)


def _family_table(results: list[dict[str, Any]]) -> str:
    rows = []
    for result in results:
        limit = gate(result)
        rows.append([
            _name(result), task(result), _env_steps(result), "" if limit is None else f"{limit:g}", summary(result),
            ", ".join(_seeds(result)), f"{_minutes(run['wall_s'] for run in result['rows'])}, {_devices(result)}",
        ])  # fmt: skip
    return _table(["Experiment", "Task", "Env steps", "Gate", "Score", "Each seed", "Time a seed"], rows)


def _family_notes(results: list[dict[str, Any]]) -> list[str]:
    """Overrides that rows were made with, and scores that rest on fewer episodes than the protocol asks for."""
    ran = []
    for result in results:
        shown = [f"`{line}`" for line in result["overrides"] if not line.startswith(_HOW)]
        if shown:
            ran.append(f"`{result['experiment']}` with {', '.join(shown)}")
    few: dict[int, list[str]] = {}
    for result in results:
        if result["protocol"]["episodes"] < 100:
            few.setdefault(result["protocol"]["episodes"], []).append(result["experiment"])
    notes = [f"Ran {'; '.join(ran)}."] if ran else []
    return notes + [
        f"{episodes} episodes in place of 100: {', '.join(f'`{name}`' for name in dict.fromkeys(names))}."
        for episodes, names in sorted(few.items())
    ]


def findings(folder: Path) -> str:
    """The sentences that all rows together support: no seed that missed its gate is left out."""
    results = all_results(folder)
    seeds = sum(len(result["rows"]) for result in results)
    enough = sum(len(result["rows"]) >= ENOUGH_SEEDS for result in results)
    single = [result["experiment"] for result in results if len(result["rows"]) == 1]
    gated = [(result, limit) for result in results if (limit := gate(result)) is not None]
    missed = [
        f"`{result['experiment']}` seed {run['seed']} ({_text(run['return_mean'])}; gate {limit:g})"
        for result, limit in gated
        for run in result["rows"]
        if run["return_mean"] < limit
    ]
    counted = sum(len(result["rows"]) for result, _ in gated)
    chosen = [result["experiment"] for result in results if CHOSEN in selection(result)]
    stopped = [result["experiment"] for result in results if STOPPED in selection(result)]
    lines = [
        f"{len(results)} experiments with {seeds} seeds: {enough} with five seeds or more, {len(single)} with one.",
        f"{len(gated)} of them state a return as their gate: {counted - len(missed)} of {counted} seeds reached it."
        + (f" Not so {', '.join(missed)}." if missed else ""),
        f"In {len(chosen)} the evaluations while training chose the agent that is scored, in {len(stopped)} they ended "
        "the run: these scores rest on more experience than the env steps of training.",
        f"With one seed: {', '.join(f'`{name}`' for name in dict.fromkeys(single))}.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def gate(result: dict[str, Any]) -> float | None:
    """The return that the experiment's file demands, where it demands one."""
    path = OWN_CONFIGS / "experiment" / f"{result['experiment']}.yaml"
    found = _GATE.search(path.read_text(encoding="utf-8")) if path.exists() else None
    return None if found is None else float(found[1])


def task(result: dict[str, Any]) -> str:
    """The environment's id without what the reader knows, and whether the agent sees pixels."""
    name = re.sub(r"^(dm_control|ALE|rl_lab)/|-v\d+$", "", result["protocol"]["environment"])
    images = any(spec["kind"] == "image" for spec in result["config"]["_dims"]["observation"].values())
    return f"{name}, pixels" if images else name


# Parts of a row -------------------------------------------------------------------------------------------------------


def summary(result: dict[str, Any]) -> str:
    """Interquartile mean and interval of five or more seeds; mean and range of fewer."""
    returns = [run["return_mean"] for run in result["rows"]]
    if len(returns) >= ENOUGH_SEEDS:
        middle, low, high = _texts([result["iqm"], *result["ci95"]])
        return f"IQM {middle} [{low}, {high}]"
    middle, low, high = _texts([fmean(returns), min(returns), max(returns)])
    return middle if len(returns) == 1 else f"{middle} ({low} to {high})"


def selection(result: dict[str, Any]) -> list[str]:
    """Whether evaluations while training chose the agent, and whether they ended the run."""
    phases = result["config"]["training"].get("phases") or []
    ends = [phase.get("until") for phase in phases if isinstance(phase.get("until"), dict)]
    stopped = any(str(end.get("metric", "")).startswith("eval/") for end in ends)
    return [CHOSEN] * ("highest" in result["protocol"]["selection"]) + [STOPPED] * stopped


def row_marks(result: dict[str, Any]) -> list[str]:
    """For each row the mark of a change, or none: its digests beside those that a run would have now,
    which cannot be told where its environment is not installed."""
    environments = family_of(result["protocol"]["environment"])
    if environments is not None and not environments.installed:
        return [UNKNOWN] * len(result["rows"])
    try:
        now = digests(prepare([f"+experiment={result['experiment']}", *result["overrides"]]).config)
    except RLLabError:  # the experiment, or a setting, is there no more
        return [FORMER] * len(result["rows"])
    return [_mark(run, now) for run in result["rows"]]


def _mark(run: dict[str, Any], now: dict[str, str]) -> str:
    if run.get("code") is None:
        return UNKNOWN
    return FORMER if any(run[name] != digest for name, digest in now.items()) else ""


def _seeds(result: dict[str, Any]) -> list[str]:
    """The return of each seed with its mark; bold where it missed the gate."""
    limit = gate(result)
    texts = []
    for run, mark in zip(result["rows"], row_marks(result), strict=True):
        text = _text(run["return_mean"])
        missed = limit is not None and run["return_mean"] < limit
        texts.append((f"**{text}**" if missed else text) + mark)
    return texts


def _name(result: dict[str, Any]) -> str:
    return " ".join([f"`{result['experiment']}`", *selection(result)])


def _text(score: float) -> str:
    return _texts([score])[0]


def _texts(scores: Sequence[float]) -> list[str]:
    """As many digits as tell them apart: returns of some tasks are at most 1."""
    largest = max(map(abs, scores))
    digits = 3 if largest < 10.0 else 1 if largest < 1000.0 else 0
    return [f"{score:,.{digits}f}" for score in scores]


def _env_steps(result: dict[str, Any]) -> str:
    training = _range([run["env_steps"] for run in result["rows"]])
    if not selection(result):
        return training
    evaluations = [run.get("evaluation_env_steps") for run in result["rows"]]
    counted = _range([steps for steps in evaluations if steps is not None])
    return f"{training} + {counted if None not in evaluations else '?'}"


def _range(steps: list[int]) -> str:
    if not steps:
        return "–"
    low, high = _short(min(steps)), _short(max(steps))
    return low if low == high else f"{low} to {high}"


def _short(steps: int) -> str:
    if steps >= 1_000_000:
        return f"{steps / 1_000_000:.3g}M"
    return f"{steps / 1_000:.3g}k" if steps >= 1_000 else str(steps)


def _minutes(seconds: Iterable[float]) -> str:
    times = sorted(seconds)
    low, high = _minute(times[0]), _minute(times[-1])
    return f"{low} min" if low == high else f"{low} to {high} min"


def _minute(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds < 600 else f"{seconds / 60:.0f}"


def _devices(result: dict[str, Any]) -> str:
    return ", ".join(dict.fromkeys({"cuda": "GPU"}.get(run["device"], "CPU") for run in result["rows"]))


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])
