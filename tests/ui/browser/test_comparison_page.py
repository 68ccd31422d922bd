"""The page that `rl-lab compare` writes, opened from the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
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
