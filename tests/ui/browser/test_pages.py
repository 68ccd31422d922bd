"""Every view of a run that is being trained, driven in Chromium."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from browser_accessibility import FAINT, NAMELESS
from browser_helpers import photograph, wait_for
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def test_runs_are_listed_searched_and_opened_by_keyboard(page: Page, run_id: str, shots: Path) -> None:
    page.goto("/")
    row = page.locator(f'tr[data-run="{run_id}"]')
    expect(row).to_be_visible()
    expect(row.locator(".badge")).to_have_text("running")
    page.keyboard.press("/")
    page.keyboard.type("nothing like it")
    expect(row).to_have_count(0)
    page.keyboard.press("Control+a")
    page.keyboard.type("cartpole")
    expect(row).to_be_visible()
    photograph(page, shots, "runs")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("dreamer_v3_cartpole")
    assert run_id in page.evaluate("decodeURIComponent(location.hash)")


def test_curves_grow_while_the_run_trains(page: Page, run_id: str, shots: Path) -> None:
    page.goto(f"/#/run?id={run_id}")
    expect(page.locator(".plot canvas").first).to_be_visible()
    steps = page.locator(".facts div:nth-child(2) b")
    before = steps.inner_text()
    expect(steps).not_to_have_text(before, timeout=30_000)
    page.get_by_label("over").select_option("minutes")
    assert "x=minutes" in page.url
    page.locator("summary", has_text="World model").wait_for()
    photograph(page, shots, "run")
    described = page.locator(".plot").first.get_attribute("aria-label")
    assert described is not None
    assert "the last is" in described


@pytest.mark.parametrize(
    ("tab", "text"),
    [("Episodes", "Evaluations"), ("Imagination", "What the model imagines"),
     ("Configuration", "training.total_timesteps"), ("Plan & events", "The plan"), ("System", "This machine now")],
)  # fmt: skip
def test_tabs(page: Page, run_id: str, shots: Path, tab: str, text: str) -> None:
    page.goto(f"/#/run?id={run_id}")
    page.get_by_role("tab", name=tab).click()
    expect(page.get_by_role("tabpanel")).to_contain_text(text, timeout=60_000)
    photograph(page, shots, f"run-{tab.split()[0].lower()}")


def test_comparison_is_held_by_its_link(page: Page, runs: Path, run_id: str, shots: Path) -> None:
    other, metrics = runs / "other_experiment" / "20260101-000000-s1", runs / run_id / "metrics.jsonl"
    wait_for(lambda: metrics.read_text().count("collect/episode_return") > 2, 60, "episodes to compare")
    shutil.copytree(runs / run_id, other, ignore=shutil.ignore_patterns("checkpoints", "lock.json", "tensorboard"))
    config = (other / "config.yaml").read_text().replace("name: dreamer_v3_cartpole", "name: other_experiment")
    (other / "config.yaml").write_text(config.replace("seed: 0", "seed: 1"))
    try:
        page.goto("/")
        for run in (run_id, "other_experiment/20260101-000000-s1"):
            page.get_by_label(f"Select {run}").check()
        page.keyboard.press("c")
        expect(page.get_by_role("heading", level=1)).to_have_text("Comparison of 2 runs")
        page.get_by_label("metric").select_option("collect/episode_return")
        page.get_by_label("over").select_option("updates")
        expect(page.locator(".plot canvas").first).to_be_visible()
        photograph(page, shots, "compare")
        link = page.url
        page.goto("/")
        page.goto(link)
        expect(page.get_by_label("over")).to_have_value("updates")
        expect(page.locator("table").first).to_contain_text("other_experiment")
        page.goto("about:blank")  # the comparison asks for its runs again and again
    finally:
        shutil.rmtree(other)


def test_markup_in_names_and_metrics_is_text(page: Page, runs: Path) -> None:
    name = "<img src=x onerror=document.title='owned'>"
    folder = runs / name / "20260101-000000-s0"
    folder.mkdir(parents=True)
    try:
        (folder / "run.json").write_text(json.dumps({"status": name, "error": name}))
        (folder / "plan.txt").write_text(name)
        row = {"env_steps": 5, "updates": 1, "wall_s": 1.0, "phase": name, f"train/{name}": 1.0}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
        page.goto("/")
        expect(page.locator("table.runs")).to_contain_text(name)
        page.locator("tr", has_text="onerror").get_by_role("link", name="20260101-000000-s0").click()
        expect(page.locator("main")).to_contain_text(f"train/{name}")
        page.get_by_role("tab", name="Plan & events").click()
        expect(page.locator("pre")).to_contain_text(name)
        assert page.title() == "RL Lab"
        page.goto("about:blank")  # the page asks for its run again and again
    finally:
        shutil.rmtree(runs / name)


def test_a_deleted_run_and_a_half_written_line(troubled_page: Page, runs: Path) -> None:
    page = troubled_page
    folder = runs / "short" / "20260101-000000-s0"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"status": "completed"}')
    (folder / "metrics.jsonl").write_text('{"env_steps": 5, "a/b": 1.0, "phase": "p"}\n{"env_steps": 6, "a/b"')
    page.goto("/#/run?id=short/20260101-000000-s0")
    expect(page.locator("main")).to_contain_text("a/b")
    shutil.rmtree(runs / "short")
    expect(page.get_by_role("alert").first).to_contain_text("deleted or renamed", timeout=10_000)


VIEWS = ["#/", "#/run?id={run}", "#/run?id={run}&tab=system", "#/compare?run={run}", "#/dream?id={run}"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast_and_controls_have_names(page: Page, run_id: str, theme: str) -> None:
    """4.5 to 1, or 3 to 1 for large letters (WCAG AA), and a name for a screen reader on whatever can be used."""
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    for view in VIEWS:
        page.goto("/")
        page.goto(f"/{view.format(run=run_id)}")
        expect(page.locator("table.runs, .plot canvas, .gauges, .panes").first).to_be_visible(timeout=60_000)
        assert page.evaluate(FAINT) == [], view
        assert page.evaluate(NAMELESS) == [], view


def test_charts_follow_the_system_into_the_dark(page: Page, run_id: str) -> None:
    page.goto(f"/#/run?id={run_id}")
    expect(page.locator(".plot canvas").first).to_be_visible()
    page.evaluate("document.querySelector('.uplot').dataset.made = 'in the light'")
    page.emulate_media(color_scheme="dark")
    expect(page.locator(".uplot[data-made]")).to_have_count(0)


def test_tabs_turn_by_arrow_keys(page: Page, run_id: str) -> None:
    page.goto(f"/#/run?id={run_id}")
    page.get_by_role("tab", name="Curves").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Episodes")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="Episodes")).to_contain_text("Evaluations")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("tab", name="System")).to_be_focused()


def test_a_run_without_a_world_model_offers_no_dream(page: Page, runs: Path) -> None:
    folder = runs / "modelfree" / "20260101-000000-s0"
    folder.mkdir(parents=True)
    try:
        (folder / "run.json").write_text('{"status": "completed", "has_world_model": false}')
        page.goto("/")
        row = page.locator('tr[data-run="modelfree/20260101-000000-s0"]')
        expect(row).to_be_visible()
        expect(row.get_by_role("link", name="Dream")).to_have_count(0)
        page.goto("/#/run?id=modelfree/20260101-000000-s0")
        expect(page.get_by_role("heading", level=1)).to_contain_text("modelfree")
        expect(page.get_by_role("link", name="Dream")).to_have_count(0)
    finally:
        shutil.rmtree(runs / "modelfree")


def test_stop_saves_the_run(page: Page, runs: Path, run_id: str) -> None:
    """Last: it ends the training that the other tests look at."""
    page.goto(f"/#/run?id={run_id}")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Stop (it saves)").click()

    def status() -> str:
        return json.loads((runs / run_id / "run.json").read_text())["status"]

    wait_for(lambda: status() == "interrupted", 60, "the run to stop")
    assert (runs / run_id / "checkpoints" / "latest").exists()
    expect(page.locator(".badge").first).to_have_text("interrupted", timeout=10_000)
