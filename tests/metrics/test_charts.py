from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np

from rl_lab.metrics.charts import COLOURS, Panel, Series, png_chart, short_number, smooth, svg_chart, svg_file, thin
from rl_lab.metrics.page_style import CSS


def test_inline_svg_is_self_contained_and_takes_the_page_colour():
    """No address, no style that leaks into the page; text is drawn in the colour of the page."""
    svg = svg_chart([Panel([Series([0, 1, 2], [1, 2, 3], "a <b> & $x$")], title="T$_1$ <script>")])
    root = ElementTree.fromstring(svg.replace("xlink:href", "href"))
    assert "://" not in svg
    assert "<style" not in svg
    assert "currentColor" in svg
    text = "".join(root.itertext())
    assert "a <b> & $x$" in text
    assert "T$_1$ <script>" in text


def test_charts_are_the_same_every_time():
    """The same numbers give the same bytes, so reports can be compared."""
    panels = [Panel([Series(range(50), np.arange(50) ** 0.5, low=np.zeros(50), high=np.ones(50))])]
    assert svg_chart(panels) == svg_chart(panels)


def test_files_are_written(tmp_path):
    """PNG and stand-alone SVG files of a grid with an empty place."""
    panels = [Panel([Series([0, 1], [0, value])]) for value in range(3)]
    assert png_chart(tmp_path / "a" / "x.png", panels, columns=2).read_bytes().startswith(b"\x89PNG")
    ElementTree.parse(svg_file(tmp_path / "x.svg", panels, columns=2, legend_below=True))


def test_nothing_but_gaps_is_drawn_as_an_empty_panel():
    """A metric that never was finite does not break the page."""
    assert "<svg" in svg_chart([Panel([Series([0, 1], [np.nan, np.nan], kind="both"), Series([], [])])])


def test_smooth_ignores_gaps_and_keeps_constants():
    """A moving mean of a constant is that constant, at the ends and around gaps too."""
    np.testing.assert_allclose(smooth([2.0, np.nan, 2.0, 2.0], 3), 2.0)
    np.testing.assert_allclose(smooth([1.0, 2.0, 3.0], 1), [1.0, 2.0, 3.0])


def test_thin_keeps_mean_and_extremes():
    """Many points become few; no peak is lost."""
    y = np.sin(np.arange(10_001))
    y[777] = 9.0
    x, mean, low, high = thin(np.arange(10_001), y, 100)
    assert len(x) == len(mean) == 100
    assert high.max() == 9.0
    assert low.min() == y.min()


def test_short_numbers():
    """Axis labels are short."""
    assert [short_number(value) for value in (0, 12, 12_000, 2.5e6, 0.5, 0.00025, -1500)] == [
        "0", "12", "12k", "2.5M", "0.5", "2.5e-4", "-1.5k",
    ]  # fmt: skip


def test_drawing_touches_nothing_global():
    """Matplotlib is imported when something is drawn, without pyplot."""
    code = (
        "import sys, rl_lab.metrics.charts as charts; assert 'matplotlib' not in sys.modules;"
        "charts.svg_chart([charts.Panel([charts.Series([0, 1], [0, 1])])]);"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pages_and_charts_share_their_colours() -> None:
    """The pages of `rl-lab ui` draw with the style sheet's palette, reports with this one."""
    palette = re.findall(r"--c\d:(#[0-9a-f]{6})", CSS)
    assert tuple(palette) == COLOURS
