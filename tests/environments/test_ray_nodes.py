"""Environments on several Ray nodes of this machine: a cluster is started for each test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.environments.test_ray_actors import require_equal
from tests.overrides import QUIET, TINY_DREAMER
from tests.runs import rows, stopped_and_killed

from rl_lab.environments import make_vector_env
from rl_lab.environments.settings import EnvironmentSettings

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.learning
Command = Callable[..., tuple[int, str, str]]
ENVS = 4


@contextmanager
def nodes(count: int, cores: int = 1) -> Iterator[Any]:
    """A cluster that this process is not connected to yet."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    options = {"num_cpus": cores, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        for _ in range(count - 1):
            cluster.add_node(num_cpus=cores, object_store_memory=80 << 20)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def made(env_id: str, backend: str, **settings: Any) -> Any:
    given = EnvironmentSettings(id=env_id, num_envs=ENVS, backend=backend, **settings)  # type: ignore[arg-type]
    return make_vector_env(given, seed=3)


def action(envs: Any, rng: np.random.Generator) -> np.ndarray:
    shape = (ENVS, *envs.action_spec.shape)
    if envs.action_spec.kind == "discrete":
        return rng.integers(0, envs.action_spec.classes, shape, dtype=np.int32)
    return rng.uniform(-1.0, 1.0, shape).astype(np.float32)


def place_of(actor: Any) -> tuple[str, int]:
    """To be called in an actor: the node that it is on, and its process."""
    return ray.get_runtime_context().get_node_id(), os.getpid()


@pytest.mark.parametrize("count", [2, 4])
def test_nodes_play_what_worker_processes_play(count: int) -> None:
    """Every record of 2,000 env steps, to the bit."""
    with nodes(count) as cluster:
        for env_id in ("CartPole-v1", "dm_control/cartpole-swingup-v0"):
            here = made(env_id, "process")
            there = made(env_id, "ray", ray_address=cluster.address, workers=count)
            assert len(there._actors) == count
            require_equal(here.reset(), there.reset())
            rng = np.random.default_rng(0)
            for _ in range(2000 // ENVS):
                decided = action(here, rng)
                require_equal(here.step(decided), there.step(decided))
            here.close()
            there.close()


def test_a_node_that_dies_takes_no_record_along() -> None:
    """Its episodes are cut off where they were last seen and the next ones begin; the others go on as if nothing had
    happened."""
    with nodes(2, cores=2) as cluster:
        here = made("CartPole-v1", "process")
        there = made("CartPole-v1", "ray", ray_address=cluster.address, workers=2)
        here.reset()
        there.reset()
        rng = np.random.default_rng(0)
        for _ in range(5):
            decided = action(here, rng)
            last = here.step(decided)
            require_equal(last, there.step(decided))
        (other,) = cluster.worker_nodes
        head = ray.get_runtime_context().get_node_id()
        places = [ray.get(actor.__ray_call__.remote(place_of)) for actor in there._actors]
        lost = [n for group, (node, _) in zip(there._groups, places, strict=True) if node != head for n in group]
        assert lost
        for process in (other.all_processes["raylet"][0].process.pid, *(p for node, p in places if node != head)):
            os.kill(process, signal.SIGKILL)  # all at once, as with the machine
        decided = action(here, rng)
        expected, step = here.step(decided), there.step(decided)
        assert step.ended is not None
        assert step.ended.indices.tolist() == lost
        np.testing.assert_array_equal(step.ended.observation["vector"], last.observation["vector"][lost])
        assert not step.ended.is_terminal.any()
        kept = [number for number in range(ENVS) if number not in lost]
        for _ in range(20):
            np.testing.assert_array_equal(step.observation["vector"][kept], expected.observation["vector"][kept])
            decided = action(here, rng)
            expected, step = here.step(decided), there.step(decided)
        assert {event["kind"] for event in there.drain_events()} == {"worker_restart"}
        here.close()
        there.close()


def test_a_run_on_nodes_resumes_exactly(rl_lab: Command, tmp_path: Path) -> None:
    """Stopped by SIGTERM and then killed, it writes the rows of an uninterrupted run in worker processes."""
    words = [*TINY_DREAMER, *QUIET, "evaluation.imagination=false", "logging.every=24", "checkpoint.every=48"]
    words += ["training.total_timesteps=240", "environment.num_envs=2"]
    code, _, errors = rl_lab("train", *words, "environment.backend=process", "run_root=whole")
    assert code == 0, errors
    with nodes(2) as cluster:
        run = stopped_and_killed(
            [*words, "environment.backend=ray", f"environment.ray_address={cluster.address}"], tmp_path
        )
    assert rows(run) == rows(next((tmp_path / "whole").glob("*/*")))
