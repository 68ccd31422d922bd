"""Hostile run directories and bad environments, each opened or trained in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

from tests.torture import bad_environments
from tests.torture.bad_environments import BAD
from tests.torture.cases import BASE, go_on, train
from tests.torture.children import in_child
from tests.torture.hostile import MARKER, hostile_changes, hostile_run
from tests.torture.kills import folder
from tests.torture.tally import Tally

import rl_lab
from rl_lab.experiment.train import run_training

MODULE = str(Path(bad_environments.__file__))


def hostile_directories(tally: Tally, *, every: int = 1) -> None:
    """Each is loaded and resumed from inside its own folder; every `every`-th of them."""
    with folder() as root:
        sound = Path(in_child(lambda: str(train("random", root)), limit=600).value)
        for number, (name, _) in enumerate(list(hostile_changes(root))[::every]):
            target = root / str(number)
            run = hostile_run(sound, target, dict(hostile_changes(target))[name])

            def opened(run: Path = run) -> None:
                os.chdir(run)
                rl_lab.load(run)

            def resumed(run: Path = run) -> None:
                os.chdir(run)
                go_on(run)

            for what, work in (("loaded", opened), ("resumed", resumed)):
                ended = in_child(work)
                if ended.status != "refused":
                    tally.bad(f"hostile run '{name}' {what}: {ended.status}: {ended.text}")
            tally.add("hostile_directories")
            if (run / MARKER).exists():
                tally.bad(f"hostile run '{name}': its code was executed")


def bad_environment(name: str, tally: Tally) -> None:
    """A short training in an environment that is not sound: one of RL Lab's own errors, within its time."""
    with folder() as root:
        settings = [f"environment.id={name}", f"environment.module={MODULE}", "environment.startup_timeout=5"]
        run = ["+experiment=random", "training.total_timesteps=40", *BASE, *settings, f"run_root={root}"]
        ended = in_child(lambda: run_training(run).code, limit=60.0)
    tally.add("bad_environments")
    if ended.status != "refused":
        tally.bad(f"{name}: {ended.status}: {ended.text or ended.value}")


BAD_IDS = tuple(BAD)
