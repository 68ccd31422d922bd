"""Simulations per second of the tree search on one CPU thread, beside mctx on the same network.

CPU time is measured, so that other work on the machine counts little.
32 roots × 50 simulations, 4 actions, hidden layers of 128: the plain tree, the compiled one, and the whole search
compiled. mctx runs in an environment of its own (--mctx PYTHON), in turns with ours, and computes the
same function (benchmarks/mctx_speed.py).
Run it: python benchmarks/mcts.py [--mctx /tmp/mctx/bin/python] [--rounds 15] [--write]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import write_record

from rl_lab.components.muzero.dynamics import Dynamics
from rl_lab.components.muzero.model import MuZeroModel
from rl_lab.components.muzero.prediction import PolicyValueNetwork
from rl_lab.components.muzero.representation import VectorRepresentation
from rl_lab.components.planners.mcts import MCTS
from rl_lab.kernels.registry import enable
from rl_lab.simulation.muzero import MuZeroSimulator
from rl_lab.specs import ActionSpec, ObservationSpec

ROOTS, SIMULATIONS, ACTIONS, HIDDEN, BINS = 32, 50, 4, 128, 21
ACTION = ActionSpec("discrete", (1,), (ACTIONS,))
MCTX = Path(__file__).with_name("mctx_speed.py")
PATHS = {"plain": (), "compiled tree": ("_walker",), "compiled search": ("_walker", "_grow")}  # kernels of the planner


def make_model() -> MuZeroModel:
    torch.manual_seed(0)
    observation = {"vector": ObservationSpec("vector", (8,), "float32")}
    sizes = {"latent_shape": (HIDDEN,), "units": HIDDEN, "head_units": 32, "bins": BINS, "limit": 10.0}
    return MuZeroModel(
        representation=VectorRepresentation(observation=observation, latent_size=HIDDEN, units=HIDDEN),
        dynamics=Dynamics(action_size=ACTIONS, **sizes),
        prediction=PolicyValueNetwork(action=ACTION, **sizes),
    )


def ours(rule: str, fast: tuple[str, ...]) -> Callable[[], object]:
    model, planner = make_model(), MCTS(action=ACTION, simulations=SIMULATIONS, rule=rule)
    planner.attach(MuZeroSimulator(model=model, discount=0.997))
    enable({"planner": planner}, device=torch.device("cpu"), mode="auto")
    planner.kernels = {method: kernel for method, kernel in planner.kernels.items() if method in fast}
    with torch.no_grad():
        root = model.initial({"vector": torch.randn(ROOTS, 8)})
    return lambda: planner.search(root, explore=True)


class Mctx:
    """A process that searches when it is told to and says how long it took."""

    def __init__(self, python: str) -> None:
        arguments = [python, str(MCTX), *map(str, (ROOTS, SIMULATIONS, ACTIONS, HIDDEN, BINS))]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, rule: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(rule + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mctx", help="the Python of an environment with mctx")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="results/speed/mcts.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    searches = {(rule, path): ours(rule, fast) for rule in ("puct", "gumbel") for path, fast in PATHS.items()}
    other = Mctx(asked.mctx) if asked.mctx else None
    times: dict[tuple[str, str], list[float]] = {}
    for round_ in range(asked.rounds + 2):
        for key, search in searches.items():
            start = time.process_time()
            search()
            times.setdefault(key, []).append(time.process_time() - start)
        for rule in ("puct", "gumbel") if other else ():
            times.setdefault((rule, "mctx"), []).append(other.seconds(rule))
        if round_ < 2:  # compiling
            times.clear()
    entries = [
        {
            "rule": rule, "path": path, "simulations_per_s": round(ROOTS * SIMULATIONS / min(seconds)),
            "median_simulations_per_s": round(ROOTS * SIMULATIONS / sorted(seconds)[len(seconds) // 2]),
        }
        for (rule, path), seconds in times.items()
    ]  # fmt: skip
    for entry in entries:
        sys.stdout.write(json.dumps(entry) + "\n")
    if asked.write:
        setting = {"roots": ROOTS, "simulations": SIMULATIONS, "actions": ACTIONS, "hidden": HIDDEN, "bins": BINS}
        record = {"machine": platform.processor() or platform.machine(), "threads": 1, "rounds": asked.rounds}
        write_record("mcts", {**record, "setting": setting, "entries": entries})


if __name__ == "__main__":
    main()
