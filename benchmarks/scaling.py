"""What a step, an inference, an update, an all-reduce, a broadcast and a batch cost: the measurements behind the model
of scale in docs/scaling.md. DreamerV3 (1m) on walker-walk's numbers, on the CPU, one thread; Ray on this machine.

Run it: python benchmarks/scaling.py [--write scaling]
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from measuring import add_writing, device_name, write_record

from rl_lab import ranks, ray_cluster
from rl_lab.environments import make_vector_env
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.orchestration.run_directory import RunDirectory

ENVIRONMENT, EXPERIMENT = "dm_control/walker-walk-v0", "dreamer_v3"
ENVS, BATCH = 16, 16
OVERRIDES = [
    *(f"+experiment={EXPERIMENT}", f"environment.id={ENVIRONMENT}", "size=1m", "experiment.device=cpu"),
    *(f"environment.num_envs={ENVS}", "environment.backend=sync", "logging.console=off", "logging.tensorboard=false"),
]


def microseconds(work: Callable[[], object], repeats: int) -> float:
    """The shortest time of a call, after two that are not counted: other work on the machine only adds."""
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[2:]) * 1e6


def line(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """Fixed cost and slope of the straight line through the points; neither below 0."""
    slope, fixed = np.polyfit(sizes, times, 1)
    return max(0.0, float(fixed)), max(0.0, float(slope))


def of_learner() -> dict[str, float]:
    """Inference for 1 to 16 environments, updates of 4 to 16 sequences, and a batch out of the replay."""
    with TemporaryDirectory() as folder:
        prepared = prepare([*OVERRIDES, f"workflow.batch_size={BATCH}", f"run_root={folder}"])
        orchestrator = build(prepared, RunDirectory.create(Path(folder), "benchmark", 0)).orchestrator
        workflow, context = orchestrator.workflow, orchestrator.context
        phase = orchestrator._views[orchestrator.scheduler.current_phase().name]
        source = context.data_sources["replay"]
        for step in range(120):
            result = workflow.collect_step(step * ENVS, phase=phase)
            assert result is not None
            orchestrator._take_in(result, source)
        counts, acting = [1, 4, 16], []
        for count in counts:
            seen = {key: value[:count] for key, value in workflow._current.observation.items()}
            state = workflow.initial_state(count)
            acting.append(microseconds(lambda seen=seen, state=state: workflow.act(seen, state, mode="train"), 100))
        act_fixed, act_each = line(counts, acting)
        spec = workflow.batch_spec()
        sizes, updates = [4, 8, 16], []
        for size in sizes:
            batch = source.sample(spec._replace(batch_size=size))
            updates.append(microseconds(lambda batch=batch: workflow.update(batch, phase=phase), 6))
        update_fixed, update_each = line(sizes, updates)
        sample = microseconds(lambda: source.sample(spec), 30)
        count = sum(value.numel() for module in orchestrator.modules.values() for value in module.parameters())
        orchestrator.close()
    return {
        "envs": ENVS, "batch": BATCH, "gradient_mb": count * 4 / 2**20,
        "act_fixed_us": act_fixed, "act_per_env_us": act_each, "update_fixed_us": update_fixed,
        "update_per_row_us": update_each, "sample_us": sample, "updates_per_env_step": workflow.updates_per_env_step,
    }  # fmt: skip


def of_environments() -> dict[str, float]:
    """A step in this process; an order to 1 and 2 Ray actors beyond what they compute."""
    costs = {}
    for kind, workers in (("sync", 1), ("ray", 1), ("ray", 2)):
        settings = EnvironmentSettings(id=ENVIRONMENT, num_envs=ENVS, backend=kind, workers=workers)
        envs = make_vector_env(settings, seed=0)
        action = np.zeros((ENVS, *envs.action_spec.shape), np.float32)
        envs.reset()
        costs[kind, workers] = microseconds(lambda envs=envs, action=action: envs.step(action), 150)
        envs.close()
    step = costs["sync", 1] / ENVS
    fixed, each = line([1, 2], [costs["ray", count] - ENVS / count * step for count in (1, 2)])
    return {"env_step_us": step, "message_fixed_us": fixed, "message_per_actor_us": each}


def of_broadcast() -> dict[str, float]:
    """Weights into Ray's object store and out of it again."""
    ray = ray_cluster.connect(None, place="benchmark")
    sizes, times = [1, 8, 32], []
    for size in sizes:
        weights = np.zeros(size << 18, np.float32)
        times.append(microseconds(lambda weights=weights: ray.get(ray.put(weights)).sum(), 15))
    return {"broadcast_us_per_mb": line(sizes, times)[1]}


def of_all_reduce() -> dict[str, float]:
    """Between two processes of this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    command = [sys.executable, __file__, "--rank"]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    fixed, each = map(float, processes[0].communicate()[0].split())
    processes[1].wait()
    return {"all_reduce_fixed_us": fixed, "all_reduce_us_per_mb": each}


def as_rank() -> None:
    torch.set_num_threads(1)
    ranks.join()
    sizes, times = [1, 8, 32], []
    for size in sizes:
        gradient = torch.zeros(size << 18)
        times.append(microseconds(lambda gradient=gradient: ranks.average_(gradient), 20))
    small = torch.zeros(64)
    fixed = microseconds(lambda: ranks.average_(small), 200)
    if ranks.is_first():
        print(fixed, line(sizes, times)[1])
    ranks.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_writing(parser)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        as_rank()
        return
    torch.set_num_threads(1)
    costs: dict[str, Any] = of_learner() | of_environments() | of_broadcast() | of_all_reduce()
    for name, value in costs.items():
        print(f"{name:24} {value:12.3f}")
    if options.write:
        record = {
            "experiment": f"{EXPERIMENT} 1m", "environment": ENVIRONMENT, "device": f"{device_name()}, one thread",
            "cores": os.cpu_count(), "load_average": os.getloadavg()[0], "costs": costs,
        }  # fmt: skip
        write_record(options.write, record, options.note)


if __name__ == "__main__":
    main()
