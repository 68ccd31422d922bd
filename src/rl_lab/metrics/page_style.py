"""The style sheet of the report and the comparison, which the pages of `rl-lab ui` share."""

from __future__ import annotations

from pathlib import Path

CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
