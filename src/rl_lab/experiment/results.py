"""The files in results/: one row a seed, a curve beside each, and how they were obtained."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from rl_lab.environments.families import family_of
from rl_lab.metrics.statistics import bootstrap_interval, interquartile_mean
from rl_lab.orchestration.run_directory import RunDirectory, read_json, to_json, write_atomic

CURVE_COLUMNS = ("env_steps", "frames", "updates", "wall_s", "eval/return_mean", "collect/episode_return")
MAX_CURVE_ROWS = 400
PHASE_PREFIXES = ("workflow/", "train/loss/", "eval/return_mean")

Rows = dict[int, dict[str, Any]]


def environment_versions(environment_id: str) -> dict[str, str]:
    """Gymnasium and the packages that the environment comes from."""
    family = family_of(environment_id)
    modules = {"gymnasium", *(family.modules if family is not None else ())}
    owners = packages_distributions()
    packages = {package for module in modules for package in owners.get(module, [])}
    return {package: version(package) for package in sorted(packages)}


def chosen_actions(config: Mapping[str, Any]) -> str:
    """`greedy` or `sampled`: an agent of this configuration chooses its actions so in evaluations."""
    return "sampled" if config["workflow"].get("sample_in_eval") else "greedy"


def metric_rows(run: RunDirectory) -> list[dict[str, Any]]:
    """metrics.jsonl; a torn last line is left out."""
    rows = []
    for line in run.metrics_jsonl.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def curve_file(run: RunDirectory, path: Path) -> Path:
    """The learning curve as a small CSV."""
    rows = metric_rows(run)
    counted = [row for row in rows if row.get("collect/frames") and row["env_steps"]]
    repeat = counted[-1]["collect/frames"] / counted[-1]["env_steps"] if counted else 1
    shown = [row for row in rows if "eval/return_mean" in row or "collect/episode_return" in row]
    stride = -(-len(shown) // MAX_CURVE_ROWS) or 1
    thinned = [row for index, row in enumerate(shown) if index % stride == 0 or "eval/return_mean" in row]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, CURVE_COLUMNS, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows({**row, "frames": int(row["env_steps"] * repeat)} for row in thinned)
    return path


def result_row(run: RunDirectory, seed: int, score: Mapping[str, Any], curve: str) -> dict[str, Any]:
    """One seed, from its run directory and its evaluation."""
    info, summary, logged = run.info(), read_json(run.summary_json) or {}, metric_rows(run)
    frames = [row["collect/frames"] for row in logged if "collect/frames" in row]
    return {
        "seed": seed,
        "return_mean": score["eval/return_mean"],
        "return_std": score["eval/return_std"],
        "training_return_mean": score["as_in_training"]["eval/return_mean"],
        "training_return_std": score["as_in_training"]["eval/return_std"],
        **_shares(score),
        "env_steps": summary.get("env_steps"),
        "evaluation_env_steps": evaluation_env_steps(logged),
        "frames": int(frames[-1]) if frames else summary.get("env_steps"),
        "updates": summary.get("updates"),
        "wall_s": summary.get("wall_s"),
        "device": info.get("device"),
        "machine": info.get("machine"),
        "commit": info.get("commit"),
        "code": info.get("code"),
        "settings": info.get("settings"),
        "versions": info.get("versions"),
        "parameters": (info.get("parameters") or {}).get("total"),
        "curve": curve,
        "phases": phase_ends(logged),
    }


def _shares(score: Mapping[str, Any]) -> dict[str, Any]:
    """The shares of episodes that ended with some flag of the environment set, where it has such flags."""
    prefix = "eval/share_"
    shares = {name.removeprefix(prefix): value for name, value in score.items() if name.startswith(prefix)}
    return {"shares": shares} if shares else {}


def evaluation_env_steps(rows: Sequence[Mapping[str, Any]]) -> int:
    """Decisions in the periodic evaluations of a run: an agent that was selected by them, or a run that they stopped,
    rests on these as well."""
    evaluations = [row for row in rows if "eval/episodes" in row]
    return round(sum(row["eval/episodes"] * row["eval/length_mean"] for row in evaluations))


def phase_ends(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By phase: the last value of every loss, of every evaluation and of what the workflow logged."""
    ends: dict[str, dict[str, float]] = {}
    for row in rows:
        kept = {name: value for name, value in row.items() if name.startswith(PHASE_PREFIXES)}
        ends.setdefault(row["phase"], {}).update(kept)
    return ends


def read_results(path: Path, *, overrides: Sequence[str], protocol: Mapping[str, Any]) -> Rows:
    """Rows of an earlier reproduction of the same thing, by seed; none where overrides or protocol differ."""
    before = read_json(path)
    if before is None or before.get("overrides") != list(overrides) or before.get("protocol") != protocol:
        return {}
    return {int(row["seed"]): row for row in before["rows"]}


def write_results(
    path: Path,
    *,
    experiment: str,
    overrides: Sequence[str],
    protocol: Mapping[str, Any],
    config: Mapping[str, Any],
    rows: Rows,
) -> None:
    """Write the file with its interquartile mean and 95 % bootstrap interval."""
    ordered = [rows[seed] for seed in sorted(rows)]
    returns = [row["return_mean"] for row in ordered]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "experiment": experiment,
        "overrides": list(overrides),
        "protocol": dict(protocol),
        "rows": ordered,
        "iqm": interquartile_mean(returns) if returns else None,
        "ci95": list(bootstrap_interval(returns)) if returns else None,
        "config": dict(config),
    }
    write_atomic(path, to_json(content))
