from __future__ import annotations

import json

import numpy as np
import pytest

from rl_lab.errors import RLLabError
from rl_lab.metrics.charts import COLOURS, Panel, draw
from rl_lab.metrics.comparison import _panels, compare_runs, group_runs
from rl_lab.metrics.logger import MetricsLogger
from rl_lab.metrics.run_files import read_run
from rl_lab.metrics.statistics import bootstrap_interval

TRAINING = "collect/return_mean"


def test_groups_scores_and_files(make_run, tmp_path):
    """Seeds of one setting are a group with IQM and interval; another setting is another group."""
    scores = [100.0, 480.0, 490.0, 500.0, 600.0]
    folders = [make_run(f"a-s{seed}", seed=seed, score=score) for seed, score in enumerate(scores)]
    folders += [make_run(f"b-s{seed}", seed=seed, score=50.0 + seed, lr=1e-3) for seed in range(2)]
    result = compare_runs(folders, tmp_path / "out")

    first, second = result.groups
    assert first.label == "dreamer_v3_cartpole (optimizers.main.lr=4e-05)"
    assert first.iqm == 490.0
    assert first.ci95 == bootstrap_interval(scores)
    assert [run.return_mean for run in first.runs] == scores
    assert second.iqm == 50.5
    assert result.differences == {"optimizers.main.lr": [4e-5, 1e-3]}
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert written["groups"][0]["iqm"] == 490.0
    assert written["groups"][0]["runs"][1]["env_steps"] == 4800
    for suffix in ("html", "svg", "png"):
        assert (tmp_path / "out" / f"comparison.{suffix}").stat().st_size > 0


def test_page_is_self_contained_and_escaped(make_run, tmp_path):
    """The page loads nothing, and names are text."""
    folders = [make_run("x-s0", score=None), make_run("y-s0", rows=0, score=None)]
    (folders[0] / "config.yaml").write_text("experiment: {name: '<script>alert(1)</script>', seed: 0}\n")
    compare_runs(folders, tmp_path)
    html = (tmp_path / "comparison.html").read_text()
    assert "<script" not in html
    assert "://" not in html


def test_text_is_a_table_for_the_console(make_run, tmp_path):
    """A run without a final evaluation is marked; the page is named."""
    text = str(compare_runs([make_run("20250102-s0", score=None)], tmp_path))
    head, group, run, where = text.splitlines()
    assert head.split() == ["return", "±", "std", "env", "steps", "wall", "time"]
    assert group.startswith("dreamer_v3_cartpole")
    assert "480*" in run
    assert str(tmp_path / "comparison.html") in where


def test_runs_of_different_length_and_without_evaluations(make_run, tmp_path):
    """Curves are averaged over the stretch that all runs cover; training returns serve where evaluations lack."""
    folders = [make_run(f"r-s{rows}", seed=rows, rows=rows, score=None) for rows in (3, 4, 20)]
    result = compare_runs([*folders, folders[0]], tmp_path)  # a run named twice counts once
    assert [len(group.runs) for group in result.groups] == [3]
    assert result.groups[0].ci95 is None


def test_nothing_to_compare(make_run, tmp_path):
    """No run, or runs without a single row, is an error that says what to do."""
    with pytest.raises(RLLabError, match="at least one run"):
        compare_runs([], tmp_path)
    with pytest.raises(RLLabError, match="logged anything"):
        compare_runs([make_run(rows=0, score=None)], tmp_path)


def test_runs_of_very_different_length_share_a_logarithmic_axis(make_run, tmp_path):
    """A run that ended after a tenth of the others' steps stays visible; alike ones keep the plain axis."""
    alike = [read_run(make_run(f"a-s{rows}", seed=rows, rows=rows)) for rows in (60, 80)]
    short = read_run(make_run("b-s0", rows=4, lr=1e-3))
    assert not any(panel.log_x for panel in _panels({"a": alike}, TRAINING))
    assert all(panel.log_x for panel in _panels({"a": alike, "b": [short]}, TRAINING))
    compare_runs([alike[0].folder, short.folder], tmp_path)
    assert (tmp_path / "comparison.png").stat().st_size > 0


def strength(figure, x, y):
    """How far the strongest point of a line at (x, y) stands out from white, from 0 to 1."""
    column, row = map(round, figure.axes[0].transData.transform((x, y)))
    image = np.asarray(figure.canvas.buffer_rgba(), np.float64)[::-1, :, :3]
    return np.linalg.norm(255.0 - image[row - 3 : row + 4, column - 3 : column + 4], axis=-1).max()


def test_the_line_of_one_run_can_be_seen(make_run):
    """Thin beside its group's, and still at least half as strong, in every colour."""
    members = [read_run(make_run(f"s{seed}", seed=seed, metrics={TRAINING: 100.0 * seed})) for seed in (1, 2, 3, 4)]
    groups = {f"group {number}": members for number in range(len(COLOURS))}
    series = _panels(groups, TRAINING)[0].series
    thin, thick = series[: -len(groups)], series[-len(groups) :]
    for number, middle in enumerate(thick):
        figure = draw([Panel([*thin[4 * number : 4 * number + 4], middle])], svg=False, width=5.0, height=3.0)
        figure.canvas.draw()
        group = strength(figure, 2400.0, 250.0)
        for run in (100.0, 200.0, 300.0, 400.0):
            assert strength(figure, 2400.0, run) > 0.5 * group


def test_long_names_stay_within_the_picture(make_run, tmp_path):
    """A legend breaks its lines, on a narrow page too, and the table of settings has the whole names."""
    name = "an_experiment_" * 8 + "end"
    folders = [make_run("a-s0", experiment=name), make_run("b-s0", experiment=name, seed=1, lr=1e-3)]
    grouped = group_runs([read_run(folder) for folder in folders])
    for width in (4.8, 10.0):
        figure = draw(_panels(grouped, TRAINING), svg=True, columns=1, width=width, height=3.4, legend_below=True)
        figure.draw_without_rendering()
        assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1
    compare_runs(folders, tmp_path)
    page = (tmp_path / "comparison.html").read_text()
    assert all(f"<th>{label}</th>" in page for label in grouped)


def test_time_counts_from_where_a_run_came_to_speed(make_run):
    """A minute of compiling before the first row does not push a curve to the right."""
    from rl_lab.metrics.comparison import _startup_s

    folder = make_run("slow", rows=0, score=None)
    logger = MetricsLogger(folder / "metrics.jsonl")
    for row in range(1, 6):
        logger.log(env_steps=100 * row, updates=row, wall_s=60.0 + 2.0 * row, phase="train", values={"train/x": 1.0})
    logger.close()
    assert _startup_s(read_run(folder)) == pytest.approx(60.0)
    by_time = _panels({"a": [read_run(folder)]}, "train/x")[1].series[0]
    assert by_time.x * 60.0 == pytest.approx([2.0, 4.0, 6.0, 8.0, 10.0])
    assert _startup_s(read_run(make_run("quick"))) == 0.0
