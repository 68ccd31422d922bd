"""How long the light commands take from the shell: the best of five."""

from __future__ import annotations

import subprocess
import sys
import time

COMMANDS = {"rl-lab --help (aim < 1 s)": ["--help"], "rl-lab list (aim < 1.5 s)": ["list"]}


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "rl_lab", *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    for label, arguments in COMMANDS.items():
        print(f"{label:<40} {min(seconds(arguments) for _ in range(5)):>12,.2f} s")


if __name__ == "__main__":
    main()
