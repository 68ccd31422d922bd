"""Workers that fail are replaced; those that keep failing end the run with their own error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import example_environments  # noqa: F401  (registers them)
import numpy as np
import pytest
from environment_helpers import play, random_actions

from rl_lab.environments import EnvironmentSettings, make_vector_env
from rl_lab.environments.process import ProcessVectorEnv
from rl_lab.errors import ConfigError, EnvironmentFailure


def fragile(tmp_path: Path | None, how: str, backend: str = "process", **options: Any) -> Any:
    marker = str(tmp_path / "failed") if tmp_path else None
    kwargs = {"how": how, "at": 3, "marker": marker, "length": 6}
    settings = EnvironmentSettings(
        id="ExampleFragile-v0",
        num_envs=2,
        backend=backend,
        kwargs=kwargs,
        worker_timeout=1.0,
        **options,  # type: ignore[arg-type]
    )
    return make_vector_env(settings, seed=0)


@pytest.mark.parametrize(
    ("how", "backend", "words"),
    [
        ("raise", "sync", "flux capacitor"),
        ("raise", "process", "flux capacitor"),
        ("die", "process", "SIGKILL"),
        ("hang", "process", "no answer for 1 s"),
    ],
)
def test_a_failed_episode_is_closed_as_truncated(tmp_path: Path, how: str, backend: str, words: str) -> None:
    """One failure costs one episode: it ends at the last known observation, the next begins, the event is told."""
    env = fragile(tmp_path, how, backend, workers=2)
    env.reset()
    steps = play(env, random_actions(env, 3))
    ended = steps[-1].ended
    (failed,) = ended.indices.tolist()  # either may be first
    other = 1 - failed
    assert not ended.is_terminal[0]
    assert ended.info[0]["worker_restarted"] is True
    assert words in ended.info[0]["error"]
    np.testing.assert_array_equal(ended.observation["vector"][0], steps[1].observation["vector"][failed])
    assert steps[-1].is_first[[failed, other]].tolist() == [True, False]
    assert steps[-1].observation["vector"][[failed, other], 0].tolist() == [0, 3]
    assert env.restarts == 1
    (event,) = env.drain_events()
    assert event["kind"] == "worker_restart"
    assert f"environment {failed}" in event["message"]
    later = play(env, random_actions(env, 9))
    assert [step.ended.indices.tolist() for step in later if step.ended is not None] == [[other], [failed], [other]]
    state = env.state_dict()
    assert state["episode"].tolist() == [2, 2]
    env.close()


@pytest.mark.parametrize("backend", ["sync", "process"])
def test_three_failures_in_a_row_end_the_run(backend: str) -> None:
    """The message holds the environment's own error."""
    env = fragile(None, "raise", backend)
    env.reset()
    with pytest.raises(EnvironmentFailure, match=r"(?s)3 times.*the flux capacitor broke"):
        play(env, random_actions(env, 20))
    env.close()


def test_all_environments_of_a_lost_worker_are_closed(tmp_path: Path) -> None:
    """Several environments share a worker where there are more of them than cores."""
    env = fragile(tmp_path, "die", workers=1)
    env.reset()
    ended = play(env, random_actions(env, 3))[-1].ended
    np.testing.assert_array_equal(ended.indices, [0, 1])
    assert not ended.is_terminal.any()
    env.close()


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("ExampleBrokenStart-v0", EnvironmentFailure, "no licence file found"),
        ("ExampleCounterr-v0", ConfigError, "Did you mean 'ExampleCounter-v0'"),
    ],
)
def test_an_environment_that_cannot_be_built_is_reported(name: str, error: type[Exception], words: str) -> None:
    module = str(Path(__file__).with_name("example_environments.py"))
    with pytest.raises(error, match=words):
        make_vector_env(EnvironmentSettings(id=name, num_envs=2, backend="process", module=module), seed=0)


def test_closing_ends_the_workers() -> None:
    env = make_vector_env(EnvironmentSettings(id="CartPole-v1", num_envs=2, backend="process", workers=2), seed=0)
    assert isinstance(env, ProcessVectorEnv)
    processes = [worker._process for worker in env._workers]
    env.close()
    env.close()
    assert all(process.poll() is not None for process in processes)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("well", None),
        ("raise", "exited with status 1 ("),
        ("hang", "no answer for 1 s, environment.close() ("),
        ("exit", "exited with status 3"),
    ],
)
def test_an_environment_that_does_not_close_is_told(
    how: str, words: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning that names it; the process is gone either way, and nothing is raised."""
    monkeypatch.setattr("rl_lab.environments.worker_handle._CLOSING_S", 1.0 if how == "hang" else 10.0)
    settings = EnvironmentSettings(id="ExampleClosing-v0", num_envs=1, backend="process", kwargs={"how": how})
    env = make_vector_env(settings, seed=0)
    env.reset()
    process = env._workers[0]._process  # type: ignore[attr-defined]
    env.close()
    assert process.poll() is not None
    told = [record.getMessage() for record in caplog.records if record.name == "rl_lab.environments.worker_handle"]
    assert len(told) == (words is not None)
    assert all("environment.id=ExampleClosing-v0" in line and str(words) in line for line in told)
    assert all(("example_environments.py, line" in line) == (how != "exit") for line in told)


SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
import gymnasium, numpy as np
from example_environments import Fragile
class Mine(Fragile):
    "Lives in a script without a main guard, and hangs."
gymnasium.register("Mine-v0", entry_point=Mine, kwargs=dict(how="hang", at=2))
from rl_lab.environments import EnvironmentSettings, make_vector_env
env = make_vector_env(EnvironmentSettings(id="Mine-v0", num_envs=2, backend="process", workers=2), seed=0)
env.reset()
print(*[worker._process.pid for worker in env._workers], flush=True)
while True:
    env.step(np.zeros((2, 1), np.int32))
"""


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL leaves no orphans, even while an environment hangs. Environments defined in a plain script work."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGINT)  # what Ctrl-C sends to everyone: workers leave it to the parent
        os.kill(pid, signal.SIGTERM)  # and so does a scheduler that ends a job
    time.sleep(0.3)
    assert all(_alive(pid) for pid in workers)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
