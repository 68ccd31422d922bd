"""The dream of a run that is being trained, played in Chromium."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from browser_helpers import WIDTHS, photograph, start, stop, wait_for
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
    page.set_viewport_size({"width": WIDTHS["phone"][0], "height": WIDTHS["phone"][1]})
    page.goto("/")
    door = page.locator(f'tr[data-run="{run_id}"]').get_by_role("link", name="Dream")
    expect(door).to_be_in_viewport(ratio=1)  # on a phone, too
    door.click()
    wait_for(lambda: page.evaluate(PAINTED), 60, "the first frame of the dream")
    page.get_by_role("button", name="▶ Play").click()
    wait_for(lambda: moment(page) > 4, 20, "steps of the agent")
    page.keyboard.press("Space")
    page.keyboard.press("ArrowRight", delay=400)  # takes over
    expect(page.get_by_role("button", name="You", exact=True)).to_have_attribute("aria-pressed", "true")
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
    dream.get_by_role("button", name="Dream", exact=True).click()
    dream.keyboard.press("ArrowLeft", delay=300)
    context = chromium.new_context(base_url=address)
    other = context.new_page()
    open_dream(other, run_id)
    expect(other.get_by_role("button", name="Dream", exact=True)).to_have_attribute("aria-pressed", "true")
    assert other.get_by_label("temperature of the latent").input_value() == "0"
    wait_for(lambda: moment(other) == moment(dream), 5, "both at the same moment")
    other.keyboard.press("ArrowRight", delay=300)
    wait_for(lambda: moment(other) == moment(dream) > 3, 5, "the first browser following the second")
    context.close()
    dream.get_by_label("temperature of the latent").fill("1")
    dream.get_by_role("button", name="Both", exact=True).click()


def test_planner_and_its_plan(dream: Page, shots: Path) -> None:
    dream.get_by_role("button", name="Planner", exact=True).click()
    dream.get_by_label("show what a planner considers").check()
    expect(dream.get_by_label("Plan", exact=True)).to_contain_text("looked", timeout=60_000)
    dream.get_by_role("button", name="Step", exact=True).click()
    wait_for(lambda: moment(dream) == 1, 20, "a planned step")
    photograph(dream, shots, "dream-plan")
    expect(dream.locator(".overlay polyline.chosen")).to_have_count(1)
    dream.locator(".settings select").last.select_option("mcts")
    expect(dream.get_by_label("Plan", exact=True)).to_contain_text("visits")
    assert dream.locator(".overlay line").count() > 10
    photograph(dream, shots, "dream-tree")
    dream.get_by_label("show what a planner considers").uncheck()
    expect(dream.locator(".overlay")).to_have_count(0)
    dream.get_by_role("button", name="Agent", exact=True).click()


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
    expect(dream.get_by_role("button", name="Recorded", exact=True)).to_have_attribute("aria-pressed", "true")
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


def test_a_lost_server_is_one_line_and_its_return_is_noticed(
    troubled_page: Page, runs: Path, run_id: str, tmp_path: Path
) -> None:
    page = troubled_page
    log = tmp_path / "server.log"
    first = start(["ui", str(runs), "--no-browser", "--port", "0"], log)
    address = wait_for(lambda: re.search(r"http://\S+:(\d+)/", log.read_text()), 20, "the server's address")
    try:
        page.goto(f"{address[0]}#/dream?id={run_id}")
        wait_for(lambda: page.evaluate(PAINTED), 60, "the first frame of the dream")
        stop(first)
        expect(page.get_by_role("alert").first).to_contain_text("connection to the server is lost")
        second = start(["ui", str(runs), "--no-browser", "--port", address[1]], log)
        try:
            expect(page.get_by_role("alert")).to_have_count(0, timeout=60_000)
            page.keyboard.press("ArrowLeft", delay=300)
            wait_for(lambda: moment(page) > 0, 15, "steps after the connection came back")
        finally:
            stop(second)
    finally:
        stop(first)


def test_a_run_that_is_deleted_while_it_is_shown(troubled_page: Page, runs: Path, run_id: str) -> None:
    """One line says so, and the dream can be played on."""
    page = troubled_page
    copy = runs / "copied" / "20260101-000000-s0"
    shutil.copytree(runs / run_id, copy, symlinks=True, ignore=shutil.ignore_patterns("lock.json", ".tmp-*"))
    open_dream(page, "copied/20260101-000000-s0")
    shutil.rmtree(runs / "copied")
    expect(page.get_by_role("alert").first).to_contain_text("deleted or renamed")
    page.keyboard.press("ArrowLeft", delay=300)
    wait_for(lambda: moment(page) > 0, 10, "steps after the run was deleted")
    assert not copy.exists()


# Images and continuous actions ----------------------------------------------------------------------------------------


@pytest.fixture
def pictures(page: Page, pixel_run: str) -> Page:
    open_dream(page, pixel_run)
    page.get_by_role("button", name="New episode").click()
    wait_for(lambda: moment(page) == 0, 10, "a new episode")
    return page


def test_mouse_and_sliders_steer_continuous_actions(pictures: Page, shots: Path) -> None:
    page = pictures
    page.get_by_label("torque", exact=False).first.wait_for()
    box = page.locator(".panes canvas").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    wait_for(lambda: moment(page) > 3, 20, "steps while the mouse is held")
    page.mouse.up()
    expect(page.get_by_role("button", name="You", exact=True)).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Space")
    reached = moment(page)
    page.locator(".legend-bar input[type=range]").fill("-0.5")
    wait_for(lambda: moment(page) > reached + 2, 20, "steps of the slider's action")
    page.locator(".legend-bar input[type=range]").fill("0")
    page.keyboard.press("Space")
    photograph(page, shots, "dream-pixels")


def test_a_gamepad_steers(chromium: Browser, address: str, pixel_run: str) -> None:
    context = chromium.new_context(base_url=address)
    page = context.new_page()
    page.add_init_script("""navigator.getGamepads = () => [
        { connected: true, axes: [window.stick ?? 0, 0, 0, 0], buttons: Array(16).fill({ pressed: false }) }];""")
    open_dream(page, pixel_run)
    page.get_by_role("button", name="New episode").click()
    wait_for(lambda: moment(page) == 0, 10, "a new episode")
    page.evaluate("window.stick = 0.8")
    wait_for(lambda: moment(page) > 3, 20, "steps of the stick")
    page.evaluate("window.stick = 0")
    expect(page.get_by_role("button", name="You", exact=True)).to_have_attribute("aria-pressed", "true")
    context.close()
