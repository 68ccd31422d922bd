"""Each fast path on and off, alone, on experiments that users run: what a kernel brings to a run.

    python benchmarks/ablation.py --write

For every experiment its loop (decisions, replay, updates) is timed as it is, with `training.kernels=off`, on a GPU with
`training.compile=off`, and without each of the kernels and each of the copies of weights (dreams, plans) that it uses,
one at a time. Every variant is a process of its own: they compile side by side, then take turns, so that other load on
the machine meets all alike; medians over the turns are compared. `share` is the part of the time that a fast path
saves: one below a tenth does not earn its place.

Experiments are those of the machine's device. `--write` puts each into the file as soon as it is measured, beside the
rows of other devices, and passes over what the present commit has measured already: a run that was cut goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from measuring import RESULTS, device_name

from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.kernels.registry import Accelerated
from rl_lab.orchestration.run_directory import RunDirectory, git_commit
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext

AS_IT_IS = "as it is"


class Case(NamedTuple):
    """An experiment, the device that it is meant for, and how often it updates."""

    device: str
    rate: float | None  # updates per env step; None: whenever a rollout is full
    overrides: tuple[str, ...]
    filling: str | None = None  # who acts until updates can begin; None: the workflow


CASES = {
    "demo": Case("cpu", 0.2, ("+experiment=dreamer_v3_cartpole",)),
    "ppo": Case("cpu", None, ("+experiment=ppo_cartpole",)),
    "dqn": Case("cpu", 0.25, ("+experiment=dqn_cartpole",)),
    "tdmpc2": Case("cpu", 1.0, ("+experiment=tdmpc2_cartpole",)),
    "muzero": Case("cpu", 0.5, ("+experiment=muzero_cartpole",)),
    "muzero_game": Case("cpu", 0.25, ("+experiment=muzero_tictactoe",)),
    "muzero_sampled": Case("cpu", 0.5, ("+experiment=muzero_pendulum",)),
    "walker_walk": Case("cuda", 0.5, ("+experiment=dreamer_v3_walker_walk_1m", "environment.num_envs=1"), "random"),
    "dreamer_v2": Case("cuda", 0.2, ("+experiment=dreamer_v2_walker_stand", "environment.num_envs=1"), "random"),
    "dreamer_v1": Case("cuda", 0.2, ("+experiment=dreamer_v1_walker_walk", "environment.num_envs=1"), "random"),
    "atari": Case("cuda", 0.25, ("+experiment=dreamer_v3_boxing", "environment.num_envs=1"), "random"),
    "efficientzero": Case("cuda", 0.25, ("+experiment=efficientzero_pong",)),
    "tdmpc2_walker_walk": Case(
        "cuda", 1.0, ("+experiment=tdmpc2_walker_walk", "environment.num_envs=1"), "random"
    ),
}  # fmt: skip
QUIET = ["logging.console=off", "logging.tensorboard=false", "environment.backend=sync"]


PLANS = "copies in plans"
DREAMS = "deferred dreams"


def copies_of_weights(workflow: Workflow) -> list[str]:
    """The loops that run on copies of the weights in the type of their products."""
    simulators = [getattr(workflow, name, None) for name in ("simulator", "model")]
    plans = workflow.context.planning_dtype is not None and any(hasattr(one, "_copies") for one in simulators)
    return [PLANS] * plans + [DREAMS] * (getattr(workflow, "_dreams", None) is not None)


class Training:
    """The loop of one experiment as `rl-lab train` builds it: decisions in all environments, updates at their rate."""

    def __init__(self, case: Case, overrides: Sequence[str], without: str | None = None) -> None:
        if without == PLANS:
            WorkflowContext.planning_dtype = None  # type: ignore[assignment,method-assign]
        root = tempfile.mkdtemp()
        settings = prepare([*case.overrides, *overrides, *QUIET, f"run_root={root}"])
        experiment = build(settings, RunDirectory.create(root, "speed", 0))
        self.workflow: Workflow = experiment.orchestrator.workflow
        context = experiment.orchestrator.context
        modules = [*context.components.values(), *(part for _, part in context.controllers.items())]
        parts = [part for module in modules for part in module.modules() if isinstance(part, Accelerated)]
        self.kernels = sorted({kernel.name for part in parts for kernel in part.kernels.values()})
        self.kernels += copies_of_weights(self.workflow)
        if without == DREAMS:
            self.workflow._dreams = None  # type: ignore[attr-defined]
        for part in parts:
            part.kernels = {method: kernel for method, kernel in part.kernels.items() if kernel.name != without}
        name, self.source = next(iter(context.data_sources.items()))
        self.device, self.phase = context.device, PhaseView("measure", "online", name)
        self.filling = PhaseView("fill", "online", name, case.filling)
        self.hook, self.spec = getattr(self.workflow, self.workflow.update_hooks[0]), self.workflow.batch_spec()
        self.rate, self.due = case.rate, 0.0

    def warm_up(self) -> None:
        """Fill the replay; the first updates compile and capture."""
        while not self.source.ready(self.spec):
            self.decide(self.filling)
        for decisions in (20, 40):
            self(decisions)

    def decide(self, phase: PhaseView) -> int:
        """One decision in every environment; how many these were."""
        result = self.workflow.collect_step(0, phase=phase)
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
            self.due += (self.rate or 0.0) * self.decide(self.phase)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / decisions


def serve(name: str, overrides: list[str], without: str | None) -> None:
    """A variant's process: the kernels in the first line, the device's kind in the second when it is warm, then the
    seconds of a decision for each number of decisions on standard input."""
    answers, sys.stdout = sys.stdout, sys.stderr
    training = Training(CASES[name], overrides, without)
    print(json.dumps(training.kernels), file=answers, flush=True)
    training.warm_up()
    print(json.dumps(training.device.type), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(training(int(line))), file=answers, flush=True)


class Variant:
    """The parent's end of such a process, which waits while it is not asked."""

    def __init__(
        self, name: str, overrides: Sequence[str] = (), without: str | None = None, launcher: Sequence[str] = ()
    ) -> None:
        command = [sys.executable, *launcher, __file__, "--serve", name, json.dumps([list(overrides), without])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"A variant ended (status {self._process.wait()}): its message stands above.")
        return json.loads(line)

    def __call__(self, decisions: int) -> float:
        assert self._process.stdin is not None
        print(decisions, file=self._process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def ablate(name: str, *, turns: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of one turn of the loop in every variant, and the share of that time that each fast path saves."""
    variants = {AS_IT_IS: Variant(name)}
    if CASES[name].device == "cuda":
        variants["training.compile=off"] = Variant(name, ["training.compile=off"])
        variants["training.kernels=off"] = Variant(name, ["training.kernels=off"])
    kernels = variants[AS_IT_IS].answer()
    if kernels and "training.kernels=off" not in variants:
        variants["training.kernels=off"] = Variant(name, ["training.kernels=off"])
    for off in variants.keys() - {AS_IT_IS}:
        variants[off].answer()
    without = {f"without {kernel}": Variant(name, without=kernel) for kernel in kernels}
    for variant in without.values():
        variant.answer()
    variants |= without
    for variant in variants.values():
        variant.answer()  # it is warm
    counts = {other: max(10, int(seconds / variant(20))) for other, variant in variants.items()}
    rounds = [{other: run(counts[other]) for other, run in variants.items()} for _ in range(turns)]
    for variant in variants.values():
        variant.close()
    times = {other: 1e3 * median(turn[other] for turn in rounds) for other in variants}
    share = {
        other: median(1.0 - turn[AS_IT_IS] / turn[other] for turn in rounds) for other in variants if other != AS_IT_IS
    }
    return {"kernels": kernels, "ms": times, "share": share}


def facts(name: str) -> dict[str, Any]:
    """The case of one experiment and the machine, as the results file names them."""
    case, device = CASES[name], device_name() if CASES[name].device == "cuda" else "cpu"
    return {
        "experiment": name, "device": device, "cores": os.cpu_count(), "torch": torch.__version__,
        "commit": git_commit(), "updates_per_env_step": case.rate, "overrides": list(case.overrides),
    }  # fmt: skip


def recorded(file: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{file}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def record(file: str, row: dict[str, Any]) -> None:
    """Put a row into the file, in place of that of the same experiment and device."""
    others = [known for known in recorded(file) if _key(known) != _key(row)]
    order = list(CASES)
    rows = sorted([*others, row], key=lambda known: order.index(known["experiment"]))
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{file}.json").write_text(json.dumps({"name": file, "rows": rows}, indent=1) + "\n")


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["experiment"], row["device"]


def main() -> None:
    own = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", default=",".join(name for name, case in CASES.items() if case.device == own),
                        help=f"some of {', '.join(CASES)}, with commas")  # fmt: skip
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one variant in one turn")
    parser.add_argument("--write", metavar="NAME", nargs="?", const="ablation", help="into results/speed/NAME.json")
    parser.add_argument("--again", action="store_true", help="measure what the file has of this commit, too")
    parser.add_argument("--serve", nargs=2, metavar=("EXPERIMENT", "VARIANT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve[0], *json.loads(arguments.serve[1]))
        return
    for name in arguments.experiments.split(","):
        given = facts(name)
        done = [row for row in recorded(arguments.write or "") if row["commit"] == given["commit"]]
        if not arguments.again and _key(given) in map(_key, done):
            print(f"{name}: measured already", flush=True)
            continue
        start = time.perf_counter()
        row = given | ablate(name, turns=arguments.turns, seconds=arguments.seconds)
        print(f"{json.dumps(row, indent=1)}\n{name}: {time.perf_counter() - start:.0f} s", flush=True)
        if arguments.write:
            record(arguments.write, row)


if __name__ == "__main__":
    main()
