"""The short form of `make torture`: one turn of each part. The campaign itself counts in hundreds."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from tests.torture.cases import weights
from tests.torture.children import in_child
from tests.torture.kills import check_checkpoints
from tests.torture.nonfinite import is_finite
from tests.torture.tally import Tally

from rl_lab.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "kills", "full_disks", "comparisons", "damaged_files", "hostile_directories", "bad_environments", "nonfinite",
    "fuzzed_configurations", "fuzzed_datasets", "forged_checkpoints", "checkpoints_read",
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


def test_a_number_that_is_not_finite_is_noticed() -> None:
    """In any module; tensors of a checkpoint need no gradient."""
    sound = {"components": {"a": {"weight": torch.ones(2)}}, "controllers": {"b": {"scale": torch.zeros(1)}}}
    assert is_finite(sound)
    assert not is_finite({**sound, "components": {"a": {"weight": torch.tensor([1.0, math.inf])}}})
    assert not is_finite({**sound, "controllers": {"b": {"scale": torch.tensor([math.nan])}}})


def test_one_changed_bit_of_the_weights_is_noticed(tmp_path: Path) -> None:
    """Runs are compared by their rows and by every number that it takes to act."""
    state = {"components": {"a": {"weight": torch.ones(3)}}, "controllers": {}, "workflow_state": {"count": 4}}
    torch.save(state, tmp_path / "agent.pt")
    before = weights(tmp_path)
    assert weights(tmp_path) == before
    state["components"]["a"]["weight"].view(torch.int32)[1] ^= 1
    torch.save(state, tmp_path / "agent.pt")
    assert weights(tmp_path) != before


def test_half_a_checkpoint_is_noticed(random_run: Path, tmp_path: Path) -> None:
    """Whatever is named as a checkpoint has to be one, whenever the run was killed."""
    run = Path(shutil.copytree(random_run, tmp_path / "run", symlinks=True))
    sound, torn = Tally(), Tally()
    check_checkpoints("random", run, sound)
    ((run / "checkpoints" / "latest").resolve() / "training.pt").unlink()
    check_checkpoints("random", run, torn)
    assert sound.counts["checkpoints_read"] >= 1
    assert (sound.failures, len(torn.failures)) == ([], 1)
