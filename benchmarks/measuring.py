"""Helpers of the benchmarks of single parts: waiting for the device, its name, and the file with their figures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from rl_lab.orchestration.run_directory import git_commit

RESULTS = Path("results/speed")


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def add_writing(parser: argparse.ArgumentParser) -> None:
    """Options of a benchmark whose figures may be kept."""
    parser.add_argument("--write", metavar="NAME", help="write results/speed/NAME.json")
    parser.add_argument("--note", help="what a reader of the file must know: what ran beside it, say")


def write_record(name: str, record: dict[str, Any], note: str | None = None) -> None:
    """results/speed/NAME.json: what was measured, with the versions that it was measured on."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    record = {"name": name, "torch": torch.__version__, "commit": git_commit(), **record}
    if note is not None:
        record["note"] = note
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
