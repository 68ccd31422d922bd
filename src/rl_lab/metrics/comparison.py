"""Several runs side by side: curves, final scores, intervals and what was set differently."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.errors import RLLabError
from rl_lab.metrics.charts import COLOURS, DASHES, Panel, Series, png_chart, smooth, svg_chart, svg_file, thin
from rl_lab.metrics.console import duration
from rl_lab.metrics.page import both_widths, figure_number, folded, page, section, table
from rl_lab.metrics.run_files import EVAL_RETURN, RunFiles, number, read_run
from rl_lab.metrics.sinks import flatten
from rl_lab.metrics.statistics import bootstrap_interval, interquartile_mean

# Settings that may differ between repetitions of one experiment.
_NOT_COMPARED = ("experiment.seed", "experiment.name", "experiment.device", "run_root", "training.resume_path",
                 "training.threads", "logging.", "checkpoint.", "_dims.", "hydra.")  # fmt: skip
_HEAD = ("", "return", "± std", "env steps", "wall time")
_CURVES_TEXT = (
    "Thin: one run. Thick: the interquartile mean of a group (the mean without the best and the worst quarter); its "
    "band is the bootstrap 95 % interval. Time counts from where a run came to speed, without what it compiled before."
)
_SCORES_TEXT = (
    "A group's return is the interquartile mean of its runs with the stratified bootstrap 95 % interval; a run's is "
    "the mean over its final evaluation episodes. An asterisk marks a run without one: its last evaluation so far."
)
_GRID = 120  # points of a group's curve
_FAR_APART = 8.0  # from this ratio of the longest curve to the shortest on, the axis is logarithmic


@dataclass(frozen=True)
class RunScore:
    """One run of a comparison. `is_final`: the score is that of the final evaluation, not of the last one so far."""

    name: str
    seed: Any
    status: str
    return_mean: float | None
    return_std: float | None
    is_final: bool
    env_steps: int
    wall_s: float


@dataclass(frozen=True)
class GroupScore:
    """Runs that differ in their seed only."""

    label: str
    experiment: str
    runs: list[RunScore]
    iqm: float | None
    ci95: tuple[float, float] | None  # None for fewer than two runs with a score


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_runs`; as text it is the table for the console."""

    groups: list[GroupScore]
    differences: dict[str, list[Any]]  # setting -> its value in each group
    files: dict[str, Path] = field(default_factory=dict)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = []
        for group in self.groups:
            rows.append((group.label, *_group_text(group)))
            rows += [(f"  {run.name}", *_run_text(run)) for run in group.runs]
        widths = [max(len(row[i]) for row in [_HEAD, *rows]) for i in range(len(_HEAD))]
        lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
                 for row in [_HEAD, *rows]]  # fmt: skip
        if "html" in self.files:
            lines.append(f"Curves and settings: {self.files['html']}")
        return "\n".join(line.rstrip() for line in lines)


def compare_runs(folders: Sequence[Path], out: Path) -> Comparison:
    """Compare run directories; writes comparison.html, .svg, .png and .json into `out`."""
    runs = [read_run(folder) for folder in dict.fromkeys(Path(folder) for folder in folders)]
    if not runs:
        raise RLLabError("There is nothing to compare. Name at least one run: rl-lab compare RUN RUN …")
    empty = [str(run.folder) for run in runs if not run.rows and not run.summary]
    if len(empty) == len(runs):
        raise RLLabError(f"None of these runs has logged anything yet: {', '.join(empty)}. Train them first.")
    grouped = group_runs(runs)
    groups = [score_group(label, members) for label, members in grouped.items()]
    differences = setting_differences(list(grouped.values()))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    panels = _panels(grouped, _metric(runs))
    files = {"html": out / "comparison.html", "json": out / "comparison.json"}
    files["svg"] = svg_file(out / "comparison.svg", panels, columns=2, width=11.0, height=4.1, legend_below=True)
    files["png"] = png_chart(out / "comparison.png", panels, columns=2, width=11.0, height=4.1, legend_below=True)
    result = Comparison(groups, differences, files)
    files["json"].write_text(json.dumps(_as_json(result), indent=1, allow_nan=False) + "\n")
    files["html"].write_text(_page(result, panels), encoding="utf-8", errors="replace")
    return result


# Groups ---------------------------------------------------------------------------------------------------------------


