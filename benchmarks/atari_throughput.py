"""DreamerV3 on an Atari game from end to end: env steps per second with 1 and 8 environments, with and without overlap.

Everything that `rl-lab train` does is in it (environments, replay, write-back, updates, metrics) but evaluations and
checkpoints. The clock starts when the first updates, which compile and capture, are over.

    python benchmarks/atari_throughput.py --write
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from measuring import device_name, synchronize, write_record

from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.run_directory import RunDirectory

RESULT = "dreamer_v3_atari"
NEVER = 1_000_000_000
WARMUP_UPDATES = 10


class Stopwatch:
    """Host seconds by kind of work, from the moment that the warm-up is over; after `steps` env steps the run ends."""

    def __init__(self, orchestrator: Orchestrator, steps: int) -> None:
        self.orchestrator, self.steps, self.seconds = orchestrator, steps, Counter[str]()
        self.began, self.env_steps, self.updates = 0.0, 0, 0
        workflow, hooks = orchestrator.workflow, orchestrator._hooks
        hooks["update"] = self._timed(hooks["update"], "update")
        for owner, name in ((workflow, "act"), (orchestrator.context.train_envs, "receive")):
            setattr(owner, name, self._timed(getattr(owner, name), name))
        for source in orchestrator.context.data_sources.values():
            source.sample = self._timed(source.sample, "sample")  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **options)
            if self.began:
                self.seconds[name] += time.perf_counter() - start
                if self.orchestrator.scheduler.env_steps >= self.env_steps + self.steps:
                    self.orchestrator.signal.received = signal.SIGTERM
            elif self.orchestrator.scheduler.updates >= WARMUP_UPDATES and name == "update":
                self._start()
            return result

        return timed

    def _start(self) -> None:
        synchronize()
        scheduler = self.orchestrator.scheduler
        self.env_steps, self.updates = scheduler.env_steps, scheduler.updates
        self.began = time.perf_counter()

    def figures(self) -> dict[str, Any]:
        synchronize()
        wall, scheduler = time.perf_counter() - self.began, self.orchestrator.scheduler
        env_steps, updates = scheduler.env_steps - self.env_steps, scheduler.updates - self.updates
        return {
            "env_steps": env_steps, "updates": updates, "wall_s": wall, "env_steps_per_s": env_steps / wall,
            "updates_per_s": updates / wall, "host_share": {k: v / wall for k, v in self.seconds.most_common()},
        }  # fmt: skip


def measure(arguments: argparse.Namespace, num_envs: int, *, overlap: bool) -> dict[str, Any]:
    """One run, stopped when enough was measured."""
    with tempfile.TemporaryDirectory() as root:
        overrides = [
            "+experiment=dreamer_v3", "environment=atari", f"environment.id={arguments.game}", f"size={arguments.size}",
            f"environment.num_envs={num_envs}", f"workflow.train_ratio={arguments.ratio}",
            f"training.total_timesteps={NEVER}", "data_sources.replay.capacity=20_000",
            f"training.overlap={str(overlap).lower()}", f"run_root={root}",
            f"evaluation.every={NEVER}", f"checkpoint.every={NEVER}", "logging.console=off",
            "logging.tensorboard=false", *arguments.overrides,
        ]  # fmt: skip
        experiment = build(prepare(overrides), RunDirectory.create(root, "speed", 0))
        orchestrator = experiment.orchestrator
        watch = Stopwatch(orchestrator, arguments.steps)
        try:
            orchestrator._loop()  # the loop alone: no checkpoint, final evaluation or report
            figures = watch.figures()
        finally:
            orchestrator.close()
        assert orchestrator.context.train_envs is not None
        return {
            "num_envs": num_envs, "overlap": overlap, "backend": orchestrator.context.train_envs.backend, **figures,
            "peak_gpu_mb": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="ALE/Boxing-v5")
    parser.add_argument("--size", default="12m")
    parser.add_argument("--ratio", type=int, default=256, help="replayed records per env step")
    parser.add_argument("--envs", default="1,8", help="numbers of environments")
    parser.add_argument("--steps", type=int, default=2000, help="env steps that are measured in each run")
    parser.add_argument("--write", action="store_true", help=f"write results/speed/{RESULT}.json")
    parser.add_argument("overrides", nargs="*", help="further settings, as for rl-lab train")
    arguments = parser.parse_args()
    rows = []
    for num_envs in map(int, arguments.envs.split(",")):
        for overlap in (False, True):
            rows.append(measure(arguments, num_envs, overlap=overlap))
            print(json.dumps(rows[-1], indent=1), flush=True)
    record = {
        "game": arguments.game, "size": arguments.size, "train_ratio": arguments.ratio,
        "overrides": arguments.overrides, "device": device_name(), "cores": os.cpu_count(), "rows": rows,
    }  # fmt: skip
    if arguments.write:
        write_record(RESULT, record)


if __name__ == "__main__":
    main()
