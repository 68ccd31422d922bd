"""Several ranks train one agent: two with half of each batch learn what one learns of the whole, and resume exactly."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.overrides import QUIET, TINY_DREAMER
from tests.rank_learners import LEARNERS, learn
from tests.runs import rows, stopped_and_killed, wait_for_rows

from rl_lab import ranks
from rl_lab.buffers.priorities import PrioritySampler
from rl_lab.buffers.streams import StreamIndex
from rl_lab.experiment import shares

Command = Callable[..., tuple[int, str, str]]
UPDATES = 50 if "RL_LAB_LONG" in os.environ else 3
TWO = ["training.devices=2", *QUIET, "evaluation.imagination=false", "logging.every=40", "checkpoint.every=80"]


SMALL = [
    *(*QUIET, "environment.num_envs=4", "logging.every=16", "checkpoint.keep=9", "evaluation.episodes=1"),
    *("evaluation.imagination=false", "workflow.batch_size=4", "experiment.device=cpu"),
]
RUNS = {  # of two ranks: a rollout is 32 env steps, and full at the first checkpoint
    "ppo_cartpole": ["data_sources.stream.length=8", "data_sources.stream.epochs=2", "checkpoint.every=32"],
    "dqn_cartpole": ["data_sources.replay.sampling=prioritized", "data_sources.replay.start_after=8"],
}


def two_ranks(folder: Path, updates: int, runs: list[list[str]]) -> None:
    """Two processes that are `tests.rank_learners`."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    path = os.pathsep.join(entry for entry in sys.path if entry)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.rank_learners", str(folder), str(updates), json.dumps(runs)],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": path}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=200) for process in processes] == [0, 0]


@pytest.fixture(scope="module")
def ranks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks were at work: each learned of its half, and together they made `RUNS`."""
    folder = tmp_path_factory.mktemp("ranks")
    words = [*SMALL, "training.devices=2", "training.total_timesteps=48", f"run_root={folder}"]
    two_ranks(folder, UPDATES, [[f"+experiment={name}", *words, *own] for name, own in RUNS.items()])
    return folder


@pytest.fixture(scope="module")
def halves(ranks_folder: Path) -> list[dict[str, Any]]:
    """The states of two ranks, each of which learned from half of every batch."""
    return [torch.load(ranks_folder / f"rank-{rank}.pt") for rank in range(2)]


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


@pytest.mark.parametrize(("count", "launched"), [("1", False), ("2", True)])
def test_a_launch_of_one_rank_is_a_process_alone(monkeypatch: pytest.MonkeyPatch, count: str, launched: bool) -> None:
    """It takes the plain path: nothing is averaged, and updates may be captured."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", count)
    assert ranks.is_launched() is launched


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


def test_a_run_goes_on_with_another_number_of_ranks(rl_lab: Command, ranks_folder: Path) -> None:
    """From two to one, and back: every environment keeps its records and its running episode, and the run says so."""
    runs = {name: next(ranks_folder.glob(f"{name}/*")) for name in RUNS}
    starts = {"ppo_cartpole": runs["ppo_cartpole"] / "checkpoints" / "step-32", "dqn_cartpole": runs["dqn_cartpole"]}
    for start in starts.values():
        words = [f"training.resume_path={start}", "training.devices=1", "training.total_timesteps=96"]
        code, _, errors = rl_lab("train", *words)
        assert code == 0, errors
    resumed = [f"training.resume_path={run}" for run in runs.values()]
    two_ranks(ranks_folder, 0, [[run, "training.devices=2", "training.total_timesteps=144"] for run in resumed])
    for run in runs.values():
        told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        changes = [event["message"] for event in told if event["kind"] == "ranks"]
        assert [message.split(":")[0] for message in changes] == [
            "the checkpoint is of 2 ranks, and the run goes on with 1",
            "the checkpoint is of 1 rank, and the run goes on with 2",
        ]
        summary = json.loads((run / "summary.json").read_text())
        assert summary["env_steps"] == 144
        plan = (run / "plan.txt").read_text()
        assert "2 ranks that share all out" in plan
        assert "CartPole-v1, 4 at once" in plan
        episodes = [row["collect/episodes"] for row in rows(run) if "collect/episodes" in row]
        assert episodes == sorted(episodes)  # episodes of all ranks are counted on
    # PPO gave up 32 decisions at the first change and 0 or more at the second: 8 updates of every rollout remain.
    assert json.loads((runs["ppo_cartpole"] / "summary.json").read_text())["updates"] % 8 == 0
    before, between, after = [records(runs["dqn_cartpole"] / "checkpoints" / f"step-{n}") for n in (48, 96, 144)]
    for old, new in [(before, between), (between, after)]:
        for number in range(4):
            for name, values in old[number].items():  # an ended episode's last record may be marked only later
                np.testing.assert_array_equal(new[number][name][: len(values)], values)
    goes_on = [not before[n]["is_last"][-1] and not after[n]["is_first"][len(before[n]["is_first"])] for n in range(4)]
    assert any(goes_on)
    assert all(len(after[n]["reward"]) > len(before[n]["reward"]) for n in range(4))


