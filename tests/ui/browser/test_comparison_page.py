"""The page that `rl-lab compare` writes, opened from the disk, and the comparison in the browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser_helpers import start, stop, wait_for
from playwright.sync_api import Browser

from rl_lab.metrics.comparison import compare_runs

pytestmark = pytest.mark.browser
EXPERIMENTS = [
    "my_experiment_with_a_rather_long_name",
    "another_experiment_with_a_long_name",
    "a_third_one_from_pixels",
]


@pytest.mark.parametrize("width", [1280, 800])
def test_the_table_of_settings_shows_its_header_whole(chromium: Browser, make_run, tmp_path: Path, width: int) -> None:
    """Long names of groups break their lines: no column has to be scrolled to."""
    folders = [make_run(name) for name in EXPERIMENTS]
    for folder, size in zip(folders, ("tiny", "12m", "200m"), strict=True):
        config = folder / "config.yaml"
        config.write_text(config.read_text().replace("size: tiny", f"size: {size}"))
    compare_runs(folders, tmp_path)
    page = chromium.new_page(viewport={"width": width, "height": 800})
    page.goto((tmp_path / "comparison.html").as_uri())
    table = page.locator("details .scroll")
    assert table.evaluate("box => box.scrollWidth - box.clientWidth") <= 0
    names = table.locator("th")
    assert names.all_inner_texts() == ["setting", *EXPERIMENTS]
    assert all(names.nth(number).evaluate("cell => cell.scrollWidth <= cell.clientWidth") for number in range(4))
    page.close()


# How strong the blue pixels are, those of the first group, from 0 to 255.
STRENGTHS = """() => { const canvas = document.querySelector("canvas");
  if (!canvas) return [];
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, found = {};
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 2] - data[at] > 100) { found[data[at + 3]] = (found[data[at + 3]] ?? 0) + 1; }
  }
  return Object.entries(found).filter(([, count]) => count > 150).map(([strength]) => Number(strength)); }"""


def test_the_line_of_one_run_can_be_seen_beside_its_groups(chromium: Browser, make_run, tmp_path: Path) -> None:
    """Thin, and at least half as strong as the thick one."""
    runs = [f"demo/{make_run(seed=seed, rows=9).name}" for seed in (0, 20)]
    log = tmp_path / "server.log"
    server = start(["ui", str(tmp_path / "runs"), "--no-browser", "--port", "0"], log)
    try:
        address = wait_for(lambda: re.search(r"http://\S+", log.read_text()), 60, "the server's address")[0].rstrip("/")
        page = chromium.new_page(viewport={"width": 1280, "height": 860})
        page.goto(f"{address}/#/compare?" + "&".join(f"run={run}" for run in runs))
        strengths = wait_for(lambda: page.evaluate(STRENGTHS), 20, "a drawn curve")
        page.close()
    finally:
        stop(server)
    assert 255 in strengths  # the group's
    assert max(strength for strength in strengths if strength < 250) > 0.5 * 255
