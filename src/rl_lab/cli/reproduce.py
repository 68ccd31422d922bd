"""`rl-lab reproduce`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rl_lab.cli import arguments
from rl_lab.errors import ConfigError

_EXAMPLE = """  rl-lab reproduce dreamer_v3_cartpole --seeds 0-4
  rl-lab reproduce dreamer_v3 --seeds 0,1 environment.id=Pendulum-v1 training.total_timesteps=20_000
  rl-lab reproduce ppo_cartpole --launcher submitit --option cluster=slurm --option slurm_partition=cpu"""


def run(argv: list[str]) -> int:
    parser = arguments.parser(
        "reproduce",
        "Train the seeds of an experiment, evaluate each on fresh held-out episodes and write results/EXPERIMENT.json. "
        "Interrupted, the same command goes on with the seeds that are missing.",
        _EXAMPLE,
    )
    parser.add_argument("experiment", metavar="EXPERIMENT")
    arguments.add_overrides(parser)
    parser.add_argument("--seeds", type=parse_seeds, default=list(range(5)), metavar="0-4", help="such as 0-4 or 0,3,7")
    parser.add_argument(
        "--jobs",
        type=arguments.positive,
        help="seeds trained at once (default: one per core; on a GPU 1, several share it by MPS)",
    )
    parser.add_argument(
        "--episodes", type=arguments.positive, default=100, help="final episodes of a seed (default: 100)"
    )
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="default: results")
    parser.add_argument(
        "--launcher",
        choices=["joblib", "submitit", "ray"],
        help="run the seeds there (default: processes of this machine)",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="key=value",
        help="of the launcher: address=auto (ray), cluster=slurm slurm_partition=gpu (submitit), workers=4 (joblib)",
    )
    options = parser.parse_intermixed_args(argv)

    from rl_lab.experiment.reproduce import reproduce

    path = reproduce(
        options.experiment,
        overrides=options.overrides,
        seeds=options.seeds,
        jobs=options.jobs,
        episodes=options.episodes,
        results=options.results,
        config_dirs=options.config_dir,
        launcher=options.launcher,
        options=_launcher_options(options.option),
        say=lambda text: sys.stdout.write(text + "\n") and sys.stdout.flush(),
    )
    sys.stdout.write(f"{path}\n")
    return 0


def _launcher_options(lines: list[str]) -> dict[str, Any]:
    from rl_lab.experiment.config import parse_overrides

    return {override.key_or_group: override.value() for override in parse_overrides(lines)}


def parse_seeds(text: str) -> list[int]:
    """`0-4` or `0,3,7` or a mixture."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ConfigError(f"--seeds {text}: expected numbers and ranges such as 0-4 or 0,3,7.")
        seeds.extend(range(int(first), int(last if dash else first) + 1))
    return sorted(set(seeds))
