"""The parts of a run's report below its head: curves, films, imagination and tables."""

from __future__ import annotations

import shlex
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.metrics.charts import COLOURS, Panel, Series, smooth, svg_chart, thin
from rl_lab.metrics.glossary import explain, grouped
from rl_lab.metrics.imagination import error_panel
from rl_lab.metrics.page import both_widths, figure_number, folded, media, paragraph, preformatted, section, table
from rl_lab.metrics.run_files import EVAL_RETURN, RunFiles, number, video_env_steps

HOW_TO_READ = (
    "The model first watches a few real steps. Then it gets no more observations: from the actions alone it predicts "
    "what comes next, each step on top of its own last prediction. Small mistakes add up, so the first steps should "
    "match closely and later ones may drift. The dashed grey line is the error of a forecast that nothing changes any "
    "more: a model worth having stays below it."
)

PLANNING = (
    "At every decision the planner tries many sequences of actions in its model and follows the most promising one for "
    "one step."
)
# The pictures of planning by file: what each shows, and how it is read.
PLANNING_PICTURES = {
    "plans.png": "Candidates and the chosen plan at some decisions. Grey: where some of the candidates would lead. "
    "Orange: the best of them. Blue: what was chosen. Black: what then happened; it leaves the blue line where the "
    "planner changes its mind, or where its model was wrong.",
    "trees.png": "Search trees, and the policies before and after the search.",
    "calibration.png": "Values of network and search against the returns that came.",
    "values.png": "What plans promised and what came. Left, decision by decision: the return that the plan promised, "
    "and the one that came. Right, each dot is a decision: on the dashed line the promise was kept, above it less came "
    "than was promised.",
}


# Curves ---------------------------------------------------------------------------------------------------------------


