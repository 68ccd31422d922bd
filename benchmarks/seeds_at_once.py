"""How much longer several seeds take at once on one GPU than one alone, with NVIDIA's MPS and without.

    python benchmarks/seeds_at_once.py --write

For each size the loop of DreamerV3 on walker-walk (decisions, replay, updates; see ablation.py) runs in 1, 2, 4 and 8
processes. All warm up, then all start at the same moment and work for some seconds. `slowdown` is the time that a seed
takes beside the others over the time that it takes alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from statistics import fmean
from typing import Any

from ablation import Case, Training
from measuring import device_name, write_record

from rl_lab.experiment.gpu_sharing import shared_gpu

COUNTS = (1, 2, 4, 8)
SIZES = ("1m", "12m")


def case(size: str) -> Case:
    """One update for two env steps, so that the updates are nearly all of the work."""
    overrides = ("+experiment=dreamer_v3", "environment.id=dm_control/walker-walk-v0", "environment.num_envs=1")
    return Case("cuda", 0.5, (*overrides, f"size={size}"), filling="random")


def serve(size: str, overrides: list[str]) -> None:
    """A seed's process: a line when it is warm; then, for a line with seconds, the decisions per second."""
    answers, sys.stdout = sys.stdout, sys.stderr
    training = Training(case(size), overrides)
    training.warm_up()
    print("warm", file=answers, flush=True)
    seconds, begin, decisions = float(sys.stdin.readline()), time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        training(10)
        decisions += 10
    print(decisions / (time.perf_counter() - begin), file=answers, flush=True)


def rates(size: str, seeds: int, *, seconds: float, overrides: list[str]) -> list[float]:
    """Decisions per second of each of so many seeds at once."""
    processes = []
    for seed in range(seeds):
        given = json.dumps([*overrides, f"experiment.seed={seed}"])
        command = [sys.executable, __file__, "--serve", size, given]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(subprocess.Popen(command, text=True, env=environment, **pipes))  # type: ignore[call-overload]
    for process in processes:
        if process.stdout.readline().strip() != "warm":
            raise SystemExit(f"A seed ended (status {process.wait()}): its message stands above.")
    for process in processes:
        process.stdin.write(f"{seconds}\n")
        process.stdin.flush()
    found = [float(process.stdout.readline()) for process in processes]
    for process in processes:
        process.wait()
    return found


def measured(size: str, *, counts: list[int], seconds: float, overrides: list[str]) -> list[dict[str, Any]]:
    """A row for each number of seeds, with MPS and without."""
    rows: list[dict[str, Any]] = []
    for seeds in counts:
        for mps in (False, True) if seeds > 1 else (False,):
            with shared_gpu(say=sys.exit) if mps else nullcontext():
                each = rates(size, seeds, seconds=seconds, overrides=overrides)
            alone = rows[0]["steps_per_s"] if rows else fmean(each)
            row = {"size": size, "seeds": seeds, "mps": mps, "steps_per_s": round(fmean(each), 2)}
            rows.append(row | {"slowdown": round(alone / fmean(each), 3)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="seeds at once; the first is 1")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of the runs")
    parser.add_argument("--write", action="store_true", help="into results/speed/seeds_at_once.json")
    parser.add_argument("--serve", nargs=2, metavar=("SIZE", "OVERRIDES"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve[0], json.loads(asked.serve[1]))
        return
    rows: list[dict[str, Any]] = []
    for size in asked.sizes:
        rows += measured(size, counts=asked.counts, seconds=asked.seconds, overrides=asked.set)
        if asked.write:
            facts = {"device": device_name(), "cores": os.cpu_count(), "seconds": asked.seconds, "settings": asked.set}
            write_record("seeds_at_once", {**facts, "rows": rows})


if __name__ == "__main__":
    main()
