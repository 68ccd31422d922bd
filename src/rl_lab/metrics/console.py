"""What a person sees while a run goes on: one live line, or plain lines for a log file."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TextIO

from rl_lab.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rich.text import Text

ConsoleMode = Literal["auto", "live", "plain", "off"]
MODES = ("auto", "live", "plain", "off")
SHOW_WAIT_AFTER_S = 3.0  # a run that says nothing for longer than this shows for how long
BAR_WIDTH = 16


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run. A value that is not known yet is None."""

    phase: str = ""
    activity: str = "starting"  # what it is doing or waiting for
    env_steps: int = 0
    total: int | None = None  # env steps that the run will take
    updates: int = 0
    env_steps_per_s: float | None = None
    updates_per_s: float | None = None
    last_return: float | None = None
    eta_s: float | None = None
    progress: float | None = None  # 0 to 1; None: env_steps / total

    @property
    def fraction(self) -> float | None:
        done = self.progress
        if done is None and self.total:
            done = self.env_steps / self.total
        return None if done is None else min(1.0, max(0.0, done))


class RunConsole:
    """`live`: a line that renews itself. `plain`: a line every `plain_every_s`. `off`: nothing but messages.

    `auto` is live on a terminal and plain elsewhere. `status` is cheap enough to call in every cycle.
    """

    def __init__(
        self, mode: ConsoleMode = "auto", *, stream: TextIO | None = None, plain_every_s: float = 10.0
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"logging.console is '{mode}'.{nearest(mode, MODES)} Use one of {', '.join(MODES)}.")
        self._stream = stream or sys.stdout
        self.mode: str = ("live" if self._stream.isatty() else "plain") if mode == "auto" else mode
        self._plain_every_s = plain_every_s
        self._status = RunStatus()
        self._heard = self._started = time.monotonic()
        self._next_plain = self._started  # the first status is shown at once
        self._live: Any = None

    def message(self, text: str) -> None:
        """A line that stays (above the live line)."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def status(self, status: RunStatus) -> None:
        """The run stands here now."""
        now = time.monotonic()
        self._status, self._heard = status, now
        if self.mode == "live":
            if self._live is None:
                self._start_live()
        elif self.mode == "plain" and now >= self._next_plain:
            self._next_plain = now + self._plain_every_s
            self._stream.write(plain_line(status, now - self._started) + "\n")
            self._stream.flush()

    def activity(self, text: str) -> None:
        """The run does or waits for something else now; the numbers stay."""
        if text != self._status.activity:
            self.status(replace(self._status, activity=text))

    def close(self) -> None:
        """End the live line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __rich__(self) -> Text:
        """Called by the live display, four times a second."""
        from rich.text import Text

        waited = time.monotonic() - self._heard
        width = self._live.console.width if self._live is not None else 120
        text = Text(no_wrap=True, overflow="ellipsis")
        for part, style in live_parts(self._status, waited, width):
            text.append(part, style)
        return text

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream, force_terminal=True)
        self._live = Live(self, console=console, refresh_per_second=4, transient=False)
        self._live.start()


def live_parts(status: RunStatus, waited_s: float, width: int) -> list[tuple[str, str]]:
    """The pieces of the live line with their styles; the less important ones are left out on a narrow terminal."""
    activity = status.activity
    if waited_s >= SHOW_WAIT_AFTER_S:
        activity += f" ({duration(waited_s)})"
    fraction = status.fraction
    # (importance, text, style) in the order of the line; the highest number is dropped first
    pieces: list[tuple[int, str, str]] = [(0, f"{status.phase or 'run'} ", "bold"), (1, f"{activity} ", "cyan")]
    if fraction is not None:
        filled = round(fraction * BAR_WIDTH)
        pieces.append((8, "━" * filled + "─" * (BAR_WIDTH - filled) + " ", "green"))
        pieces.append((2, f"{100 * fraction:.0f} % ", "green"))
    pieces.append((3, f"│ {steps_text(status)} ", ""))
    if status.env_steps_per_s is not None:
        pieces.append((6, f"({rate(status.env_steps_per_s)}/s) ", ""))
    if status.updates_per_s is not None:
        pieces.append((7, f"│ {rate(status.updates_per_s)} updates/s ", ""))
    if status.last_return is not None:
        pieces.append((4, f"│ return {status.last_return:.4g} ", "bold"))
    if status.eta_s is not None:
        pieces.append((5, f"│ {duration(status.eta_s)} left ", ""))
    while len(pieces) > 2 and sum(len(text) for _, text, _ in pieces) > width:
        pieces.remove(max(pieces))
    return [(text, style) for _, text, style in pieces]


def plain_line(status: RunStatus, elapsed_s: float) -> str:
    """One line of a log."""
    fraction = status.fraction
    parts = [f"[{duration(elapsed_s)}]", f"{status.phase or 'run'}: {status.activity}"]
    parts.append(f"{100 * fraction:.0f} %" if fraction is not None else "")
    parts.append(steps_text(status))
    parts.append(f"{status.updates:,} updates" if status.updates else "")
    if status.env_steps_per_s is not None:
        parts.append(f"{rate(status.env_steps_per_s)} env steps/s")
    if status.updates_per_s is not None:
        parts.append(f"{rate(status.updates_per_s)} updates/s")
    if status.last_return is not None:
        parts.append(f"last return {status.last_return:.4g}")
    if status.eta_s is not None:
        parts.append(f"{duration(status.eta_s)} left")
    return parts[0] + " " + ", ".join(part for part in parts[1:] if part)


def steps_text(status: RunStatus) -> str:
    of_total = f" of {status.total:,}" if status.total else ""
    return f"{status.env_steps:,}{of_total} env steps"


def rate(value: float) -> str:
    """A rate with three digits: 0.52, 8.31, 94.2, 1,520."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def duration(seconds: float) -> str:
    """12 s, 3:07 min, 2:05 h, 3 d 4 h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 2 * 86400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
