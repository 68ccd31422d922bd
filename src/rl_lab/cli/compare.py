"""`rl-lab compare`."""

from __future__ import annotations

import sys
from pathlib import Path

from rl_lab.cli import arguments

_EXAMPLE = "  rl-lab compare experiments/dreamer_v3_cartpole/* --out comparison"


def run(argv: list[str]) -> int:
    parser = arguments.parser("compare", "Curves, table and confidence intervals of several runs.", _EXAMPLE)
    arguments.add_run(parser, several=True)
    parser.add_argument("--out", type=Path, default=Path("comparison"), metavar="DIR", help="default: comparison")
    options = parser.parse_intermixed_args(argv)

    from rl_lab.metrics.comparison import compare_runs
    from rl_lab.orchestration.run_directory import find_run

    folders = [find_run(run, options.run_root).path for run in options.run]
    sys.stdout.write(f"{compare_runs(folders, options.out)}\n")
    return 0
