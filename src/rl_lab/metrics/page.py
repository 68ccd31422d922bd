"""Pieces of a self-contained web page: nothing in it is loaded from anywhere else."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rl_lab.metrics.charts import short_number

LARGEST_INLINE = 8_000_000  # bytes; a larger film is linked, not embedded
_TYPES = {".mp4": "video/mp4", ".gif": "image/gif", ".png": "image/png"}

_CSS = """
:root{color-scheme:light dark;--ground:#fbfbfa;--card:#fff;--ink:#1f2328;--quiet:#667080;--line:#e2e4e8;--accent:#2f86c8;
--good:#1a7f5a;--warn:#a65a00;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ground:#14171a;--card:#1c2024;--ink:#e4e7ea;--quiet:#98a2ae;--line:#31373d;
--accent:#5aa9e0;--good:#4cc296;--warn:#e0a050;--bad:#f0867e}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 4px}h2{font-size:1.2rem;margin:0 0 4px}h3{font-size:1rem;margin:14px 0 2px}
p{margin:4px 0 10px}.quiet{color:var(--quiet)}.small{font-size:.86rem}
section,details.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin:16px 0}
summary{cursor:pointer;font-weight:600}summary .quiet{font-weight:400}
details[open]>summary{margin-bottom:10px}
.badge{display:inline-block;padding:1px 10px;border-radius:99px;border:1px solid currentColor;font-size:.82rem;font-weight:600;
vertical-align:3px;margin-left:8px}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:14px}
.facts div{border-left:3px solid var(--line);padding-left:10px}.facts b{display:block;font-size:1.25rem;line-height:1.25}
.facts .main{border-color:var(--accent);grid-column:span 2}.facts .main b{font-size:1.7rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(290px,1fr));gap:18px}
.grid figure{margin:0;min-width:0}.grid p{margin:2px 0 0;color:var(--quiet);font-size:.84rem;line-height:1.4}
.name{font:600 .82rem/1.3 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.name span{float:right;font-weight:400;color:var(--quiet);margin-left:8px}
.chart{display:block;width:100%;height:auto;font-family:inherit}.chart *{stroke-linejoin:round}
.scroll{overflow:auto;max-height:420px}table{border-collapse:collapse;font-size:.9rem;width:100%}
th,td{padding:5px 12px 5px 0;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--quiet);font-weight:600;white-space:nowrap}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
pre{font:.82rem/1.45 ui-monospace,Menlo,Consolas,monospace;overflow:auto;background:var(--ground);border:1px solid var(--line);
border-radius:8px;padding:12px;margin:6px 0}code{font:.88em ui-monospace,Menlo,Consolas,monospace}
figure{margin:0}.media{display:flex;flex-wrap:wrap;gap:16px;margin:8px 0;align-items:center}
.media>*{flex:1 1 300px;min-width:0}.media figure{max-width:500px}.media .chart{max-width:640px}
figcaption{color:var(--quiet);font-size:.84rem}
video,.media img{max-width:100%;max-height:440px;border-radius:8px;background:#fff;display:block}
img.wide{width:100%;height:auto;border-radius:8px;background:#fff;padding:4px}
.key{display:inline-block;width:22px;height:0;border-top:3px solid;vertical-align:4px;margin:0 6px 0 2px}
@media(max-width:600px){main{padding:16px 10px 40px}section,details.card{padding:14px 12px}h1{font-size:1.4rem}
.wide-scroll{overflow-x:auto}.wide-scroll img.wide{width:auto;max-width:none;height:auto;max-height:560px}}
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>\n<body><main>\n"
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


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; numbers stand right, cells are escaped."""
    if not rows:
        return ""
    right = [isinstance(value, int | float) or value == "–" for value in rows[0]]
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
