"""DreamerV3's `tiny` preset on the CPU: updates/s of RL Lab against sheeprl at the same sizes, replay excluded.

sheeprl lives in a virtual environment of its own:

    python3 -m venv sheeprl && sheeprl/bin/pip install torch==2.13.0 sheeprl==0.8.4
    python benchmarks/dreamer_v3_cpu.py --sheeprl sheeprl/bin/python --write

It has two DreamerV3s, and both are measured: `dreamer_v3`, the version of 2023, and `dreamer_v3_5`, the current form of
the algorithm, whose parameter count at these sizes is the same as ours. Each runs in a process of its own and they take
turns, one at a time, so that other load on the machine meets all alike; the medians over the turns are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import write_record

from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.dreamer_v3 import DreamerV3

PEERS = ("dreamer_v3", "dreamer_v3_5")
PEER_SCRIPT = Path(__file__).with_name("sheeprl_updates.py")
RESULT = "dreamer_v3_cpu"
Timing = tuple[float, float]  # seconds of wall and of CPU time


class OurUpdates:
    """The workflow as `rl-lab train +experiment=dreamer_v3_cartpole` builds it, on a batch of its own replay."""

    def __init__(self, batch: int, length: int, threads: int) -> None:
        root = tempfile.mkdtemp()
        overrides = ["+experiment=dreamer_v3_cartpole", "experiment.device=cpu", f"run_root={root}"]
        overrides += ["logging.console=off", "logging.tensorboard=false", f"training.threads={threads}"]
        overrides += [f"workflow.batch_size={batch}", f"workflow.sequence_length={length}"]
        experiment = build(prepare(overrides), RunDirectory.create(root, "speed", 0))
        context, workflow = experiment.orchestrator.context, experiment.orchestrator.workflow
        assert isinstance(workflow, DreamerV3)
        self.workflow, self.parameters = workflow, sum(experiment.parameters.values())
        self.preset = context.config["presets"]["tiny"]
        replay, filling = context.data_sources["replay"], PhaseView("fill", "online", "replay", "random")
        while not replay.ready(workflow.batch_spec()):
            result = workflow.collect_step(0, phase=filling)
            assert result is not None
            for block in result.blocks:
                replay.add(block)
        self.batch = replay.sample(workflow.batch_spec())
        self.phase = PhaseView("measure", "online")  # without a data source: no latents are written back
        gc.freeze()  # as the orchestrator does before its loop

    def sizes(self) -> dict[str, int]:
        """The sizes of model and batch, from which sheeprl builds the same."""
        workflow, spec = self.workflow, self.workflow.batch_spec()
        names = ("deter", "hidden", "groups", "classes", "blocks", "units", "bins")
        return {
            "batch": spec.batch_size, "length": spec.sequence_length, "horizon": workflow.horizon,
            "layers": len(workflow.critic.head.trunk), "head_layers": len(workflow.reward.head.trunk),
            **{name: self.preset[name] for name in names},
        }  # fmt: skip

    def __call__(self, updates: int) -> Timing:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(updates):
            self.workflow.update(self.batch, phase=self.phase)
        return time.perf_counter() - wall, time.process_time() - cpu


class PeerUpdates:
    """sheeprl in a process of its own, which waits while it is not asked."""

    def __init__(self, python: str, algorithm: str, sizes: dict[str, int], threads: int) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [python, str(PEER_SCRIPT), algorithm, json.dumps(sizes), str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=tempfile.mkdtemp()
        )
        self.facts: dict[str, Any] = json.loads(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"sheeprl's process ended (status {self._process.wait()}): its message stands above.")
        return line

    def __call__(self, updates: int) -> Timing:
        assert self._process.stdin is not None
        print(updates, file=self._process.stdin, flush=True)
        wall, cpu = json.loads(self._answer())
        return wall, cpu

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(python: str, *, batch: int, length: int, threads: int, turns: int, updates: int) -> dict[str, Any]:
    """Everybody's median milliseconds, and how many times as fast as each peer we are."""
    ours = OurUpdates(batch, length, threads)
    peers = {name: PeerUpdates(python, name, ours.sizes(), threads) for name in PEERS}
    sides: dict[str, Callable[[int], Timing]] = {"rl_lab": ours, **peers}
    for side in sides.values():
        side(5)
    rounds = [{name: side(updates) for name, side in sides.items()} for _ in range(turns)]
    for peer in peers.values():
        peer.close()
    figures: dict[str, Any] = {"sizes": ours.sizes(), "threads": threads}
    parameters = {"rl_lab": ours.parameters} | {name: peer.facts["parameters"] for name, peer in peers.items()}
    for name in sides:
        wall, cpu = (median(turn[name][clock] for turn in rounds) / updates for clock in (0, 1))
        figures[name] = {"parameters": parameters[name], "updates_per_s": 1 / wall}
        figures[name] |= {"ms": 1e3 * wall, "cpu_ms": 1e3 * cpu}
    for name, peer in peers.items():
        figures[name] |= {"sheeprl": peer.facts["version"], "torch": peer.facts["torch"]}
        figures[f"times_as_fast_as_{name}"] = median(turn[name][0] / turn["rl_lab"][0] for turn in rounds)
        figures[f"times_as_fast_as_{name}_cpu_time"] = median(turn[name][1] / turn["rl_lab"][1] for turn in rounds)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sheeprl", metavar="PYTHON", default=os.environ.get("SHEEPRL_PYTHON"),
                        help="the interpreter of sheeprl's environment (or the variable SHEEPRL_PYTHON)")  # fmt: skip
    parser.add_argument("--shapes", default="8x16,16x64", help="batch × length, several with commas")
    parser.add_argument("--threads", default="1,2", help="threads of torch, the same for all sides")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--updates", type=int, default=7, help="of one turn")
    parser.add_argument(
        "--write", metavar="NAME", nargs="?", const=RESULT, help=f"write results/speed/NAME.json ({RESULT})"
    )
    arguments = parser.parse_args()
    if not arguments.sheeprl:
        sys.exit(f"Where is sheeprl? Give its interpreter with --sheeprl.\n{__doc__}")
    rows = []
    for shape in arguments.shapes.split(","):
        batch, length = map(int, shape.split("x"))
        for threads in map(int, arguments.threads.split(",")):
            row = compare(
                arguments.sheeprl, batch=batch, length=length, threads=threads, turns=arguments.turns,
                updates=arguments.updates,
            )  # fmt: skip
            print(json.dumps(row, indent=1), flush=True)
            rows.append(row)
    record = {
        "size": "tiny", "observation": "vector", "actions": 2, "device": "cpu", "cores": os.cpu_count(),
        "vectors": torch.backends.cpu.get_cpu_capability(), "rows": rows,
    }  # fmt: skip
    if arguments.write:
        write_record(arguments.write, record)


if __name__ == "__main__":
    main()