def learning_curve(run: RunFiles) -> str:
    series: list[Series] = []
    name = run.train_return_name()
    if name:
        x, y = run.series(name)
        dots_x, dots_y, _, _ = thin(x, y, 400)
        series.append(Series(dots_x, dots_y, "training episodes", COLOURS[0], "dots", alpha=0.45))
        if len(y) >= 8:
            line_x, line_y, _, _ = thin(x, smooth(y, max(3, len(y) // 15)), 200)
            series.append(Series(line_x, line_y, "training, smoothed", COLOURS[0]))
    x, y = run.series(EVAL_RETURN)
    if len(y):
        spread = dict(zip(*(values.tolist() for values in run.series("eval/return_std")), strict=True))
        around = np.array([spread.get(step, 0.0) for step in x.tolist()])
        series.append(Series(x, y, "evaluation ± std", COLOURS[1], "both", low=y - around, high=y + around))
    final = number(run.summary.get(EVAL_RETURN))
    end = number(run.summary.get(run.axis))
    if final is not None and end is not None:
        series.append(Series([end], [final], "final evaluation", COLOURS[7], "dots"))
    if not series:
        return section("Learning curve", '<p class="quiet">No episode has ended yet.</p>')
    panel = [Panel(series, x_label=run.axis_label, y_label="return of an episode")]
    chart = both_widths(svg_chart(panel, width=8.6, height=3.4), svg_chart(panel, width=4.6, height=3.6))
    text = (
        "The return (sum of rewards) of an episode, against experience. Training episodes include exploration; "
        "evaluations, on held-out seeds, only where the workflow says so. One env step is one decision of the agent."
    )
    return section("Learning curve", chart, text=text)


def metrics(run: RunFiles) -> list[str]:
    """Small charts of everything that was logged, in groups."""
    parts = []
    # The final evaluation is one point, shown in the head, the curve and the table.
    for group, names in grouped([name for name in run.names() if not name.startswith("eval/final_")]):
        charts = [_small_chart(run, name) for name in names]
        grid = f'<div class="grid">{"".join(charts)}</div>'
        parts.append(folded(f"{group.title} ({len(names)})", grid, text=group.text, is_open=group.open))
    return parts


def _small_chart(run: RunFiles, name: str) -> str:
    axis = run.axis_of(name)
    x, y = run.series(name, axis)
    xs, mean, low, high = thin(x, y, 120)
    bold = smooth(mean, len(mean) // 12) if len(mean) >= 24 else mean
    series = [Series(xs, bold, colour=COLOURS[0], width=1.6, low=low, high=high)]
    chart = svg_chart([Panel(series)], width=3.6, height=1.45, compact=True)
    what = explain(name)
    note = f"<p>{escape(what)}</p>" if what else ""
    last, by = figure_number(float(y[-1])), f" by {axis.replace('_', ' ')}" if axis != run.axis else ""
    return f'<figure><div class="name"><span>{escape(last)}</span>{escape(name + by)}</div>{chart}{note}</figure>'


# Seeing ---------------------------------------------------------------------------------------------------------------


def videos(run: RunFiles) -> str:
    videos = run.videos()
    if not videos:
        return ""
    chosen = [videos[0], videos[-1]] if len(videos) > 1 else videos
    films = [media(path, _caption(path)) for path in chosen]
    return section("The agent at work", f'<div class="media">{"".join(films)}</div>' if any(films) else "")


def _caption(path: Path) -> str:
    env_steps = video_env_steps(path)
    after = f" after {env_steps:,} env steps" if env_steps is not None else ""
    if path.name.startswith("final"):
        return f"the final evaluation{after}"
    return f"an evaluation{after}" if after else f"a later evaluation ({path.name})"


def imagination(run: RunFiles) -> str:
    folder, numbers = run.folder / "imagination", run.imagination
    keys = numbers.get("keys") if isinstance(numbers.get("keys"), dict) else {}
    parts = [_imagined_key(folder, key, entry, numbers) for key, entry in (keys or {}).items()]
    if not parts:
        parts = [media(folder / "picture.png", "real beside imagined", wide=True), media(folder / "video.mp4", "")]
    reward = numbers.get("reward")
    if isinstance(reward, dict) and number(reward.get("real_sum_mean")) is not None:
        real, imagined = number(reward["real_sum_mean"]), number(reward.get("imagined_sum_mean"))
        text = f"Over the imagined steps the reward adds up to {figure_number(imagined)} in imagination, "
        parts.append(f"<p>{escape(text + f'{figure_number(real)} in reality (mean of the sequences).')}</p>")
    return section("What the model imagines", *parts, text=HOW_TO_READ if any(parts) else "")


def _imagined_key(folder: Path, key: str, entry: Any, numbers: dict[str, Any]) -> str:
    if not isinstance(entry, dict):
        return ""
    chart = ""
    if entry.get("kind") == "image":  # the picture of a vector has this curve already
        try:
            panel = error_panel(key, _with_gaps(entry), int(numbers["context"]))
            chart = svg_chart([panel], width=6.0, height=3.0)
        except (KeyError, TypeError, ValueError):
            chart = ""  # numbers of another version: the pictures still tell
    names = [str(entry.get(name) or "missing") for name in ("picture", "video")]
    picture, video = (folder / Path(name).name for name in names)
    film = media(video, "the same as a film")
    beside = f'<div class="media">{film}{chart}</div>' if film or chart else ""
    shown = media(picture, f"real and imagined {key}", wide=True) + beside
    return f"<h3>{escape(key)}</h3>{_judgement(entry, numbers.get('horizon'))}{shown}" if shown else ""


def _judgement(entry: dict[str, Any], horizon: Any) -> str:
    """Whether the imagination is worth having, in numbers."""
    error, baseline = number(entry.get("error_mean")), number(entry.get("baseline_mean"))
    if error is None or not baseline:
        return ""
    text = f"Mean error over the imagined steps: {figure_number(error)}, against {figure_number(baseline)} "
    text += "for a forecast that nothing changes."
    better, steps = number(entry.get("steps_better")), number(horizon)
    if better is not None and steps:
        text += f" The model is the better one at {better:.0f} of {steps:.0f} steps."
    return f"<p>{escape(text)}</p>"


def _with_gaps(entry: dict[str, Any]) -> dict[str, Any]:
    """null (not finite) becomes a gap in the curve."""
    curves = {name: [np.nan if v is None else float(v) for v in entry[name]] for name in ("error", "baseline")}
    return {**entry, **curves}


def planning(run: RunFiles) -> str:
    folder, numbers = run.folder / "planning", run.planning
    parts = []
    for name, text in PLANNING_PICTURES.items():
        picture = media(folder / name, text, wide=True)
        parts.append(paragraph(text) + picture if picture else "")
    expected, received = number(numbers.get("expected_mean")), number(numbers.get("received_mean"))
    if any(parts) and expected is not None and received is not None:
        text = f"On average a plan promised {figure_number(expected)}, and {figure_number(received)} came."
        parts.append(f"<p>{escape(text)}</p>")
    return section("What the planner considered", *parts, text=PLANNING if any(parts) else "")


# Tables ---------------------------------------------------------------------------------------------------------------


def evaluations(run: RunFiles) -> str:
    head = ("env steps", "updates", "return, mean", "std", "min", "max", "episode length", "episodes")
    keys = ("return_mean", "return_std", "return_min", "return_max", "length_mean", "episodes")
    rows: list[list[Any]] = []
    for row in [row for row in run.rows if number(row.get(EVAL_RETURN)) is not None]:
        values = [number(row.get(f"eval/{key}")) for key in keys]
        counts = [int(number(row.get(name)) or 0) for name in ("env_steps", "updates")]
        rows.append([*counts, *_dashes(values)])
    if number(run.summary.get(EVAL_RETURN)) is not None:
        values = [number(run.summary.get(f"eval/{key}")) for key in keys]
        counts = [int(number(run.summary.get(name)) or 0) for name in ("env_steps", "updates")]
        rows.append([*counts, *_dashes(values)])
        text = "The last row is the final evaluation, on episodes that were used for nothing else."
    else:
        text = ""
    return folded(f"Evaluations as a table ({len(rows)})", table(head, rows), text=text)


def _dashes(values: list[float | None]) -> list[Any]:
    return ["–" if value is None else value for value in values]


def plan_and_events(run: RunFiles) -> str:
    events = [
        [str(event.get("time", "")), int(number(event.get("env_steps")) or 0), str(event.get("kind", "")),
         str(event.get("message", ""))]
        for event in run.events
    ]  # fmt: skip
    plan = folded("The plan", preformatted(run.plan), text="What the run announced before its first step.")
    text = "Restarted environments, rollbacks, resumed runs and the like."
    title = f"Events ({len(events)})"
    return plan + folded(title, table(("time", "env steps", "kind", "message"), events), text=text, is_open=True)


def facts_of_the_run(run: RunFiles) -> str:
    info = run.info
    counts = sorted(map(list, run.parameters.items()), key=lambda entry: entry[0] == "total")
    versions = info.get("versions") if isinstance(info.get("versions"), dict) else {}
    packages = [[str(name), str(version)] for name, version in (versions or {}).items()]
    speed = [[name, float(value)] for name, value in run.summary.items() if number(value) is not None]
    shown = ("parameters", "versions", "status", "error", "argv", "pid")
    other = [[name, str(value)] for name, value in info.items() if name not in shown and value not in (None, "", [])]
    argv = info.get("argv")
    if isinstance(argv, list) and argv:
        other.append(["started with", shlex.join(map(str, argv))])
    parts = [
        ("Parameters by component", table(("component", "trainable parameters"), counts)),
        ("Summary", table(("measure", "value"), speed)),
        ("Run", table(("", ""), other)),
        ("Versions", table(("package", "version"), packages)),
    ]
    content = [f"<h3>{escape(title)}</h3>{body}" for title, body in parts if body]
    return folded("The run in numbers: parameters, timings, versions, commit", *content)
