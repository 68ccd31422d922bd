"""The dream of a run that is being trained, played in Chromium."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from browser_helpers import photograph, wait_for
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.browser
PAINTED = """() => { const canvas = document.querySelector(".panes .dreaming canvas");
  if (!canvas) return false;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  return data.some((value, index) => index % 4 < 3 && value > 0 && value < 255); }"""


def open_dream(page: Page, run_id: str) -> None:
    page.goto(f"/#/dream?id={run_id}")
    wait_for(lambda: page.evaluate(PAINTED), 60, "the first frame of the dream")


def moment(page: Page) -> int:
    return int(page.get_by_label("Moment").input_value())


@pytest.fixture
def dream(page: Page, run_id: str) -> Page:
    open_dream(page, run_id)
    page.get_by_role("button", name="New episode").click()
    wait_for(lambda: moment(page) == 0, 10, "a new episode")
    return page


def test_a_newcomer_finds_the_dream_and_plays(page: Page, run_id: str, shots: Path) -> None:
    page.goto("/")
    page.locator(f'tr[data-run="{run_id}"]').get_by_role("link", name="Dream").click()
    wait_for(lambda: page.evaluate(PAINTED), 60, "the first frame of the dream")
    page.get_by_role("button", name="▶ Play").click()
    wait_for(lambda: moment(page) > 4, 20, "steps of the agent")
    page.keyboard.press("Space")
    page.keyboard.press("ArrowRight", delay=400)  # takes over
    expect(page.get_by_role("radio", name="You")).to_have_attribute("aria-checked", "true")
    wait_for(lambda: page.locator("[data-latency]").get_attribute("data-latency"), 5, "a measured key press")
    assert float(page.locator("[data-latency]").get_attribute("data-latency") or "inf") < 500
    photograph(page, shots, "dream")


def test_fork_and_branches(dream: Page) -> None:
    for key in ("ArrowLeft", "ArrowRight"):
        dream.keyboard.press(key, delay=350)
    reached = moment(dream)
    assert reached >= 4
    dream.get_by_label("Moment").fill("2")
    wait_for(lambda: moment(dream) == 2, 5, "going back")
    dream.keyboard.press("ArrowLeft", delay=350)
    expect(dream.get_by_role("img", name="2 branches")).to_be_visible()
    assert "game" in (dream.locator(".branches text").first.text_content() or "")


def test_settings_reach_the_model_and_stay_for_a_second_browser(
    dream: Page, run_id: str, chromium: Browser, address: str
) -> None:
    dream.get_by_label("temperature of the latent").fill("0")
    dream.get_by_role("radio", name="Dream").click()
    dream.keyboard.press("ArrowLeft", delay=300)
    context = chromium.new_context(base_url=address)
    other = context.new_page()
    open_dream(other, run_id)
    expect(other.get_by_role("radio", name="Dream")).to_have_attribute("aria-checked", "true")
    assert other.get_by_label("temperature of the latent").input_value() == "0"
    wait_for(lambda: moment(other) == moment(dream), 5, "both at the same moment")
    other.keyboard.press("ArrowRight", delay=300)
    wait_for(lambda: moment(other) == moment(dream) > 3, 5, "the first browser following the second")
    context.close()
    dream.get_by_label("temperature of the latent").fill("1")
    dream.get_by_role("radio", name="Both").click()


def test_planner_and_its_plan(dream: Page, shots: Path) -> None:
    dream.get_by_role("radio", name="Planner").click()
    dream.get_by_label("show what a planner considers").check()
    expect(dream.get_by_label("Plan", exact=True)).to_contain_text("looks", timeout=60_000)
    dream.get_by_role("button", name="Step", exact=True).click()
    wait_for(lambda: moment(dream) == 1, 20, "a planned step")
    photograph(dream, shots, "dream-plan")
    dream.get_by_label("show what a planner considers").uncheck()
    dream.get_by_role("radio", name="Agent").click()


def test_a_recording_is_an_episode(dream: Page, runs: Path, run_id: str) -> None:
    dream.keyboard.press("ArrowLeft", delay=400)
    dream.keyboard.press("Space")
    dream.get_by_role("button", name="Record the dream").click()
    expect(dream.get_by_label("Recording")).to_contain_text("records, return")
    episode = np.load(next((runs / run_id / "recordings" / "dream").glob("episode-*.npz")))
    assert episode["is_first"][0]
    assert episode["is_last"][-1]
    assert episode["observation.vector"].shape == (len(episode["reward"]), 4)


def test_replayed_episodes_can_be_begun_from(dream: Page) -> None:
    dream.get_by_role("button", name="Episodes of the replay").click()
    chooser = dream.get_by_label("Replayed episode")
    chooser.wait_for()
    chooser.select_option(index=1)
    expect(dream.get_by_role("radio", name="Recorded")).to_have_attribute("aria-checked", "true")
    dream.get_by_role("button", name="▶ Play").click()
    wait_for(lambda: moment(dream) > 3, 10, "recorded actions")


def test_checkpoints_of_a_run_that_is_training_are_followed(dream: Page) -> None:
    dream.get_by_label("follow a run that is training").check()
    head = dream.locator(".dream-head")
    before = head.inner_text()
    wait_for(lambda: head.inner_text() != before, 60, "the next checkpoint")
    dream.get_by_label("follow a run that is training").uncheck()


def test_broken_runs_are_one_clear_line(troubled_page: Page, runs: Path, run_id: str) -> None:
    page = troubled_page
    broken = runs / "broken" / "20260101-000000-s0"
    shutil.copytree(runs / run_id, broken, symlinks=True, ignore=shutil.ignore_patterns("lock.json", ".tmp-*"))
    try:
        for agent in broken.glob("checkpoints/*/agent.pt"):
            agent.write_bytes(agent.read_bytes()[:100])
        page.goto("/#/dream?id=broken/20260101-000000-s0")
        expect(page.get_by_role("alert")).to_contain_text("agent.pt", timeout=60_000)
        hostile = (broken / "config.yaml").read_text().replace("rl_lab.workflows.dreamer_v3.DreamerV3", "os.system")
        (broken / "config.yaml").write_text(hostile)
        (broken / "manifest.json").unlink(missing_ok=True)
        page.reload()
        expect(page.get_by_role("alert")).to_contain_text("os.system", timeout=60_000)
        page.goto("/#/dream?id=nowhere/at-all")
        expect(page.get_by_role("alert")).to_contain_text("deleted or renamed", timeout=60_000)
        page.goto("/")
        expect(page.locator("table.runs")).to_be_visible()
    finally:
        shutil.rmtree(runs / "broken")


def test_a_lost_connection_comes_back(troubled_page: Page, run_id: str) -> None:
    page = troubled_page
    open_dream(page, run_id)
    page.context.set_offline(True)
    page.evaluate("() => performance.now()")
    page.context.set_offline(False)
    page.get_by_role("button", name="New episode").click()
    page.keyboard.press("ArrowLeft", delay=300)
    wait_for(lambda: moment(page) > 0, 15, "steps after the connection came back")
