from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from run_fixtures import write_run

from rl_lab.metrics.glossary import explain, grouped
from rl_lab.metrics.imagination import write_imagination
from rl_lab.metrics.logger import MetricsLogger
from rl_lab.metrics.report import render_report, verdict, write_report
from rl_lab.metrics.run_files import read_run
from rl_lab.metrics.video import write_video
from rl_lab.records import ImaginedRollout

VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """Collects what a page loads, and checks that its tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "data", "poster", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def add_seeing(folder):
    generator = np.random.default_rng(0)
    image = generator.integers(0, 255, (1, 8, 8, 8, 3), dtype=np.uint8)
    vector, reward = generator.normal(size=(1, 8, 3)), np.ones((1, 8))
    rollout = ImaginedRollout(3, {"image": image, "vector": vector}, {"image": image, "vector": vector}, reward, reward)
    write_imagination(rollout, folder / "imagination", fps=8)
    for step in (600, 4800):
        write_video(folder / "videos" / f"eval-{step:010d}.mp4", image[0], 8)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> str:
    """The page of a whole run."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "dreamer_v3_cartpole" / "20250102-030405-s0")
    add_seeing(folder)
    return write_report(folder).read_text()


def test_report_of_a_finished_run(finished):
    """Verdict, curve, films, imagination, metrics, plan, events, config, versions and commands are in one file."""
    html, page = finished, Page(finished)
    assert page.tags.count("video") == 4
    for text in (
        "480 ± 12.5", "over 20 episodes", "DreamerV3", "CartPole-v1", "Learning curve", "train/loss/dynamics",
        "What the model imagines", "better one at 5 of 5 steps", "Phase train: online", "went on", "640,867", "abc123",
        "training.resume_path=", "rl-lab eval", "rl-lab imagine", "total_timesteps: 4800",
    ):  # fmt: skip
        assert text in html
    assert html.index("World model (") < html.index("Behaviour (") < html.index("Speed (")


def test_report_opens_without_a_network(finished):
    """Everything that the page loads is inside it."""
    assert all(load.startswith(("data:", "#")) for load in Page(finished).loads)
    assert not re.search(r"https?://|@import|url\((?!#)|<script|<link", finished)


@pytest.mark.parametrize("left", [[], ["run.json"], ["config.yaml"], ["metrics.jsonl"], ["summary.json"]])
def test_report_of_any_part_of_a_run(make_run, left):
    """Each file may be missing; the page is whole all the same."""
    folder = make_run(rows=3)
    for path in list(folder.iterdir()):
        if path.name not in left:
            path.unlink()
    Page(write_report(folder).read_text())


def test_report_of_a_run_that_has_just_started(make_run):
    """No row, no episode: the page says so."""
    html = write_report(make_run(rows=0, score=None)).read_text()
    assert "only just started" in html
    assert "No episode has ended yet" in html
    Page(html)


def test_report_of_a_running_run_shows_the_last_evaluation(make_run):
    """Without a final evaluation the last one counts, and the page says that it is not final."""
    folder = make_run(score=None)
    text = verdict(read_run(folder))
    assert text.startswith("So far (4,800 of 4,800 env steps), at its last evaluation, the agent returns 480 ± 20")
    assert "last evaluation (return)" in write_report(folder).read_text()


