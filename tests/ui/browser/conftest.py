"""Headless Chromium, a real run that trains while the pages are looked at, and a server over its folder."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_helpers import EXPERIMENT, Watched, start, stop, wait_for
from playwright.sync_api import Browser, Page, expect, sync_playwright

expect.set_options(timeout=20_000)  # a training runs beside the pages, and the machine may have two cores


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which a DreamerV3 on CartPole is training: it has logged and written a checkpoint, and goes on."""
    root = tmp_path_factory.mktemp("runs")
    settings = ["training.total_timesteps=400000", "checkpoint.every=400", "data_sources.replay.start_after=200",
                "evaluation.episodes=2", "evaluation.imagination=false", "checkpoint.keep=4",
                f"run_root={root}"]  # fmt: skip
    process = start(["train", f"+experiment={EXPERIMENT}", *settings], root.parent / "train.log")

    def is_learning() -> bool:
        assert process.poll() is None, (root.parent / "train.log").read_text()[-2000:]
        return bool(list(root.glob("*/*/checkpoints/step-*/manifest.json")))

    wait_for(is_learning, 240, "the first checkpoint")
    yield root
    stop(process)


@pytest.fixture(scope="session")
def pixel_run(runs: Path) -> str:
    """An untrained DreamerV3 on Pendulum from pixels: images, and an action that is a number."""
    settings = ["environment.id=Pendulum-v1", "environment.observation=pixels", "environment.num_envs=2", "size=tiny",
                "training.total_timesteps=20", "data_sources.replay.start_after=1000", "evaluation.episodes=1",
                "evaluation.num_envs=1", "evaluation.final_episodes=1", "evaluation.video=false",
                "evaluation.imagination=false", "logging.console=off", f"run_root={runs}"]  # fmt: skip
    log = runs.parent / "pixels.log"
    assert start(["train", "+experiment=dreamer_v3", *settings], log).wait(240) == 0, log.read_text()[-2000:]
    return str(next(runs.glob("dreamer_v3/*/run.json")).parent.relative_to(runs))


@pytest.fixture(scope="session")
def run_id(runs: Path) -> str:
    return str(next(runs.glob(f"{EXPERIMENT}/*")).relative_to(runs))


@pytest.fixture(scope="session")
def address(runs: Path) -> Iterator[str]:
    """The address of a server over that folder."""
    log = runs.parent / "server.log"
    process = start(["ui", str(runs), "--no-browser", "--port", "0"], log)
    found = wait_for(lambda: re.search(r"http://\S+", log.read_text()), 20, "the server's address")
    yield found[0].rstrip("/")
    assert process.poll() is None, log.read_text()
    stop(process)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.fail("There is no Chromium: run scripts/setup_browser.sh")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser, address: str) -> Iterator[Page]:
    """A laptop's page at the server; the test fails on errors in its console."""
    context = chromium.new_context(viewport={"width": 1280, "height": 860}, base_url=address)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    watched = Watched(context.new_page())
    yield watched.page
    context.close()
    assert watched.complaints == []


@pytest.fixture
def troubled_page(chromium: Browser, address: str) -> Iterator[Page]:
    """A page on which requests fail on purpose: the browser notes those, and may note nothing else."""
    context = chromium.new_context(viewport={"width": 1280, "height": 860}, base_url=address)
    watched = Watched(context.new_page())
    yield watched.page
    context.close()
    expected = ("Failed to load resource", "WebSocket connection to")
    assert [text for text in watched.complaints if not text.startswith(expected)] == []


@pytest.fixture
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: RL_LAB_SHOTS, or a temporary folder."""
    chosen = os.environ.get("RL_LAB_SHOTS")
    folder = Path(chosen) if chosen else tmp_path_factory.mktemp("shots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
