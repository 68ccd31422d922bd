"""Pieces of a self-contained web page: nothing in it is loaded from anywhere else."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rl_lab.metrics.charts import short_number
from rl_lab.metrics.page_style import CSS

LARGEST_INLINE = 8_000_000  # bytes; a larger film is linked, not embedded
_TYPES = {".mp4": "video/mp4", ".gif": "image/gif", ".png": "image/png"}


def page(title: str, body: Iterable[str]) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def section(title: str, *content: str, text: str = "") -> str:
    """A part with its own heading; nothing where it has no content. `text` is plain, `content` is HTML."""
    inner = "\n".join(part for part in content if part)
    if not inner:
        return ""
    return f"<section><h2>{escape(title)}</h2>{paragraph(text)}{inner}</section>"


def folded(title: str, *content: str, text: str = "", is_open: bool = False) -> str:
    """A part that can be opened."""
    inner = "\n".join(part for part in content if part)
    if not inner:
        return ""
    state = " open" if is_open else ""
    return f'<details class="card"{state}><summary>{escape(title)}</summary>{paragraph(text)}{inner}</details>'


def paragraph(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>' if text else ""


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[bool] | None = None) -> str:
    """A table with escaped cells. Columns of numbers stand right, or those that `right` names."""
    if not rows:
        return ""
    right = right or [isinstance(value, int | float) or value == "–" for value in rows[0]]
    cells = [_cells("th", head, right)] + [_cells("td", row, right) for row in rows]
    return f'<div class="scroll"><table>{"".join(cells)}</table></div>'


def facts(entries: Sequence[tuple[str, str]], *, main: int = 1) -> str:
    """Large numbers with what they are; the first `main` stand out."""
    boxes = [
        f"<div{' class=main' if position < main else ''}><b>{escape(value)}</b>"
        f'<span class="quiet small">{escape(label)}</span></div>'
        for position, (label, value) in enumerate(entries)
    ]
    return f'<div class="facts">{"".join(boxes)}</div>' if boxes else ""


def media(path: Path, caption: str, *, wide: bool = False) -> str:
    """A film or a picture inside the page; a film that is too large is linked. Nothing where there is no file."""
    kind = _TYPES.get(path.suffix)
    if kind is None or not path.is_file() or path.stat().st_size == 0:
        return ""
    label = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    if path.stat().st_size > LARGEST_INLINE:
        where = escape(f"{path.parent.name}/{path.name}", quote=True)
        return f'<figure><a href="{where}">{escape(path.name)}</a>{label}</figure>'
    source = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    if path.suffix == ".mp4":
        return f'<figure><video controls loop muted playsinline preload="auto" src="{source}"></video>{label}</figure>'
    shape = ' class="wide"' if wide else ""
    image = f'<img{shape} alt="{escape(caption, quote=True)}" src="{source}">'
    return f'<div class="wide-scroll">{image}</div>' if wide else f"<figure>{image}{label}</figure>"


def both_widths(broad: str, narrow: str) -> str:
    """The same chart for a wide and for a narrow screen, where its text would be too small."""
    return f'<div class="broad">{broad}</div><div class="narrow">{narrow}</div>'


def preformatted(text: str) -> str:
    return f"<pre>{escape(text.rstrip())}</pre>" if text.strip() else ""


def figure_number(value: float | None, digits: int = 4) -> str:
    """A number for reading: 487.3, 12,345, 2.5e-4."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 0.01 or value == 0 else short_number(value)


def _cells(tag: str, values: Sequence[Any], right: Sequence[bool]) -> str:
    cells = []
    for value, is_right in zip(values, right, strict=True):
        text = f"{value:,}" if isinstance(value, int) else figure_number(value) if isinstance(value, float) else value
        cells.append(f"<{tag}{' class=n' if is_right else ''}>{escape(str(text))}</{tag}>")
    return f"<tr>{''.join(cells)}</tr>"