def test_torn_and_broken_files_do_not_break_the_report(make_run):
    """Half a line, half a file, NaN and wrong types are skipped."""
    folder = make_run(rows=4, info={"parameters": ["?"], "versions": 3})
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"env_steps": null, "eval/return_mean": 3.0}\n[1, 2]\n{"env_steps": 99, "trai')
    (folder / "summary.json").write_text('{"eval/return_mean": ')
    (folder / "config.yaml").write_text("a: [1, 2")
    (folder / "imagination").mkdir()
    (folder / "imagination" / "imagination.json").write_text(
        '{"keys": {"image": {"kind": "image", "error": 3}, "b": 1}}'
    )
    Page(write_report(folder).read_text())


def test_everything_is_escaped(make_run):
    """Names, messages and settings are text, never markup."""
    evil = "<img src=x onerror=alert(1)>"
    folder = make_run(experiment="exp", metrics={f"train/{evil}": 1.0}, info={"error": evil, "device": evil})
    (folder / "plan.txt").write_text(evil)
    (folder / "config.yaml").write_text(f"experiment: {{name: '{evil}'}}\nenvironment: {{id: '\"{evil}'}}\n")
    (folder / "events.jsonl").write_text(json.dumps({"kind": evil, "message": evil, "time": evil}) + "\n")
    (folder / "run.json").write_text(json.dumps({"status": evil, "error": evil, "versions": {evil: evil}}))
    html = write_report(folder).read_text()
    assert "<img src=x" not in html
    assert "&lt;img src=x onerror" in html
    Page(html)


def test_verdict_compares_with_the_start(make_run):
    """The reader learns how much was learned."""
    text = verdict(read_run(make_run()))
    assert "its first training episodes returned 20: it is now 460 better." in text


def test_runs_without_an_environment_use_updates_as_axis(tmp_path):
    """An offline run has no env steps; its curves run over updates."""
    rows = [{"env_steps": 0, "updates": i, "wall_s": 0.1, "phase": "fit", "train/loss": 1.0} for i in range(5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = read_run(tmp_path)
    assert run.axis == "updates"
    assert run.series("train/loss")[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_only_commands_that_work_are_named(tmp_path):
    """A run that learned from data alone, without a model: nothing to imagine with, and no env steps to add."""
    folder = write_run(tmp_path / "bc", rows=0)
    logger = MetricsLogger(folder / "metrics.jsonl")
    for updates in (100, 200):
        logger.log(env_steps=0, updates=updates, wall_s=1.0, phase="clone", values={"train/loss": 1.0})
    logger.close()
    page = write_report(folder).read_text()
    assert "rl-lab eval" in page
    assert "rl-lab imagine" not in page
    assert "training.resume_path" not in page


def test_glossary_sorts_and_explains():
    """Known names get a sentence and a group; unknown ones are shown as they are."""
    names = ["train/loss/dynamics", "train/policy/entropy", "train/grad_norm", "time/collect_s", "strange", "train/xyz"]
    groups = {name: group.title for group, members in grouped(names) for name in members}
    assert groups["train/loss/dynamics"] == "World model"
    assert groups["train/policy/entropy"] == "Behaviour"
    assert groups["train/grad_norm"] == groups["train/xyz"] == "Optimiser and other learning"
    assert groups["time/collect_s"] == "Speed"
    assert groups["strange"] == "Other"
    assert "latent state" in explain("train/loss/dynamics")
    assert explain("train/xyz") == ""


def test_videos_are_ordered_by_when_they_were_made(make_run):
    """Numbers in the names are env steps; the final one comes after evaluations of the same moment, later ones last."""
    folder = make_run(rows=1)
    (folder / "videos").mkdir()
    for name in ("eval-s7.mp4", "final-0000000200.mp4", "eval-0000000200.mp4", "eval-0000000100.gif", "notes.txt"):
        (folder / "videos" / name).write_bytes(b"")
    names = [path.name for path in read_run(folder).videos()]
    assert names == ["eval-0000000100.gif", "eval-0000000200.mp4", "final-0000000200.mp4", "eval-s7.mp4"]


def test_metrics_of_offline_phases_are_drawn_by_updates(make_run):
    """Where no env step lies between rows, env steps would make a vertical line of every loss."""
    folder = make_run("offline", rows=0, score=None)
    logger = MetricsLogger(folder / "metrics.jsonl")
    for update in range(1, 13):
        values = {"train/loss/model": 1.0 / update}
        logger.log(env_steps=500, updates=update, wall_s=1.0, phase="pretrain", values=values)
    logger.close()
    run = read_run(folder)
    assert run.axis_of("train/loss/model") == "updates"
    assert "train/loss/model by updates" in render_report(run)


def test_the_last_step_is_drawn_once(make_run):
    """The row of a run's end may follow another one of the same step."""
    folder = make_run("twice", rows=3, score=None)
    logger = MetricsLogger(folder / "metrics.jsonl")
    logger.log(env_steps=600, updates=155, wall_s=9.0, phase="train", values={"train/grad_norm": 5.0})
    logger.close()
    x, y = read_run(folder).series("train/grad_norm")
    assert x.tolist() == [200.0, 400.0, 600.0]
    assert y[-1] == 5.0


def test_the_verdict_names_the_agent(make_run):
    """The best one is not the last one, and an untrained one is not called trained."""
    folder = make_run("best")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "selected": "best", "selected_step": 2000}))
    assert verdict(read_run(folder)).startswith("The trained agent (best, step 2,000) returns 480")
    (folder / "summary.json").write_text(json.dumps({**summary, "updates": 0}))
    assert verdict(read_run(folder)).startswith("The agent, which is untrained because the run made no update, returns")


def test_each_picture_of_planning_has_its_own_words(make_run):
    """A planner whose model predicts no observations has no picture of paths, and no words about one."""
    folder = make_run("planner")
    (folder / "planning").mkdir()
    (folder / "planning" / "values.png").write_bytes(b"png")
    page = render_report(read_run(folder))
    assert "What plans promised and what came" in page
    assert "where some of the candidates would lead" not in page
