"""Each fast path on and off, alone, on experiments that users run: what a kernel brings to a run.

    python benchmarks/ablation.py --write

For every experiment its loop (decisions, replay, updates) is timed as it is, with `training.kernels=off`, on a GPU with
`training.compile=off`, and without each of the kernels that it uses, one at a time. The variants take turns, so that
other load on the machine meets all alike; medians over the turns are compared. `share` is the part of the time that a
fast path saves: one below a tenth does not earn its place.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from measuring import device_name, write_record

from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.kernels.registry import Accelerated
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import PhaseView

EXPERIMENTS: dict[str, tuple[float | None, list[str]]] = {  # updates per env step; None: whenever a rollout is full
    "demo": (0.2, ["+experiment=dreamer_v3_cartpole"]),
    "walker_walk": (0.5, ["+experiment=dreamer_v3_walker_walk_1m", "environment.num_envs=1"]),
    "atari": (0.25, ["+experiment=dreamer_v3_boxing", "environment.num_envs=1"]),
    "tdmpc2": (1.0, ["+experiment=tdmpc2_cartpole"]),
    "ppo": (None, ["+experiment=ppo_cartpole"]),
    "dqn": (0.25, ["+experiment=dqn_cartpole"]),
    "muzero": (0.5, ["+experiment=muzero_cartpole"]),
    "muzero_sampled": (0.5, ["+experiment=muzero_pendulum"]),
}
QUIET = ["logging.console=off", "logging.tensorboard=false", "environment.backend=sync"]


class Training:
    """The loop of one experiment as `rl-lab train` builds it: decisions in all environments, updates at their rate."""

    def __init__(self, rate: float | None, overrides: Sequence[str], without: str | None = None) -> None:
        root = tempfile.mkdtemp()
        experiment = build(prepare([*overrides, *QUIET, f"run_root={root}"]), RunDirectory.create(root, "speed", 0))
        self.workflow: Workflow = experiment.orchestrator.workflow
        context = experiment.orchestrator.context
        modules = [*context.components.values(), *(part for _, part in context.controllers.items())]
        parts = [part for module in modules for part in module.modules() if isinstance(part, Accelerated)]
        self.kernels = sorted({kernel.name for part in parts for kernel in part.kernels.values()})
        for part in parts:
            part.kernels = {method: kernel for method, kernel in part.kernels.items() if kernel.name != without}
        name, self.source = next(iter(context.data_sources.items()))
        self.device, self.phase = context.device, PhaseView("measure", "online", name)
        self.hook, self.spec = getattr(self.workflow, self.workflow.update_hooks[0]), self.workflow.batch_spec()
        self.rate, self.due = rate, 0.0
        while not self.source.ready(self.spec):
            self.decide()

    def decide(self) -> int:
        """One decision in every environment; how many these were."""
        result = self.workflow.collect_step(0, phase=self.phase)
        assert result is not None
        for block in result.blocks:
            self.source.add(block)
        if result.following is not None:
            self.source.follow(result.following)
        return result.env_steps

    def __call__(self, decisions: int) -> float:
        """Seconds of one decision in every environment with the updates that fall to it."""
        start = time.perf_counter()
        for _ in range(decisions):
            while self.due >= 1.0 if self.rate else self.source.ready(self.spec):
                self.hook(self.source.sample(self.spec), phase=self.phase)
                self.due -= 1.0
            self.due += (self.rate or 0.0) * self.decide()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / decisions


def ablate(rate: float | None, overrides: list[str], *, turns: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of one turn of the loop in every variant, and the share of that time that each fast path saves."""
    as_it_is = Training(rate, overrides)
    variants: dict[str, Callable[[int], float]] = {"as it is": as_it_is}
    if as_it_is.kernels:
        variants["training.kernels=off"] = Training(rate, [*overrides, "training.kernels=off"])
    if as_it_is.device.type == "cuda":
        variants["training.compile=off"] = Training(rate, [*overrides, "training.compile=off"])
    variants |= {f"without {name}": Training(rate, overrides, name) for name in as_it_is.kernels}
    once = {name: (run(20), run(40))[1] for name, run in variants.items()}  # the first calls compile and capture
    counts = {name: max(10, int(seconds / length)) for name, length in once.items()}
    rounds = [{name: run(counts[name]) for name, run in variants.items()} for _ in range(turns)]
    times = {name: 1e3 * median(turn[name] for turn in rounds) for name in variants}
    share = {
        name: median(1.0 - turn["as it is"] / turn[name] for turn in rounds) for name in variants if name != "as it is"
    }
    return {"kernels": as_it_is.kernels, "ms": times, "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", default=",".join(EXPERIMENTS), help="some of these, with commas")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one variant in one turn")
    parser.add_argument("--write", metavar="NAME", nargs="?", const="ablation", help="write results/speed/NAME.json")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.experiments.split(","):
        rate, overrides = EXPERIMENTS[name]
        row = {"experiment": name, "updates_per_env_step": rate, "overrides": overrides}
        row |= ablate(rate, overrides, turns=arguments.turns, seconds=arguments.seconds)
        print(json.dumps(row, indent=1), flush=True)
        rows.append(row)
    if arguments.write:
        write_record(arguments.write, {"device": device_name(), "cores": os.cpu_count(), "rows": rows})


if __name__ == "__main__":
    main()
