"""One of several ranks that a training started (`training.devices`): errors become one line, as in a command."""

from __future__ import annotations

import os
import sys

from rl_lab.cli.main import run_guarded


def main() -> None:
    from rl_lab.experiment.train import train_share

    code = run_guarded(lambda: train_share(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's threads of communication may abort a process that ends in the usual way
