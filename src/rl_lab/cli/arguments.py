"""Arguments that several commands have, and the form of their parsers."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser(command: str, description: str, example: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"rl-lab {command}",
        description=description,
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_run(target: argparse.ArgumentParser, *, several: bool = False) -> None:
    target.add_argument(
        "run", metavar="RUN", nargs="+" if several else None, help="a run directory, its name, or 'latest'"
    )
    target.add_argument(
        "--run-root", default="experiments", metavar="DIR", help="where runs are kept (default: experiments)"
    )


def add_overrides(target: argparse.ArgumentParser) -> None:
    target.add_argument(
        "overrides", metavar="key=value", nargs="*", help="settings; +experiment=NAME picks the experiment"
    )
    target.add_argument(
        "--config-dir",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with further config groups",
    )


def add_trust(target: argparse.ArgumentParser) -> None:
    target.add_argument(
        "--trust", action="store_true", help="let a run that was not made here name code of its own (docs/security.md)"
    )


def add_server(target: argparse.ArgumentParser) -> None:
    target.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    target.add_argument("--port", type=natural, default=8600, help="default: 8600; the next free one where it is taken")
    target.add_argument("--no-browser", dest="browser", action="store_false", help="do not open a browser")


def positive(text: str) -> int:
    """An argparse type: a whole number above 0."""
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got '{text}'")
    return value


def natural(text: str) -> int:
    """An argparse type: a whole number from 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, got '{text}'")
    return int(text)
