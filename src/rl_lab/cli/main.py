"""`rl-lab`: finds the command, runs it, and turns errors into one clear line. Imports nothing heavy by itself."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from rl_lab import __version__
from rl_lab.errors import MESSAGE_PREFIX, RLLabError, nearest

COMMANDS = {
    "train": ("rl_lab.cli.train", "train an agent, or go on with a run"),
    "eval": ("rl_lab.cli.evaluate", "play held-out episodes with a trained agent"),
    "imagine": ("rl_lab.cli.imagine", "show what the model predicts beside what happened"),
    "ui": ("rl_lab.cli.ui", "watch runs in the browser, compare them, play inside their dreams"),
    "dream": ("rl_lab.cli.dream", "play inside the world model of a run, in the browser"),
    "export": ("rl_lab.cli.export", "a dream as one HTML file, a policy as ONNX or TorchScript"),
    "list": ("rl_lab.cli.listing", "list experiments, environments, workflows, components, …"),
    "compare": ("rl_lab.cli.compare", "curves, table and confidence intervals of several runs"),
    "data": ("rl_lab.cli.data", "record, inspect, convert and merge datasets"),
    "reproduce": ("rl_lab.cli.reproduce", "train the seeds of an experiment and write results/"),
    "sweep": ("rl_lab.cli.sweep", "show a study of Optuna: runs, importance of settings, the best"),
    "doctor": ("rl_lab.cli.doctor", "what is installed, what is missing and how to get it"),
}
EXIT_FAILURE, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130

_USAGE = """usage: rl-lab COMMAND …

{commands}

rl-lab COMMAND --help explains a command. RUN is a run directory, its name, or 'latest'.

example:
  rl-lab train +experiment=dreamer_v3 environment.id=Pendulum-v1
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 well, 1 a defect, 2 bad input, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_usage())
        return 0 if arguments else EXIT_BAD_INPUT
    if arguments[0] == "--version":
        sys.stdout.write(f"rl-lab {__version__}\n")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        return _fail(f"'{name}' is not a command.{nearest(name, COMMANDS)} See: rl-lab --help")
    return _run(name, rest)


def _run(name: str, arguments: list[str]) -> int:
    return run_guarded(lambda: import_module(COMMANDS[name][0]).run(arguments))


def run_guarded(command: Callable[[], int]) -> int:
    """Run a command; what goes wrong is one line on stderr and an exit status."""
    try:
        return int(command())
    except SystemExit as stop:  # argparse: --help or a wrong option, already explained
        return stop.code if isinstance(stop.code, int) else EXIT_BAD_INPUT
    except RLLabError as error:
        if os.environ.get("RL_LAB_DEBUG"):
            raise
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output went away, as in `rl-lab list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("RL_LAB_DEBUG"):
            raise
        kind = type(error).__name__
        return _fail(f"unexpected {kind}: {_first_line(error)} (traceback: {_write_traceback(error)})", EXIT_FAILURE)


def _write_traceback(error: Exception) -> Path:
    """Into the run's directory where there is one (`run_folder` on the error), else into a temporary file."""
    folder = getattr(error, "run_folder", None)
    path = Path(folder) / "error.txt" if folder else Path(tempfile.mkstemp(prefix="rl-lab-error-", suffix=".txt")[1])
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return path


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _fail(message: str, code: int = EXIT_BAD_INPUT) -> int:
    sys.stderr.write(f"{MESSAGE_PREFIX}{_printable(message)}\n")
    return code


def _printable(message: str) -> str:
    """A message may quote a file that anybody wrote: nothing in it steers the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in message)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    return _USAGE.format(commands="\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()))
