"""What the loop itself costs: raw stepping of 8 CartPoles against a whole run of random actions into the replay.

CPU time is measured, so that other load on the machine does not count. Run it: python benchmarks/overhead.py
"""

from __future__ import annotations

import io
import tempfile
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch

from rl_lab.components.controller_manager import ControllerManager
from rl_lab.data_sources.base import SourceContext
from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.environments import EnvironmentSettings, VectorEnv, make_vector_env
from rl_lab.metrics.console import RunConsole
from rl_lab.metrics.logger import MetricsLogger
from rl_lab.orchestration.checkpoint import CheckpointManager
from rl_lab.orchestration.orchestrator import LoopSettings, Orchestrator
from rl_lab.orchestration.phases import PhaseNames, parse_phases
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.records import OBSERVATION_PREFIX, FieldSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.random import RandomWorkflow

NUM_ENVS = 8
SETTINGS = EnvironmentSettings(id="CartPole-v1", num_envs=NUM_ENVS, backend="sync")


def raw_gymnasium(steps: int) -> float:
    """Microseconds of one vector step in Gymnasium's SyncVectorEnv."""
    envs = gymnasium.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode="sync")
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (steps, NUM_ENVS))
    start = time.process_time()
    for action in actions:
        envs.step(action)
    elapsed = time.process_time() - start
    envs.close()
    return elapsed / steps * 1e6


def raw_rl_lab(steps: int) -> float:
    """Microseconds of one step of RL Lab's in-process vector environment."""
    envs = make_vector_env(SETTINGS, seed=0)
    envs.reset()
    actions = np.random.default_rng(0).integers(0, 2, (steps, NUM_ENVS, 1), dtype=np.int32)
    start = time.process_time()
    for action in actions:
        envs.step(action)
    elapsed = time.process_time() - start
    envs.close()
    return elapsed / steps * 1e6


def whole_loop(steps: int) -> float:
    """Microseconds of one vector step with scheduler, routing, replay, episode tracking and metrics around it."""
    with tempfile.TemporaryDirectory() as folder:
        orchestrator = _orchestrator(Path(folder), steps * NUM_ENVS)
        start = time.process_time()
        orchestrator._loop()  # the loop alone: no checkpoint, final evaluation or report
        elapsed = time.process_time() - start
        orchestrator.close()
    return elapsed / steps * 1e6


def _orchestrator(folder: Path, env_steps: int) -> Orchestrator:
    envs: VectorEnv = make_vector_env(SETTINGS, seed=0)
    fields = {
        OBSERVATION_PREFIX + key: FieldSpec(spec.shape, spec.dtype) for key, spec in envs.observation_spec.items()
    }
    fields["action"] = FieldSpec(envs.action_spec.shape, envs.action_spec.dtype)
    fields["reward"] = FieldSpec((), "float32")
    fields.update(dict.fromkeys(("is_first", "is_last", "is_terminal"), FieldSpec((), "bool")))
    replay = SequenceReplay(capacity=100_000)
    replay.prepare(SourceContext(fields=fields, num_envs=NUM_ENVS, device="cpu", seed=0, folder=folder / "replay"))
    run = RunDirectory.create(folder, "overhead", 0)
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
    workflow = RandomWorkflow()
    workflow.initialize(context)
    return Orchestrator(
        workflow=workflow,
        context=context,
        phases=parse_phases(None, PhaseNames(update_hooks=workflow.update_hooks, default_ratio=0.0)),
        settings=LoopSettings(total_timesteps=env_steps, log_every=500, checkpoint_every=10**9),
        run=run,
        logger=MetricsLogger(run.metrics_jsonl),
        console=RunConsole("plain", stream=io.StringIO()),
        checkpoints=CheckpointManager(run.checkpoints, workflow=workflow.name),
        eval_envs=lambda stream, *, render: make_vector_env(SETTINGS, seed=0, stream=stream, render=render),
    )


def measure(steps: int = 2_000, repeats: int = 15) -> dict[str, float]:
    """The best of many short repeats, interleaved, so that a busy machine has little influence."""
    torch.set_num_threads(1)
    names = {"raw_gymnasium_us": raw_gymnasium, "raw_rl_lab_us": raw_rl_lab, "loop_us": whole_loop}
    figures = {name: float("inf") for name in names}
    for _ in range(repeats):
        for name, function in names.items():
            figures[name] = min(figures[name], function(steps))
    figures["overhead_us"] = figures["loop_us"] - figures["raw_rl_lab_us"]
    figures["overhead_percent"] = 100 * (figures["loop_us"] / figures["raw_rl_lab_us"] - 1)
    figures["overhead_percent_of_gymnasium"] = 100 * (figures["loop_us"] / figures["raw_gymnasium_us"] - 1)
    return figures


def main() -> None:
    for name, value in measure().items():
        print(f"{name:32s} {value:8.1f}")


if __name__ == "__main__":
    main()
