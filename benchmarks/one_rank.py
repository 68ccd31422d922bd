"""What it costs to train as the one rank of a launch by torchrun (`training.devices=1`), over a process of its own.
Aim: at most 2 %.

Run it on a machine with a GPU: python benchmarks/one_rank.py --write one_rank

The loop of an experiment of ablation.py (decisions, replay, updates) runs in two processes, one of them launched by
torchrun. They warm up side by side, then take turns.
"""

from __future__ import annotations

import argparse
import os
from statistics import median

from ablation import CASES, Variant
from measuring import add_writing, device_name, write_record

LAUNCHERS = {"plain": [], "one rank": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="atari", choices=list(CASES), help="of ablation.py")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one process in one turn")
    add_writing(parser)
    options = parser.parse_args()
    processes = {name: Variant(options.experiment, launcher=launcher) for name, launcher in LAUNCHERS.items()}
    for process in processes.values():
        process.answer(), process.answer()  # its kernels; that it is warm
    decisions = max(10, int(options.seconds / processes["plain"](20)))
    times: dict[str, list[float]] = {name: [] for name in processes}
    for turn in range(options.turns):
        for name in sorted(processes, reverse=turn % 2 == 1):  # neither is always the first
            times[name].append(1e3 * processes[name](decisions))
    for process in processes.values():
        process.close()
    costs = sorted(ranked / plain - 1.0 for plain, ranked in zip(*times.values(), strict=True))
    cost, quarter = median(costs), len(costs) // 4
    middle = costs[quarter], costs[-1 - quarter]
    medians = {name: median(each) for name, each in times.items()}
    print(", ".join(f"{name} {value:.3f} ms" for name, value in medians.items()), "for a decision with its updates")
    spread = f"{options.turns} turns; half of them from {middle[0]:+.1%} to {middle[1]:+.1%}"
    print(f"one rank costs {cost:+.1%} (median of {spread})")
    if options.write:
        record = {
            "device": device_name(), "cores": os.cpu_count(), "load_average": os.getloadavg()[0],
            "experiment": options.experiment, "overrides": list(CASES[options.experiment].overrides),
            "ms": times, "cost": cost, "middle_half": middle,
        }  # fmt: skip
        write_record(options.write, record, options.note)


if __name__ == "__main__":
    main()
