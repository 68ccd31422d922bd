"""How fast TD-MPC2 learns and plans on this machine, on synthetic records.

python benchmarks/tdmpc2_update.py --size 5m --write tdmpc2_5m
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measuring import add_writing, device_name, synchronize, write_record

from rl_lab.data_sources.base import SourceContext
from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.experiment.config import compose, resolve
from rl_lab.experiment.device import resolve_device, resolve_precision, set_threads
from rl_lab.experiment.dims import fill_dims
from rl_lab.experiment.model import build_model
from rl_lab.experiment.parts import build_optimizers
from rl_lab.kernels import registry
from rl_lab.records import FieldSpec, RecordBlock
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.tdmpc2 import TDMPC2

PHASE = PhaseView("benchmark", "online", "replay")
FLAGS = ("is_first", "is_last", "is_terminal")


def make_workflow(size: str, state: int, actions: int, *, precision: str, compile_: bool) -> TDMPC2:
    """The workflow as `rl-lab train +experiment=tdmpc2 components.model.episodic=false` builds it."""
    device = resolve_device("auto")
    set_threads("auto", device)
    config = compose(["+experiment=tdmpc2", f"size={size}", "components.model.episodic=false"])
    observation = {"vector": ObservationSpec("vector", (state,), "float32")}
    fill_dims(config, observation, ActionSpec("continuous", (actions,)), 500)
    resolved = resolve(config)
    model = build_model(resolved, device)
    assert isinstance(model.workflow, TDMPC2)
    autocast_dtype = resolve_precision(precision, device)
    registry.enable(model.modules, device=device, dtype=autocast_dtype or torch.float32)
    context = WorkflowContext(
        config=resolved, device=device, seed=0, observation_spec=model.observation_spec,
        action_spec=model.action_spec, components=model.components, controllers=model.controllers,
        optimizers=build_optimizers(resolved, model.builder, model.modules),
        compile=compile_ and device.type == "cuda", autocast_dtype=autocast_dtype,
    )  # fmt: skip
    model.workflow.initialize(context)
    return model.workflow


def make_replay(workflow: TDMPC2, num_envs: int, records: int = 2_000) -> SequenceReplay:
    """Filled with random records."""
    replay, spec = SequenceReplay(capacity=100_000, online_queue=False), workflow.context
    fields = {f"observation.{key}": FieldSpec(own.shape, own.dtype) for key, own in spec.observation_spec.items()}
    fields |= {"action": FieldSpec(spec.action_spec.shape, "float32"), "reward": FieldSpec((), "float32")}
    fields |= dict.fromkeys(FLAGS, FieldSpec((), "bool"))
    replay.prepare(SourceContext(fields, num_envs, str(spec.device), 0, Path(tempfile.gettempdir())))
    rng = np.random.default_rng(0)
    for _ in range(records // num_envs):
        replay.add(make_block(workflow, rng, num_envs))
    return replay


def make_block(workflow: TDMPC2, rng: np.random.Generator, num_envs: int) -> RecordBlock:
    fields = {
        f"observation.{key}": rng.normal(size=(num_envs, *own.shape)).astype(np.float32)
        for key, own in workflow.context.observation_spec.items()
    }
    fields["action"] = rng.uniform(-1, 1, (num_envs, *workflow.context.action_spec.shape)).astype(np.float32)
    fields["reward"] = rng.normal(size=num_envs).astype(np.float32)
    return RecordBlock(fields | dict.fromkeys(FLAGS, np.zeros(num_envs, bool)))


def timed(name: str, function: Callable[[], object], *, repeats: int) -> dict[str, float]:
    """Seconds until the first call returned, then how many a second (median of single calls)."""
    start = time.perf_counter()
    function()
    synchronize()
    first = time.perf_counter() - start
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        synchronize()
        times.append(time.perf_counter() - start)
    middle = sorted(times)[len(times) // 2]
    return {f"{name}_ms": 1e3 * middle, f"{name}_per_s": 1.0 / middle, f"{name}_first_s": first}


def kernels(name: str, function: Callable[[], object]) -> dict[str, float]:
    """Kernels of one call, their summed time, and the heaviest of them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    print(name)
    for event in sorted(events, key=lambda e: -e.self_device_time_total)[:16]:
        print(f"  {event.self_device_time_total / 1e3:8.3f} ms {event.count:6d}× {event.key[:100]}")
    return {
        f"{name}_kernels": sum(event.count for event in events),
        f"{name}_kernel_ms": sum(event.self_device_time_total for event in events) / 1e3,
    }


def planning(workflow: TDMPC2, num_envs: int) -> Callable[[], object]:
    """A decision for so many environments, with the memory of the one before."""
    rng, memory = np.random.default_rng(0), [workflow.initial_state(num_envs)]
    shapes = {key: own.shape for key, own in workflow.context.observation_spec.items()}
    seen = {key: rng.normal(size=(num_envs, *shape)).astype(np.float32) for key, shape in shapes.items()}

    def plan() -> None:
        _, memory[0] = workflow.act(seen, memory[0], mode="train")

    return plan


def end_to_end(workflow: TDMPC2, num_envs: int, *, seconds: float) -> float:
    """Decisions a second: plan for all environments, store, then an update for each decision. No environments."""
    replay, plan = make_replay(workflow, num_envs), planning(workflow, num_envs)
    rng, spec = np.random.default_rng(1), workflow.batch_spec()

    def cycle() -> None:
        plan()
        replay.add(make_block(workflow, rng, num_envs))
        for _ in range(num_envs):
            workflow.update(replay.sample(spec), phase=PHASE)

    cycle()
    synchronize()
    start, decisions = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        cycle()
        decisions += num_envs
    synchronize()
    rate = decisions / (time.perf_counter() - start)
    replay.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="5m")
    parser.add_argument("--state", type=int, default=24)
    parser.add_argument("--actions", type=int, default=6)
    parser.add_argument("--precision", choices=["float32", "tf32", "bfloat16"], default="tf32")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the end-to-end measurement")
    parser.add_argument("--eager", action="store_true", help="neither compiled nor captured")
    add_writing(parser)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    start = time.perf_counter()
    workflow = make_workflow(
        arguments.size, arguments.state, arguments.actions, precision=arguments.precision, compile_=not arguments.eager
    )
    replay = make_replay(workflow, 1)
    batch = replay.sample(workflow.batch_spec())

    def update() -> None:
        workflow.update(batch, phase=PHASE)

    figures: dict[str, float] = timed("update", update, repeats=arguments.repeats)
    figures |= timed("plan", planning(workflow, 1), repeats=arguments.repeats)
    figures["warmup_s"] = time.perf_counter() - start
    figures |= timed("plan_16_envs", planning(workflow, 16), repeats=arguments.repeats)
    figures["plan_16_envs_over_1"] = figures["plan_16_envs_ms"] / figures["plan_ms"]
    figures["decisions_per_s_16_envs"] = end_to_end(workflow, 16, seconds=arguments.seconds)
    if torch.cuda.is_available():
        figures |= kernels("update", update) | kernels("plan", planning(workflow, 1))
        figures |= kernels("plan_16_envs", planning(workflow, 16))
        figures["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 2**20
    replay.close()
    spec = workflow.batch_spec()
    record = {
        "size": arguments.size, "state": arguments.state, "actions": arguments.actions,
        "batch": [spec.batch_size, spec.sequence_length], "precision": arguments.precision,
        "device": device_name(), "compiled": not arguments.eager, **figures,
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if arguments.write:
        write_record(arguments.write, record, arguments.note)


if __name__ == "__main__":
    main()
