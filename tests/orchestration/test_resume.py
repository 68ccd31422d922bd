"""A run with real environments and replay, killed with SIGKILL and resumed, equals the run that was never killed."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.components.controller_manager import ControllerManager
from rl_lab.data_sources.base import SourceContext
from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.environments import EnvironmentSettings, make_vector_env
from rl_lab.metrics.console import RunConsole
from rl_lab.metrics.logger import MetricsLogger
from rl_lab.orchestration import checkpoint
from rl_lab.orchestration.checkpoint import CheckpointManager
from rl_lab.orchestration.orchestrator import LoopSettings, Orchestrator
from rl_lab.orchestration.phases import PhaseNames, parse_phases
from rl_lab.orchestration.randomness import seed_random
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.records import OBSERVATION_PREFIX, FieldSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.random import RandomWorkflow

SETTINGS = EnvironmentSettings(id="CartPole-v1", num_envs=3, backend="sync")
PHASES = [
    {"name": "fill", "type": "warmup", "duration": 60, "controller": "random"},
    {
        "name": "main",
        "duration": 1000,
        "workflow_hooks": ["collect", {"update": {"ratio": 0.3}}, {"evaluate": {"every": 150}}],
    },
]


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    monkeypatch.setattr("rl_lab.metrics.report.write_report", lambda folder: folder / "report.html")


def build(run: RunDirectory, storage: str) -> Orchestrator:
    torch.set_num_threads(1)
    seed_random(0)
    envs = make_vector_env(SETTINGS, seed=0)
    fields = {
        OBSERVATION_PREFIX + key: FieldSpec(spec.shape, spec.dtype) for key, spec in envs.observation_spec.items()
    }
    fields["action"], fields["reward"] = FieldSpec((1,), "int32"), FieldSpec((), "float32")
    fields.update(dict.fromkeys(("is_first", "is_last", "is_terminal"), FieldSpec((), "bool")))
    replay = SequenceReplay(capacity=300, storage=storage)  # the ring goes round
    replay.prepare(SourceContext(fields=fields, num_envs=3, device="cpu", seed=0, folder=run.path / "data"))
    context = WorkflowContext(
        config={},
        device=torch.device("cpu"),
        seed=0,
        observation_spec=envs.observation_spec,
        action_spec=envs.action_spec,
        components={},
        controllers=ControllerManager({}),
        data_sources={"replay": replay},
        train_envs=envs,
        initial=envs.reset(),
    )
    workflow = RandomWorkflow(batch_size=4, sequence_length=8)
    workflow.initialize(context)
    names = PhaseNames(update_hooks=workflow.update_hooks)
    return Orchestrator(
        workflow=workflow,
        context=context,
        phases=parse_phases(PHASES, names),
        settings=LoopSettings(total_timesteps=600, log_every=25, checkpoint_every=100, episodes=3),
        run=run,
        logger=MetricsLogger(run.metrics_jsonl),
        console=RunConsole("off", stream=io.StringIO()),
        checkpoints=CheckpointManager(run.checkpoints, workflow=workflow.name),
        eval_envs=lambda stream, *, render: make_vector_env(SETTINGS, seed=0, num_envs=2, stream=stream, render=render),
    )


def comparable(run: RunDirectory) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in run.metrics_jsonl.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "wall_s" and not k.startswith("time/")} for row in rows]


def killed(run: RunDirectory, storage: str, arm: Callable[[Orchestrator], None]) -> None:
    """Run in a child process, which kills itself without any chance to clean up."""
    child = os.fork()
    if child == 0:
        try:
            orchestrator = build(run, storage)
            arm(orchestrator)
            orchestrator.run()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die(*arguments: Any, **options: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(owner: Any, name: str, number: int) -> None:
    """Kill the process in the n-th call of a method."""
    method, calls = getattr(owner, name), []

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            die()
        return method(*arguments, **options)

    setattr(owner, name, counting)


MOMENTS: dict[str, Callable[[Orchestrator], None]] = {
    "before the first checkpoint": lambda run: die_at_call(run.workflow, "collect_step", 20),
    "while collecting": lambda run: die_at_call(run.workflow, "collect_step", 103),
    "in an evaluation": lambda run: die_at_call(run.workflow, "initial_state", 23),
    "while the replay is saved": lambda run: die_at_call(run.context.data_sources["replay"], "state_dict", 3),
    "before the rename": lambda run: die_at_call(checkpoint, "_sync_tree", 4),
    "before the link": lambda run: die_at_call(run.checkpoints, "_point_latest", 2),
    "before the source is told": lambda run: die_at_call(run.context.data_sources["replay"], "committed", 3),
    "at the end": lambda run: die_at_call(run.run_directory, "write_summary", 1),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[dict[str, Any]]:
    """The run that nobody killed."""
    run = RunDirectory.create(tmp_path_factory.mktemp("whole"), "x", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_lab.metrics.report.write_report", lambda folder: folder / "report.html")
        orchestrator = build(run, "ram")
        assert orchestrator.run() == 0
    orchestrator.close()
    rows = comparable(run)
    assert len(rows) >= 28
    assert any("train/batch_reward" in row for row in rows)
    return rows


@pytest.mark.parametrize("storage", ["ram", "disk"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_exactly(tmp_path: Path, whole, storage, moment):
    """Whatever it was doing: every metric but the wall clock's is that of the run that was never killed."""
    run = RunDirectory.create(tmp_path, "x", 0)
    killed(run, storage, MOMENTS[moment])
    orchestrator = build(run, storage)
    orchestrator.resume()
    assert orchestrator.run() == 0
    orchestrator.close()
    assert comparable(run) == whole
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]


def test_killed_again_and_again(tmp_path: Path, whole):
    """Three kills in one run."""
    run = RunDirectory.create(tmp_path, "x", 0)

    def resume_and_die(number: int) -> Callable[[Orchestrator], None]:
        def arm(orchestrator: Orchestrator) -> None:
            orchestrator.resume()
            die_at_call(orchestrator.workflow, "collect_step", number)

        return arm

    for number in (50, 40, 71):
        killed(run, "ram", resume_and_die(number))
    orchestrator = build(run, "ram")
    orchestrator.resume()
    assert orchestrator.scheduler.env_steps >= 200
    orchestrator.run()
    orchestrator.close()
    assert comparable(run) == whole
