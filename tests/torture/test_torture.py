"""The short form of `make torture`: one turn of each part. The campaign itself counts in hundreds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.torture.children import in_child

from rl_lab.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "kills", "full_disks", "comparisons", "damaged_files", "hostile_directories", "bad_environments", "nonfinite",
    "fuzzed_configurations", "fuzzed_datasets",
)  # fmt: skip


def test_one_turn_of_each_part(tmp_path: Path) -> None:
    """In a process of its own, which forks before it has any thread."""
    command = [sys.executable, "-m", "tests.torture", "--once", "--seed", "3", "--out", str(tmp_path / "counts.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    counts = json.loads((tmp_path / "counts.json").read_text())["counts"]
    assert [name for name in PARTS if counts.get(name, 0) < 1] == []


def test_a_child_is_told_apart_by_how_it_ends() -> None:
    """A campaign that took a defect for a refusal, or a hang for an end, would find nothing."""

    def refuse() -> None:
        raise ConfigError("no")

    def fail() -> None:
        raise ValueError("a defect")

    def hang() -> None:
        while True:
            pass

    assert in_child(lambda: 7).value == 7
    assert [in_child(refuse).status, in_child(fail).status] == ["refused", "traceback"]
    assert in_child(hang, limit=0.2).status == "hung"
    assert in_child(hang, number=9, after=0.1).status == "killed"
