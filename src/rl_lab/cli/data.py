"""`rl-lab data`: datasets."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rl_lab.cli import arguments
from rl_lab.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rl_lab.datasets.formats.base import ReadOptions

_USAGE = """usage: rl-lab data COMMAND …

  record   play episodes with a trained agent or a scripted expert and write them to a dataset
  inspect  say what a dataset holds: episodes, returns, ranges, bad numbers, alignment
  convert  write a dataset in another format
  merge    write several datasets as one

rl-lab data COMMAND --help explains a command.

example:
  rl-lab data record expert:cartpole --episodes 100 --output cartpole.npz
"""


def run(argv: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "record": _record,
        "inspect": _inspect,
        "convert": _convert,
        "merge": _merge,
    }
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0 if argv else 2
    if argv[0] not in commands:
        raise ConfigError(f"data: '{argv[0]}' is not a command.{nearest(argv[0], commands)} See: rl-lab data --help")
    return commands[argv[0]](argv[1:])


def _record(argv: list[str]) -> int:
    parser = arguments.parser(
        "data record",
        "Play whole episodes with the agent of a run, or with a scripted expert, and write them to a dataset.",
        "  rl-lab data record latest --episodes 25 --output demos.npz\n"
        "  rl-lab data record expert:pendulum --episodes 100 --noise 0.3 --label clean --output pendulum.hdf5",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, its name, 'latest', or expert:NAME")
    parser.add_argument("--run-root", default="experiments", metavar="DIR", help="default: experiments")
    parser.add_argument("--episodes", type=arguments.positive, required=True, help="how many")
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help="a new file or folder")
    _add_format(parser)
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        help="deviation added to actions, or share of random discrete ones",
    )
    parser.add_argument(
        "--label", choices=("executed", "clean"), default="executed", help="with noise: which action is kept"
    )
    parser.add_argument("--sample", action="store_true", help="act as in training (default: as in evaluations)")
    parser.add_argument("--environment", metavar="ID", help="experts: another one than usual, such as a larger maze")
    parser.add_argument("--controller", metavar="ROLE", help="let the controller with this role act")
    parser.add_argument("--seed", type=arguments.natural, default=0, help="other episodes (default: 0)")
    parser.add_argument("--num-envs", type=arguments.positive, default=8, help="played side by side (default: 8)")
    arguments.add_trust(parser)
    options = parser.parse_args(argv)

    from rl_lab.experiment.recording import RecordingRequest, record_dataset

    path = record_dataset(
        RecordingRequest(
            actor=options.run, output=options.output, episodes=options.episodes, format_name=options.format,
            noise=options.noise, label=options.label, mode="train" if options.sample else "eval", seed=options.seed,
            num_envs=options.num_envs, controller=options.controller, run_root=options.run_root,
            environment=options.environment, trust=options.trust,
        )
    )  # fmt: skip
    sys.stdout.write(f"{path}\n")
    return 0


def _inspect(argv: list[str]) -> int:
    parser = arguments.parser(
        "data inspect",
        "Say what a dataset holds, and what may be wrong with it.",
        "  rl-lab data inspect demos.npz --page demos.html",
    )
    _add_reading(parser, "path")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a web page, with pictures, as well")
    options = parser.parse_args(argv)

    from rl_lab.datasets.files import open_dataset
    from rl_lab.datasets.inspection import inspect_dataset
    from rl_lab.datasets.inspection_page import as_page, as_text

    reader = open_dataset(options.path, format_name=options.format, options=_reading(options))
    try:
        summary = inspect_dataset(reader)
    finally:
        reader.close()
    sys.stdout.write((json.dumps(summary.as_dict()) if options.json else as_text(summary)) + "\n")
    if options.page is not None:
        options.page.write_text(as_page(summary), encoding="utf-8")
        sys.stdout.write("" if options.json else f"page: {options.page}\n")
    return 0


def _convert(argv: list[str]) -> int:
    parser = arguments.parser(
        "data convert", "Write a dataset in another format.", "  rl-lab data convert demos.npz demos.hdf5"
    )
    _add_reading(parser, "path")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="a new file or folder")
    parser.add_argument("--to", default="auto", metavar="FORMAT", help="of the output (default: by its suffix)")
    options = parser.parse_args(argv)
    return _rewrite([options.path], options, options.to)


def _merge(argv: list[str]) -> int:
    parser = arguments.parser(
        "data merge",
        "Write several datasets, which have the same fields, as one.",
        "  rl-lab data merge first.npz second.npz --output both.npz",
    )
    _add_reading(parser, "paths", several=True)
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help="a new file or folder")
    parser.add_argument("--to", default="auto", metavar="FORMAT", help="of the output (default: by its suffix)")
    options = parser.parse_args(argv)
    return _rewrite(options.paths, options, options.to)


def _rewrite(paths: list[str], options: argparse.Namespace, format_name: str) -> int:
    from rl_lab.datasets.merging import merge_datasets

    path = merge_datasets(
        paths, options.output, format_name=format_name, read_format=options.format, options=_reading(options)
    )
    sys.stdout.write(f"{path}\n")
    return 0


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="auto", help="of the dataset (default: recognised, or by the suffix)")


def _add_reading(parser: argparse.ArgumentParser, name: str, *, several: bool = False) -> None:
    parser.add_argument(name, metavar="PATH", nargs="+" if several else None, help="a dataset, or a run with a replay")
    _add_format(parser)
    parser.add_argument(
        "--map", action="append", default=[], metavar="ROLE=NAME", help="which field is what: action=torque, say"
    )
    parser.add_argument(
        "--alignment", choices=("auto", "after", "before"), default="auto",
        help="whether actions follow their observation or led to it",
    )  # fmt: skip


def _reading(options: argparse.Namespace) -> ReadOptions:
    from rl_lab.datasets.formats.base import ReadOptions

    mapping = {}
    for text in options.map:
        role, sign, name = text.partition("=")
        if not sign:
            raise ConfigError(f"--map {text}: expected ROLE=NAME, such as action=torque.")
        mapping[role] = name
    return ReadOptions(mapping, options.alignment)
