"""The page of an exported dream, opened from disk without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser_helpers import Watched, wait_for
from playwright.sync_api import Browser

from rl_lab.export.dream_page import export_dream

pytestmark = pytest.mark.browser


def test_the_exported_dream_plays_from_disk_and_equals_pytorch(
    chromium: Browser, runs: Path, run_id: str, tmp_path: Path, shots: Path
) -> None:
    path = export_dream(runs / run_id, tmp_path / "dream.html", trust=True)
    context = chromium.new_context(offline=True, viewport={"width": 1000, "height": 900})
    watched = Watched(context.new_page())
    page = watched.page
    page.goto(path.as_uri())
    check = page.locator("#check")
    assert float(check.get_attribute("data-difference") or "inf") < 1e-3
    page.keyboard.down("ArrowLeft")
    wait_for(lambda: int(page.locator(".facts .main span").inner_text().split()[-2]) > 5, 20, "dreamed steps")
    page.keyboard.up("ArrowLeft")
    page.screenshot(path=str(shots / "exported.png"))
    assert watched.complaints == []
    context.close()
