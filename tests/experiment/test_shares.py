"""Several ranks train one agent: two with half of each batch learn what one learns of the whole, and resume exactly."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.overrides import QUIET, TINY_DREAMER
from tests.rank_learners import LEARNERS, learn
from tests.runs import rows

from rl_lab import ranks
from rl_lab.buffers.priorities import PrioritySampler
from rl_lab.buffers.streams import StreamIndex

Command = Callable[..., tuple[int, str, str]]
UPDATES = 50 if "RL_LAB_LONG" in os.environ else 3
TWO = ["training.devices=2", *QUIET, "evaluation.imagination=false", "logging.every=40", "checkpoint.every=80"]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks learned, each of its half."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    path = os.pathsep.join(entry for entry in sys.path if entry)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.rank_learners", str(folder), str(UPDATES)],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": path}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=200) for process in processes] == [0, 0]
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", LEARNERS)
def test_two_ranks_learn_what_one_does(name: str, halves: list[dict[str, Any]], tmp_path: Path) -> None:
    """Losses and every parameter, statistic and slow copy; between the ranks to the bit."""
    whole, (first, second) = learn(name, tmp_path, UPDATES), (half[name] for half in halves)
    for key, value in whole["state"].items():
        assert torch.equal(first["state"][key], second["state"][key]), key
        torch.testing.assert_close(
            first["state"][key], value, atol=1e-5, rtol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
    for number, losses in enumerate(whole["losses"]):
        for key, value in losses.items():
            mean = (first["losses"][number][key] + second["losses"][number][key]) / 2
            assert mean == pytest.approx(value, abs=1e-5, rel=1e-5), (number, key)


def test_importance_weights_are_those_of_one_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank draws half of a batch from a tree of its own, so P = p / (2 · own total); the highest weight is 1."""
    shares, beta = [np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 1.0, 1.0, 5.0])], 0.5
    by_hand = [(8 * priorities / (2 * priorities.sum())) ** -beta for priorities in shares]
    monkeypatch.setattr(ranks, "count", lambda: 2)
    monkeypatch.setattr(ranks, "highest", lambda value: 1.0)  # leaves the weights as they are
    for priorities, expected in zip(shares, by_hand, strict=True):
        index = StreamIndex(num_envs=1, length=len(priorities))
        index.append([None] * len(priorities))
        sampler = PrioritySampler(index, alpha=1.0)
        sampler.update(np.arange(len(priorities)), priorities)
        windows, weights = sampler.draw(np.random.default_rng(0), count=32, context=0, length=1, beta=beta)
        ratio = weights / expected[windows.rows[:, 0]]
        assert ratio == pytest.approx(np.full(32, 4**beta), rel=1e-5)  # the same factor on every rank


@pytest.mark.learning
def test_two_ranks_resume_exactly(rl_lab: Command, tmp_path: Path) -> None:
    """Stopped by SIGTERM and then killed, a run of two ranks writes the rows of an uninterrupted one."""
    words = [*TINY_DREAMER, *TWO, "training.total_timesteps=400", "evaluation.every=200"]
    code, _, errors = rl_lab("train", *words, "run_root=whole")
    assert code == 0, errors
    command, folder = [sys.executable, "-m", "rl_lab", "train"], tmp_path / "parts"
    process = start(command, [*words, "run_root=parts"], tmp_path)
    wait_for_rows(folder, 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    run = next(folder.glob("*/*"))
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    process = start(command, [f"training.resume_path={run}"], tmp_path)
    wait_for_rows(folder, 6)
    process.kill()
    process.wait()
    time.sleep(1.5)  # the ranks notice that they are alone
    code, _, errors = rl_lab("train", f"training.resume_path={run}")
    assert code == 0, errors
    assert rows(run) == rows(next((tmp_path / "whole").glob("*/*")))
    assert (run / "checkpoints" / "latest" / "training-1.pt").is_file()
    code, _, errors = rl_lab("train", f"training.resume_path={run}", "training.devices=1")
    assert code == 2
    assert "training.devices=2" in errors


def start(command: list[str], words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen([*command, *words], cwd=folder, env=os.environ | {"PYTHONPATH": path})


def wait_for_rows(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if sum(len(path.read_bytes().splitlines()) for path in folder.glob("*/*/metrics.jsonl")) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"never {count} rows")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["+experiment=ppo_cartpole", "training.devices=3"], "environment.num_envs=8 does not divide into 3"),
        (["+experiment=ppo_cartpole", "training.devices=2", "workflow.batch_size=7"], "workflow.batch_size=7"),
        (["+experiment=ppo_cartpole", "training.devices=2", "training.nodes=2"], "torchrun"),
        (["+experiment=planet", "training.devices=2", "environment.id=Pendulum-v1"], "trains in one process"),
        (["+experiment=ppo_cartpole", "training.devices=0"], "training.devices"),
    ],
)
def test_what_cannot_be_shared_out_is_one_clear_line(rl_lab: Command, words: list[str], named: str) -> None:
    """Before any process is started."""
    code, _, errors = rl_lab("train", *words)
    assert code == 2
    assert named in errors
    assert len(errors.strip().splitlines()) == 1


def test_more_ranks_than_gpus_are_refused(rl_lab: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how many there are."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    code, _, errors = rl_lab("train", "+experiment=ppo_cartpole", "training.devices=2")
    assert code == 2
    assert "this machine has 1 GPUs" in errors
