"""A run that is killed with SIGKILL at a random moment and resumed equals the run that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.runs import rows

SMALL_DREAMER = (
    "+experiment=dreamer_v3", "size=tiny", "workflow.batch_size=4", "workflow.sequence_length=8", "workflow.horizon=4",
    "workflow.train_ratio=8", "evaluation.episodes=2", "evaluation.num_envs=2", "evaluation.video=false",
    "evaluation.imagination=false", "logging.console=off", "logging.tensorboard=false", "experiment.device=cpu",
)  # fmt: skip
CARTPOLE = ("environment.id=CartPole-v1", "environment.num_envs=2", "training.total_timesteps=400")
CARTPOLE_CLOCKS = ("logging.every=20", "checkpoint.every=60", "evaluation.every=150")
SLOW_CLOCKS = ("logging.every=10", "checkpoint.every=30", "evaluation.every=100", "training.total_timesteps=160")
DISK = ("data_sources.replay.storage=disk",)
ONE_STEP = ("environment.num_envs=1",)
# DQN on its replay, on rollouts of the known equations from there, and on demonstrations.
MIXED_DATA = (
    "+experiment=dqn_cartpole_imagined", "training.total_timesteps=1200", "data_sources.replay.start_after=100",
    "+data_sources.demos={_target_: rl_lab.data_sources.offline.OfflineSource, path: null}",
    "data_sources.demos.expert={name: cartpole, episodes: 2}", "data_sources.mixture.parts.demos=0.2",
    "evaluation.episodes=1", "evaluation.final_episodes=1", "evaluation.select=last", "checkpoint.best=null",
    "evaluation.video=false", "logging.console=off", "logging.tensorboard=false", "logging.every=40",
    "checkpoint.every=100", "training.phases.0.workflow_hooks.2.evaluate.every=500",
)  # fmt: skip


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "rl_lab", "train", *overrides]


def run_folder(root: Path) -> Path | None:
    folders = [path.parent for path in root.glob("*/*/run.json")]
    assert len(folders) <= 1, "a resumed run goes on in its own folder"
    return folders[0] if folders else None


def is_at_work(root: Path, pid: int) -> bool:
    """Whether that process has taken the run's lock."""
    run = run_folder(root)
    lock = run / "lock.json" if run else None
    return lock is not None and lock.exists() and f"{pid}" in lock.read_text()


def train_with_kills(root: Path, overrides: tuple[str, ...], kills: int, longest: float, chance: random.Random) -> int:
    """Kill the run at random moments, resuming it each time; returns how many kills hit it alive."""
    hits = 0
    for attempt in range(kills + 1):
        run = run_folder(root)
        start = command(f"training.resume_path={run}") if run else command(*overrides, f"run_root={root}")
        process = subprocess.Popen(start, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if attempt < kills:
            while not is_at_work(root, process.pid) and process.poll() is None:
                time.sleep(0.02)  # the moment counts from there, not from Python's start
            time.sleep(chance.uniform(0.0, longest))
            if process.poll() is None:
                hits += 1
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
            continue
        output, _ = process.communicate(timeout=3000)
        finished = run is not None and json.loads((run / "run.json").read_text())["status"] == "completed"
        assert process.returncode == 0 or finished, output.decode()[-2000:]
    return hits


def check(
    tmp_path: Path, overrides: tuple[str, ...], *, kills: int, longest: float, seed: int, least_hits: int = 1,
    learned: str = "train/loss/total",
) -> None:  # fmt: skip
    with (tmp_path / "errors.txt").open("w+") as errors:
        start = command(*overrides, f"run_root={tmp_path / 'whole'}")
        with subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=errors) as never_killed:
            hits = train_with_kills(tmp_path / "killed", overrides, kills, longest, random.Random(seed))
            never_killed.wait(timeout=3000)
        errors.seek(0)
        assert never_killed.returncode == 0, errors.read()[-2000:]
    whole = run_folder(tmp_path / "whole")
    assert whole is not None
    expected = rows(whole)
    assert any(learned in row for row in expected), "the run must have learned something"
    assert any("eval/return_mean" in row for row in expected)
    killed = run_folder(tmp_path / "killed")
    assert killed is not None
    assert hits >= least_hits
    assert rows(killed) == expected
    assert json.loads((killed / "run.json").read_text())["status"] == "completed"


def test_cartpole_killed_twice(tmp_path):
    """The short version: CartPole, RAM replay, in-process environments."""
    overrides = (*SMALL_DREAMER, *CARTPOLE, *CARTPOLE_CLOCKS, "training.total_timesteps=240")
    check(tmp_path, overrides, kills=2, longest=2.0, seed=0)


@pytest.mark.learning
def test_offline_imagined_and_mixed_data_killed(tmp_path):
    """All three sources in one run: the draws of each, the rollouts and the shares go on where they stopped."""
    check(tmp_path, MIXED_DATA, kills=3, longest=3.0, seed=3, learned="train/loss/td")


@pytest.mark.learning
@pytest.mark.parametrize("storage", [(), DISK], ids=["ram", "disk"])
@pytest.mark.parametrize(
    "environment",
    [
        (*CARTPOLE, *CARTPOLE_CLOCKS),
        (*CARTPOLE, *CARTPOLE_CLOCKS, "environment.backend=process"),
        ("environment.id=dm_control/cartpole-swingup-v0", "environment.time_limit=200", *ONE_STEP, *SLOW_CLOCKS),
        ("environment.id=ALE/Pong-v5", "environment.time_limit=400", *ONE_STEP, *SLOW_CLOCKS),
        ("environment.id=CarRacing-v3", "environment.time_limit=60", *ONE_STEP, *SLOW_CLOCKS),
    ],
    ids=["cartpole", "cartpole-workers", "dmc", "pong", "car-racing"],
)
def test_every_family(tmp_path, environment, storage):
    """Each environment family with both kinds of replay."""
    check(tmp_path, (*SMALL_DREAMER, *environment, *storage), kills=2, longest=8.0, seed=1)


@pytest.mark.learning
def test_twenty_random_moments(tmp_path):
    """Twenty kills of one CartPole run, one after the other, each of them in mid-run."""
    overrides = (*SMALL_DREAMER, *CARTPOLE, *CARTPOLE_CLOCKS, "training.total_timesteps=9000", "evaluation.every=3000")
    check(tmp_path, overrides, kills=20, longest=3.0, seed=2, least_hits=20)
