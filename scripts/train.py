"""The same as `rl-lab train`: python scripts/train.py +experiment=dreamer_v3 environment.id=Pendulum-v1."""

from __future__ import annotations

import sys

from rl_lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