def group_runs(runs: list[RunFiles]) -> dict[str, list[RunFiles]]:
    """Runs by experiment and settings; the label names the settings that tell groups of one experiment apart."""
    by_experiment: dict[str, dict[str, list[RunFiles]]] = {}
    for run in runs:
        by_experiment.setdefault(run.experiment, {}).setdefault(json.dumps(_settings(run), default=str), []).append(run)
    groups: dict[str, list[RunFiles]] = {}
    for experiment, variants in by_experiment.items():
        differences = setting_differences(list(variants.values()))
        for position, members in enumerate(variants.values()):
            values = [f"{key}={value_text(entry[position])}" for key, entry in differences.items()]
            more = f", and {len(values) - 3} more" if len(values) > 3 else ""
            label = f"{experiment} ({', '.join(values[:3])}{more})" if values else experiment
            groups[label if label not in groups else f"{label} #{position + 1}"] = members
    return groups


def _settings(run: RunFiles) -> dict[str, Any]:
    flat = flatten(run.config)
    return {key: flat[key] for key in sorted(flat) if not key.startswith(_NOT_COMPARED)}


def setting_differences(groups: list[list[RunFiles]]) -> dict[str, list[Any]]:
    """The settings whose values are not the same in all groups."""
    settings = [_settings(members[0]) for members in groups]
    keys = sorted({key for entry in settings for key in entry})
    return {
        key: [entry.get(key) for entry in settings]
        for key in keys
        if any(entry.get(key) != settings[0].get(key) for entry in settings)
    }


def score_group(label: str, members: list[RunFiles]) -> GroupScore:
    runs = [_run_score(run) for run in members]
    scores = [run.return_mean for run in runs if run.return_mean is not None]
    iqm = interquartile_mean(scores) if scores else None
    return GroupScore(label, members[0].experiment, runs, iqm, bootstrap_interval(scores) if len(scores) > 1 else None)


def _run_score(run: RunFiles) -> RunScore:
    return RunScore(
        name=run.folder.name,
        seed=run.seed,
        status=run.status,
        return_mean=run.last(EVAL_RETURN),
        return_std=run.last("eval/return_std"),
        is_final=number(run.summary.get(EVAL_RETURN)) is not None,
        env_steps=int(run.last("env_steps") or 0),
        wall_s=run.last("wall_s") or 0.0,
    )


# Curves ---------------------------------------------------------------------------------------------------------------


def _metric(runs: list[RunFiles]) -> str:
    """Evaluations where every run has some to draw, else the returns of training episodes."""
    if all(len(run.series(EVAL_RETURN)[0]) >= 2 for run in runs if run.rows):
        return EVAL_RETURN
    name = next((run.train_return_name() for run in runs if run.train_return_name()), None)
    return name or EVAL_RETURN


def _panels(groups: dict[str, list[RunFiles]], metric: str) -> list[Panel]:
    what = "return, evaluations" if metric == EVAL_RETURN else "return, training episodes"
    axis = next((run.axis for members in groups.values() for run in members if run.rows), "env_steps")
    by_experience, by_time = _curves(groups, metric, axis), _curves(groups, metric, "wall_s")
    minutes = "minutes of wall-clock time"
    return [
        Panel(by_experience, "By experience", axis.replace("_", " "), what, log_x=_far_apart(by_experience)),
        Panel(by_time, "By time", minutes, what, legend=False, log_x=_far_apart(by_time)),
    ]


def _far_apart(curves: list[Series]) -> bool:
    """Whether on a plain axis the short curves would be hard to see."""
    ends = [float(np.max(series.x)) for series in curves]
    return bool(ends) and min(ends) > 0 and max(ends) > _FAR_APART * min(ends)