def records(checkpoint: Path) -> list[dict[str, np.ndarray]]:
    """The records of each environment in the replay of a checkpoint; environments are counted over all ranks."""
    streams = []
    for rank in range(json.loads((checkpoint / "manifest.json").read_text())["ranks"]):
        state = torch.load(checkpoint / ("training.pt" if rank == 0 else f"training-{rank}.pt"))
        held = state["sources"]["replay"]["streams"]["written"].numpy()
        folder = checkpoint / ("sources" if rank == 0 else f"sources-{rank}") / "replay"
        fields = {path.stem: np.split(np.load(path), held.cumsum()[:-1]) for path in folder.glob("*.npy")}
        streams += [{name: parts[number] for name, parts in fields.items()} for number in range(len(held))]
    return streams


def test_a_replay_on_disk_is_not_dealt_out(rl_lab: Command, tmp_path: Path) -> None:
    """Refused before its files, whose size is that of a share, are touched."""
    words = [*SMALL, "data_sources.replay.storage=disk", "data_sources.replay.capacity=400"]
    words += ["data_sources.replay.start_after=8"]
    code, _, errors = rl_lab("train", "+experiment=dqn_cartpole", *words, "training.total_timesteps=32")
    assert code == 0, errors
    run = next(tmp_path.glob("experiments/*/*"))
    stored = [(path, path.stat().st_size) for path in sorted(run.glob("data/**/*.rows"))]
    code, _, errors = rl_lab("train", f"training.resume_path={run}", "training.devices=2")
    assert code == 2
    assert "storage=disk" in errors
    assert "training.devices=1" in errors
    assert stored == [(path, path.stat().st_size) for path in sorted(run.glob("data/**/*.rows"))]


@pytest.mark.learning
def test_two_ranks_resume_exactly(rl_lab: Command, tmp_path: Path) -> None:
    """Stopped by SIGTERM and then killed, a run of two ranks writes the rows of an uninterrupted one."""
    words = [*TINY_DREAMER, *TWO, "training.total_timesteps=400", "evaluation.every=200"]
    code, _, errors = rl_lab("train", *words, "run_root=whole")
    assert code == 0, errors
    run = stopped_and_killed(words, tmp_path)
    assert rows(run) == rows(next((tmp_path / "whole").glob("*/*")))
    assert (run / "checkpoints" / "latest" / "training-1.pt").is_file()


@pytest.mark.learning
def test_a_rank_that_dies_ends_the_others(rl_lab: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one line that names it; the run goes on from its last checkpoint."""
    before = shares._wait

    def wait(processes: list[subprocess.Popen[bytes]], told: list[int]) -> list[int | None]:
        wait_for_rows(tmp_path / "experiments", 3)
        processes[1].kill()
        return before(processes, told)

    monkeypatch.setattr(shares, "_wait", wait)
    code, _, errors = rl_lab("train", *TINY_DREAMER, *TWO, "training.total_timesteps=4000")
    assert code == 2
    assert "rank 1 was killed by SIGKILL" in errors
    assert len(errors.strip().splitlines()) == 1
    run = next((tmp_path / "experiments").glob("*/*"))
    assert json.loads((run / "run.json").read_text())["status"] == "failed"


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
