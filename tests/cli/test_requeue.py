"""Clusters take machines away: the run saves, says "start me again", and the same command goes on with it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.overrides import QUIET, RANDOM

from rl_lab.orchestration import periodic_evaluation

Command = Callable[..., tuple[int, str, str]]


def test_a_preempted_run_is_requeued(rl_lab: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM in an evaluation: exit code 75, and nothing new is begun the next time. A completed run is not reused."""
    words = ["train", *RANDOM, *QUIET, "evaluation.every=40", "--requeue"]
    evaluate = periodic_evaluation.evaluate

    def preempted(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(periodic_evaluation, "evaluate", preempted)
        assert rl_lab(*words)[0] == 75
    run = next(tmp_path.glob("experiments/*/*/run.json"))
    assert json.loads(run.read_text())["status"] == "interrupted"
    beat = json.loads((run.parent / "heartbeat.json").read_text())
    assert beat["pid"] == os.getpid()
    assert beat["env_steps"] <= 40
    assert rl_lab(*words)[0] == 0
    assert json.loads(run.read_text())["status"] == "completed"
    assert json.loads(run.read_text())["resumed"]
    assert rl_lab(*words)[0] == 0
    assert len(list(tmp_path.glob("experiments/*/*/run.json"))) == 2