def _curves(groups: dict[str, list[RunFiles]], metric: str, axis: str) -> list[Series]:
    thin_lines, thick_lines = [], []
    for position, (label, members) in enumerate(groups.items()):
        colour = COLOURS[position % len(COLOURS)]
        dashes = DASHES[position // len(COLOURS) % len(DASHES)]
        curves = [curve for curve in (_curve(run, metric, axis) for run in members) if len(curve[0])]
        several = len(curves) > 1
        for x, y in curves:
            width, alpha = (1.2, 0.7) if several else (2.2, 1.0)
            thin_lines.append(Series(x, y, None if several else label, colour, width=width, alpha=alpha, dashes=dashes))
        if several:
            x, middle, low, high = group_curve(curves)
            name = f"{label}: IQM of {len(curves)} runs"
            thick = Series(x, middle, name, colour, width=2.4, dashes=dashes)
            thick_lines.append(replace(thick, low=low, high=high) if len(curves) > 2 else thick)
    return thin_lines + thick_lines


def _curve(run: RunFiles, metric: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = run.series(metric, axis)
    if metric != EVAL_RETURN and len(y) >= 8:
        y = smooth(y, max(3, len(y) // 15))
    if axis == "wall_s":
        x = minutes_at_speed(run, x)
    x, y, _, _ = thin(x, y, 300)
    return x, y


def minutes_at_speed(run: RunFiles, wall_s: np.ndarray) -> np.ndarray:
    """Minutes since a run came to speed, in the shape of `wall_s`: without what it compiled and filled before."""
    return np.maximum(wall_s - _startup_s(run), 0.0) / 60.0


def _startup_s(run: RunFiles) -> float:
    """Seconds before a run came to speed (compiling, filling its replay): what its first row took beyond the pace of
    the rows after it."""
    head = [(number(row.get("wall_s")), number(row.get(run.axis))) for row in run.rows]
    points = [(wall, done) for wall, done in head if wall is not None and done is not None]
    first = points[0] if points else (0.0, 0.0)
    later = next(((wall, done) for wall, done in points[1:] if done > first[1]), None)
    if later is None:
        return 0.0
    pace = (later[0] - first[0]) / (later[1] - first[1])
    return max(0.0, first[0] - pace * first[1])


def group_curve(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The interquartile mean of curves with its interval, over the stretch that all of them cover."""
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(start, max(start, end), _GRID)
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    middle = np.array([interquartile_mean(column) for column in values.T])
    bounds = np.array([bootstrap_interval(column, samples=1000) for column in values.T])
    return grid, middle, bounds[:, 0], bounds[:, 1]


# Words ----------------------------------------------------------------------------------------------------------------


def _page(result: Comparison, panels: list[Panel]) -> str:
    rows: list[list[str]] = []
    for group in result.groups:
        rows.append([group.label, *_group_text(group)])
        rows += [[f"\N{EM SPACE}{run.name}", *_run_text(run)] for run in group.runs]
    labels = [group.label for group in result.groups]
    settings = [[key, *map(value_text, values)] for key, values in list(result.differences.items())[:200]]
    chart = both_widths(
        svg_chart(panels, columns=2, width=10.0, height=3.9, legend_below=True),
        svg_chart(panels, columns=1, width=4.8, height=3.4, legend_below=True),
    )
    title = f"Settings that differ ({len(result.differences)})"
    count = sum(len(group.runs) for group in result.groups)
    return page(
        "Comparison – RL Lab",
        [
            f"<header><h1>Comparison of {count} run{'s' if count != 1 else ''}</h1></header>",
            section("Curves", chart, text=_CURVES_TEXT),
            section("Final scores", table(_HEAD, rows, right=[False, *[True] * 4]), text=_SCORES_TEXT),
            folded(title, table(("setting", *labels), settings), is_open=True),
        ],
    )


def _group_text(group: GroupScore) -> tuple[str, ...]:
    interval = ""
    if group.ci95 is not None:
        interval = f" [{figure_number(group.ci95[0])}, {figure_number(group.ci95[1])}]"
    wall = float(np.mean([run.wall_s for run in group.runs]))
    steps = round(float(np.mean([run.env_steps for run in group.runs])))
    return (f"{figure_number(group.iqm)}{interval}", "", f"{steps:,}", duration(wall))


def _run_text(run: RunScore) -> tuple[str, ...]:
    mark = "" if run.is_final or run.return_mean is None else "*"
    return (figure_number(run.return_mean) + mark, figure_number(run.return_std), f"{run.env_steps:,}",
            duration(run.wall_s))  # fmt: skip


def value_text(value: Any) -> str:
    text = json.dumps(value, default=str) if isinstance(value, list | dict) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _as_json(result: Comparison) -> dict[str, Any]:
    groups = [
        {
            "label": group.label,
            "experiment": group.experiment,
            "iqm": group.iqm,
            "ci95": list(group.ci95) if group.ci95 else None,
            "runs": [{name: getattr(run, name) for name in RunScore.__dataclass_fields__} for run in group.runs],
        }
        for group in result.groups
    ]
    differences = {key: [value_text(value) for value in values] for key, values in result.differences.items()}
    return {"groups": groups, "differences": differences}
