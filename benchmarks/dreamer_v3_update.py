"""How long one DreamerV3 update takes on this machine, on synthetic records (replay excluded), and one step of acting.

python benchmarks/dreamer_v3_update.py --size 12m --observation image --actions 6 --write dreamer_v3_12m

On a GPU it also counts kernels and launches; with `--stages` it prints tables of where the update spends its
time, and where the warm-up does.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from contextlib import ExitStack

import numpy as np
import torch
from dreamer_v3_stages import first_calls, kernel_seconds, print_stages, print_warmup
from measuring import add_writing, device_name, synchronize, write_record

from rl_lab.components.world_models.base import DETER, STOCH
from rl_lab.experiment.config import compose, resolve
from rl_lab.experiment.device import resolve_device, resolve_precision
from rl_lab.experiment.dims import fill_dims
from rl_lab.experiment.model import build_model
from rl_lab.experiment.parts import build_optimizers
from rl_lab.kernels import registry
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.dreamer_v3 import DreamerV3

OBSERVATIONS = {
    "image": {"image": ObservationSpec("image", (64, 64, 3), "uint8")},
    "vector": {"vector": ObservationSpec("vector", (24,), "float32")},
}
PHASE = PhaseView("benchmark", "online")


def make_workflow(size: str, observation: str, actions: int, *, compile_: bool) -> DreamerV3:
    """The workflow as `rl-lab train +experiment=dreamer_v3` builds it."""
    device = resolve_device("auto")
    config = compose(["+experiment=dreamer_v3", f"size={size}"])
    fill_dims(config, OBSERVATIONS[observation], ActionSpec("discrete", (1,), (actions,)))
    resolved = resolve(config)
    model = build_model(resolved, device)
    assert isinstance(model.workflow, DreamerV3)
    autocast_dtype = resolve_precision("auto", device)
    registry.enable(model.modules, device=device, dtype=autocast_dtype or torch.float32)
    context = WorkflowContext(
        config=resolved, device=device, seed=0, observation_spec=model.observation_spec,
        action_spec=model.action_spec, components=model.components, controllers=model.controllers,
        optimizers=build_optimizers(resolved, model.builder, model.modules),
        compile=compile_, autocast_dtype=autocast_dtype,
    )  # fmt: skip
    model.workflow.initialize(context)
    return model.workflow


def make_batch(workflow: DreamerV3) -> SequenceBatch:
    """Random records in the workflow's batch shape."""
    spec, rssm, device = workflow.batch_spec(), workflow.rssm, workflow.context.device
    lead = (spec.batch_size, spec.window)
    observation = {
        key: torch.randint(0, 256, (*lead, *own.shape), dtype=torch.uint8, device=device)
        if own.kind == "image"
        else torch.randn(*lead, *own.shape, device=device)
        for key, own in workflow.context.observation_spec.items()
    }
    classes = workflow.context.action_spec.classes[0]
    ends = torch.rand(lead, device=device) < 0.02
    return SequenceBatch(
        observation=observation,
        action=torch.randint(0, classes, (*lead, 1), dtype=torch.int32, device=device),
        reward=torch.randn(lead, device=device),
        is_first=torch.rand(lead, device=device) < 0.02, is_last=ends, is_terminal=ends,
        extras={
            DETER: torch.rand(*lead, rssm.deter, device=device).half(),
            STOCH: torch.randint(0, rssm.classes, (*lead, rssm.groups), dtype=torch.uint8, device=device),
        },
    )  # fmt: skip


def warm_up(workflow: DreamerV3, batch: SequenceBatch) -> float:
    """Seconds that the first update takes."""
    start = time.perf_counter()
    workflow.update(batch, phase=PHASE)
    synchronize()
    return time.perf_counter() - start


def measure(workflow: DreamerV3, batch: SequenceBatch, *, repeats: int) -> dict[str, float]:
    """The median of single updates, and the fastest."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        workflow.update(batch, phase=PHASE)
        synchronize()
        times.append(time.perf_counter() - start)
    times.sort()
    return {"ms_per_update": 1e3 * times[len(times) // 2], "fastest_ms": 1e3 * times[0]}


LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


def kernels(workflow: DreamerV3, batch: SequenceBatch, *, show: int) -> dict[str, float]:
    """Kernels that one update runs, their summed time, how long at least one of them ran (branches of the graph run
    side by side), and what the host launches; the heaviest kernels are printed."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        workflow.update(batch, phase=PHASE)
        synchronize()
    averages = profiler.key_averages()
    events = [event for event in averages if event.device_type == torch.autograd.DeviceType.CUDA]
    for event in sorted(events, key=lambda e: -e.self_device_time_total)[:show]:
        print(f"  {event.self_device_time_total / 1e3:8.3f} ms {event.count:6d}× {event.key[:100]}")
    return {
        "kernels_per_update": sum(event.count for event in events),
        "launches_per_update": sum(event.count for event in averages if event.key.startswith(LAUNCHES)),
        "kernel_ms": sum(event.self_device_time_total for event in events) / 1e3,
        "busy_ms": covered(
            (event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        / 1e3,
    }


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """How much of a line they cover together."""
    total, end = 0.0, -math.inf
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def act_ms(workflow: DreamerV3, envs: int, *, repeats: int = 200) -> float:
    """From observations on the host to actions on the host."""
    rng = np.random.default_rng(0)
    observation = {
        key: rng.integers(0, 256, (envs, *spec.shape), dtype=np.uint8)
        if spec.kind == "image"
        else rng.standard_normal((envs, *spec.shape), dtype=np.float32)
        for key, spec in workflow.context.observation_spec.items()
    }
    state, times = workflow.initial_state(envs), []
    for _ in range(repeats):
        start = time.perf_counter()
        _, state = workflow.act(observation, state, mode="train")
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="12m")
    parser.add_argument("--observation", choices=list(OBSERVATIONS), default="image")
    parser.add_argument("--actions", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--eager", action="store_true", help="neither compiled nor captured")
    parser.add_argument("--stages", action="store_true", help="print where update and warm-up spend their time (GPU)")
    add_writing(parser)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    figures: dict[str, float | str] = {}
    with kernel_seconds() as compiled, ExitStack() as stack:
        start = time.perf_counter()
        workflow = make_workflow(arguments.size, arguments.observation, arguments.actions, compile_=not arguments.eager)
        batch = make_batch(workflow)
        figures["build_s"] = time.perf_counter() - start
        calls = stack.enter_context(first_calls(workflow)) if arguments.stages else {}
        first_update = warm_up(workflow, batch)
        figures["warmup_s"] = float(figures["build_s"]) + first_update
    if arguments.stages:
        print_warmup(first_update, calls, compiled)
    figures |= measure(workflow, batch, repeats=arguments.repeats)
    if torch.cuda.is_available():
        figures |= kernels(workflow, batch, show=12 if arguments.stages else 0)
        figures["gpu_busy_share"] = float(figures["busy_ms"]) / float(figures["ms_per_update"])
        figures["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 2**20
    figures |= {f"act_ms_{envs}": act_ms(workflow, envs) for envs in (1, 16)}
    if arguments.stages:
        print_stages(workflow, batch)
    spec = workflow.batch_spec()
    record = {
        "size": arguments.size, "observation": arguments.observation,
        "actions": arguments.actions, "batch": [spec.batch_size, spec.sequence_length], "horizon": workflow.horizon,
        "device": device_name(), "compiled": not arguments.eager, **figures,
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if arguments.write:
        write_record(arguments.write, record, arguments.note)


if __name__ == "__main__":
    main()
