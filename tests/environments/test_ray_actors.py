"""Environments in Ray actors: the records of worker processes to the bit, and the same restarts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.overrides import QUIET, RANDOM

from rl_lab import ray_cluster
from rl_lab.environments import make_vector_env
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import ConfigError
from rl_lab.records import VectorStep

ray = pytest.importorskip("ray")
Command = Callable[..., tuple[int, str, str]]
ENVS = 3


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray on this machine, once for all tests here."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init("local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def made(backend: str, env_id: str = "CartPole-v1", **settings: Any) -> Any:
    return make_vector_env(
        EnvironmentSettings(id=env_id, num_envs=ENVS, backend=backend, workers=2, **settings),  # type: ignore[arg-type]
        seed=3,
    )


def actions(envs: Any, count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2, (ENVS, *envs.action_spec.shape)).astype(np.int32) for _ in range(count)]


def require_equal(one: VectorStep, other: VectorStep) -> None:
    for key, value in one.observation.items():
        np.testing.assert_array_equal(value, other.observation[key])
    np.testing.assert_array_equal(one.reward, other.reward)
    np.testing.assert_array_equal(one.is_first, other.is_first)
    assert (one.ended is None) == (other.ended is None)
    if one.ended is not None and other.ended is not None:
        np.testing.assert_array_equal(one.ended.indices, other.ended.indices)
        np.testing.assert_array_equal(one.ended.reward, other.ended.reward)
        np.testing.assert_array_equal(one.ended.is_terminal, other.ended.is_terminal)
        for key, value in one.ended.observation.items():
            np.testing.assert_array_equal(value, other.ended.observation[key])


def test_actors_play_what_worker_processes_play() -> None:
    """Observations, rewards, ends and the state that is saved; and what is brought back from it."""
    here, there = made("process"), made("ray")
    require_equal(here.reset(), there.reset())
    for action in actions(here, 100):
        require_equal(here.step(action), there.step(action))
    state, other = here.state_dict(), there.state_dict()
    assert [part.tolist() for part in state["actions"]] == [part.tolist() for part in other["actions"]]
    there.close()  # there are two cores
    again = made("ray")
    require_equal(here.load_state_dict(state), again.load_state_dict(other))
    for action in actions(here, 40, seed=1):
        require_equal(here.step(action), again.step(action))
    here.close()
    again.close()


def test_an_actor_that_is_lost_is_replaced() -> None:
    """As with its node: the episodes that it played are cut off where they were last seen, the others go on."""
    envs = made("ray")
    before = envs.reset()
    for action in actions(envs, 3):
        before = envs.step(action)
    ray.kill(envs._actors[0])
    step = envs.step(actions(envs, 1)[0])
    assert step.ended is not None
    lost = envs._groups[0]
    assert step.ended.indices.tolist() == lost
    np.testing.assert_array_equal(step.ended.observation["vector"], before.observation["vector"][lost])
    assert not step.ended.is_terminal.any()
    assert all(info["worker_restarted"] for info in step.ended.info)
    assert [event["kind"] for event in envs.drain_events()] == ["worker_restart"]
    assert envs.step(actions(envs, 1)[0]).ended is None
    envs.close()


@pytest.mark.learning
def test_a_run_on_actors_is_the_run_on_processes(rl_lab: Command, tmp_path: Path) -> None:
    """The same rows, interrupted or not: the back end may even change in between."""
    words = ["train", *RANDOM, *QUIET, "environment.num_envs=2", "logging.every=20", "evaluation.every=1000"]
    assert rl_lab(*words, "environment.backend=process", "run_root=process")[0] == 0
    assert rl_lab(*words, "environment.backend=ray", "run_root=ray", "training.total_timesteps=40")[0] == 0
    run = next((tmp_path / "ray").glob("*/*"))
    assert rl_lab("train", f"training.resume_path={run}", "training.total_timesteps=80")[0] == 0
    assert collected(run) == collected(next((tmp_path / "process").glob("*/*")))


def collected(run: Path) -> list[Any]:
    """The metrics of training episodes in each row of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("env_steps", "collect/episodes", "collect/episode_return", "collect/episode_length")
    return [[row.get(name) for name in names] for row in rows if "collect/episodes" in row]


@pytest.mark.learning
def test_collectors_that_play_on_their_own_stay_close_behind(rl_lab: Command, tmp_path: Path) -> None:
    """All records arrive, of every environment; the policy's age is logged and bounded; a wrong use is refused."""
    small = [
        "environment.num_envs=2",
        "workflow.batch_size=4",
        "workflow.train_every=4",
        "training.total_timesteps=160",
    ]
    words = ["train", "+experiment=dqn_cartpole", *QUIET, *small, "evaluation.episodes=1", "logging.every=32"]
    stale = ["environment.backend=ray", "environment.staleness=4", "data_sources.replay.start_after=16"]
    code, _, errors = rl_lab(*words, *stale)
    assert code == 0, errors
    run = next(tmp_path.glob("experiments/*/*"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ages = [row["collect/policy_age"] for row in rows if "collect/policy_age" in row]
    assert 0.0 < max(ages) <= 4.0
    assert json.loads((run / "summary.json").read_text())["env_steps"] >= 160
    code, _, errors = rl_lab("train", "+experiment=ppo_cartpole", *QUIET, *stale[:2])
    assert code == 2
    assert "needs every decision in turn" in errors
    code, _, errors = rl_lab(*words, "environment.staleness=2")
    assert code == 2
    assert "environment.staleness is for environment.backend=ray" in errors


def test_a_cluster_that_cannot_be_used_is_one_clear_line(rl_lab: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more actors than cores; a cluster that is not there; another version on a node; a store without room."""
    words = ["train", *RANDOM, *QUIET, "environment.backend=ray", "environment.num_envs=4"]
    code, _, errors = rl_lab(*words, "environment.workers=4")
    assert code == 2
    assert "environment.workers=4: the Ray cluster has 2 cores" in errors
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    code, _, errors = rl_lab(*words, "environment.ray_address=127.0.0.1:1")
    assert code == 2
    assert "environment.ray_address=127.0.0.1:1: the Ray cluster cannot be reached" in errors
    assert len(errors.strip().splitlines()) == 1
    needs = ray_cluster.Needs(None, (), {**ray_cluster.versions(), "torch": "0.1"})
    with pytest.raises(ConfigError, match=r"torch .* instead of 0\.1"):
        needs.meet()

    def full(task: Any) -> None:
        raise ray.exceptions.ObjectStoreFullError("out of memory")

    monkeypatch.setattr(ray, "get", full)
    with pytest.raises(ray_cluster.RayError, match="object store is full"):
        ray_cluster.result(None)
