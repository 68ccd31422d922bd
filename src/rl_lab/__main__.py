"""`python -m rl_lab` is `rl-lab`."""

from __future__ import annotations

import sys

from rl_lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
