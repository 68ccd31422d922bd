"""What it costs to train as the one rank of a launch by torchrun (`training.devices=1`), over a plain `rl-lab train`:
the updates a second of the same run, by turns. Aim: at most 2 %.

Run it on a machine with a GPU: python benchmarks/one_rank.py --write one_rank
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from measuring import add_writing, device_name, write_record

WORDS = [
    *("+experiment=dreamer_v3", "environment.id=dm_control/walker-walk-v0", "size=12m", "environment.num_envs=4"),
    *("logging.every=500", "logging.console=off", "logging.tensorboard=false", "evaluation.every=1_000_000"),
    *("evaluation.episodes=1", "evaluation.video=false", "evaluation.imagination=false"),
]
LAUNCHES = {
    "plain": [],
    "one rank": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"],
}


def updates_per_s(launch: list[str], words: list[str]) -> float:
    """Of the second half of a run: what compiles has compiled, and what fills is full."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, *launch, "-m", "rl_lab", "train", *words, f"run_root={folder}"]
        subprocess.run(command, check=True)
        path = next(Path(folder).glob("*/*/metrics.jsonl"))
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if "time/updates_per_s" in row]
    first, last = rows[len(rows) // 2], rows[-1]
    return float((last["updates"] - first["updates"]) / (last["wall_s"] - first["wall_s"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_writing(parser)
    parser.add_argument("--env-steps", type=int, default=10_000, help="of each run")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("overrides", nargs="*", help="of the run, after its own")
    options = parser.parse_args()
    words = [*WORDS, f"training.total_timesteps={options.env_steps}", *options.overrides]
    figures: dict[str, list[float]] = {name: [] for name in LAUNCHES}
    for number in range(options.rounds):
        for name in sorted(LAUNCHES, reverse=number % 2 == 1):  # neither is always the first
            figures[name].append(updates_per_s(LAUNCHES[name], words))
            print(f"{name:10} {figures[name][-1]:8.2f} updates/s", flush=True)
    plain, ranked = (statistics.median(figures[name]) for name in LAUNCHES)
    cost = plain / ranked - 1.0
    print(f"one rank costs {cost:+.1%} (medians of {options.rounds})")
    if options.write:
        record = {
            "device": device_name(), "overrides": words, "cores": os.cpu_count(), "load_average": os.getloadavg()[0],
            "updates_per_s": figures, "cost": cost,
        }  # fmt: skip
        write_record(options.write, record, options.note)


if __name__ == "__main__":
    main()
