"""Processes, waiting, watching and screenshots for the tests in Chromium."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from playwright.sync_api import ConsoleMessage, Page

WIDTHS = {"phone": (390, 844), "laptop": (1280, 860), "wide": (1920, 1080)}
EXPERIMENT = "dreamer_v3_cartpole"
Found = TypeVar("Found")


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rl_lab", *arguments]
    with open(log, "wb") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


def wait_for(check: Callable[[], Found], seconds: float, what: str) -> Found:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = check()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {seconds} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Watched:
    """A page that remembers what it complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


def photograph(page: Page, shots: Path, name: str) -> None:
    """A screenshot at each of the three widths; nothing may stick out to the side."""
    for label, (width, height) in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(250)
        page.screenshot(path=str(shots / f"{name}-{label}.png"))
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 1, f"{name} is {overflow} pixels too wide for {label}"
    page.set_viewport_size({"width": WIDTHS["laptop"][0], "height": WIDTHS["laptop"][1]})
