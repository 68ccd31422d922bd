from __future__ import annotations

import io

import pytest

from rl_lab.errors import ConfigError
from rl_lab.metrics.console import RunConsole, RunStatus, duration, live_parts, plain_line

STATUS = RunStatus(
    phase="train",
    activity="learning",
    env_steps=1500,
    total=3000,
    updates=100,
    env_steps_per_s=1520.4,
    updates_per_s=88.14,
    last_return=212.3,
    eta_s=95.0,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_auto_is_plain_in_a_log_and_live_on_a_terminal():
    """`auto` looks at where the output goes."""
    assert RunConsole("auto", stream=io.StringIO()).mode == "plain"
    assert RunConsole("auto", stream=Terminal()).mode == "live"


def test_plain_line_says_everything():
    """Phase, activity, progress, speed, last return and time left are in each line of a log."""
    line = plain_line(STATUS, 61.0)
    for part in (
        "[1:01 min]",
        "train: learning",
        "50 %",
        "1,500 of 3,000 env steps",
        "100 updates",
        "1,520 env steps/s",
    ):
        assert part in line
    assert "88.1 updates/s, last return 212.3, 1:35 min left" in line


def test_plain_mode_writes_now_and_then():
    """A thousand statuses in a moment are one line; messages are written at once."""
    stream = io.StringIO()
    console = RunConsole("plain", stream=stream, plain_every_s=1000.0)
    for _ in range(1000):
        console.status(STATUS)
    assert stream.getvalue().count("\n") == 1
    console.message("Saved a checkpoint [step 1500].")
    console.close()
    assert stream.getvalue().endswith("\nSaved a checkpoint [step 1500].\n")


def test_off_writes_messages_only():
    """`off` shows no progress; messages are still said."""
    stream = io.StringIO()
    console = RunConsole("off", stream=stream)
    console.status(STATUS)
    console.message("Report: report.html")
    console.close()
    assert stream.getvalue() == "Report: report.html\n"


def test_live_mode_draws_one_line_and_keeps_messages():
    """Messages stand above the live line; the line holds the numbers."""
    stream = Terminal()
    console = RunConsole("live", stream=stream)
    console.status(STATUS)
    console.message("A [bold]message[/bold] as it is")
    console.activity("evaluating")
    console.close()
    assert "A [bold]message[/bold] as it is" in stream.getvalue()
    assert "evaluating" in stream.getvalue()
    assert "1,500 of 3,000 env steps" in stream.getvalue()


@pytest.mark.parametrize("width", [200, 120, 80, 40, 25])
def test_live_line_fits_the_terminal(width):
    """On a narrow terminal the less important parts go; phase and activity stay."""
    text = "".join(part for part, _ in live_parts(STATUS, 0.0, width))
    assert len(text) <= width
    assert text.startswith("train learning")


def test_a_silent_run_shows_for_how_long():
    """Somebody who waits sees that the run is not hanging unseen."""
    assert "learning (12 s)" in "".join(part for part, _ in live_parts(STATUS, 12.0, 200))


def test_status_without_numbers():
    """A run that has just started has no rates yet."""
    assert plain_line(RunStatus(), 0.0) == "[0 s] run: starting, 0 env steps"


def test_durations():
    """Times are short at every scale."""
    assert [duration(value) for value in (0.4, 59, 61, 3725, 200_000)] == [
        "0 s",
        "59 s",
        "1:01 min",
        "1:02 h",
        "2 d 7 h",
    ]


def test_unknown_mode_is_a_config_error():
    """A misspelt mode names the key and the nearest one."""
    with pytest.raises(ConfigError, match=r"logging\.console.*'plain'"):
        RunConsole("plane")  # type: ignore[arg-type]
