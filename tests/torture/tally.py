"""Counts of a campaign, and what went wrong in it."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any


class Tally:
    """How often each thing was done, and each failure in a line, which is told at once."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def add(self, name: str, number: int = 1) -> None:
        self.counts[name] += number

    def bad(self, text: str) -> None:
        self.failures.append(" ".join(text.split())[:500])
        sys.stderr.write(f"FAILED {self.failures[-1]}\n")

    def as_dict(self) -> dict[str, Any]:
        return {"counts": dict(sorted(self.counts.items())), "failures": self.failures}
