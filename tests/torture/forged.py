"""Checkpoints that a stranger forged: whole by their manifest, loadable, and with something odd in one place."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.torture.cases import go_on, train
from tests.torture.children import in_child
from tests.torture.damage import BUDGET
from tests.torture.kills import folder
from tests.torture.tally import Tally

import rl_lab
from rl_lab.orchestration.checkpoint import AGENT_FILE, MANIFEST, TRAINING_FILE, _describe

ODD: dict[str, Any] = {
    "None": None,
    "a text": "x",
    "minus one": -1,
    "a large number": 10**9,
    "NaN": float("nan"),
    "a list": [1, "x"],
    "a mapping": {"x": [None]},
    "true": True,
    "an empty tensor": torch.zeros(0),
    "whole numbers": torch.full((3, 2), -7),
    "infinities": torch.full((4,), float("inf")),
    "complex numbers": torch.zeros(2, dtype=torch.complex64),
}
GONE = "gone"


class ForgingCampaign:
    """One finished run, of which copies with a forged checkpoint are opened and gone on with, as a stranger's."""

    def __init__(self, case: str, root: Path) -> None:
        self.case, self.run = case, Path(in_child(lambda: str(train(case, root)), limit=600).value)

    def forge_one(self, chance: random.Random, tally: Tally) -> None:
        """Change one place of a copy's latest checkpoint: both commands refuse it in one line, or can do with it."""
        with folder() as root:
            run = Path(shutil.copytree(self.run, root / self.run.name, symlinks=True))
            (run / MANIFEST).unlink()
            place, kind = _forge(run / "checkpoints" / "latest", chance)
            for what, work in (("acting", lambda: _acted(run)), ("going on", lambda: go_on(run, BUDGET))):
                ended = in_child(work, limit=300)
                if ended.status not in ("done", "refused"):
                    tally.bad(f"{self.case}: {place} is {kind}, {what}: {ended.status}: {ended.text}")
                tally.add(f"forged_checkpoints_{'refused' if ended.status == 'refused' else 'used'}")
        tally.add("forged_checkpoints")


def _acted(run: Path) -> None:
    agent = rl_lab.load(run)
    agent.act(agent.observation_space.sample(), agent.initial_state())


def _forge(checkpoint: Path, chance: random.Random) -> tuple[str, str]:
    """Put something odd into one place; which, and what it is now."""
    path = checkpoint / chance.choice([AGENT_FILE, TRAINING_FILE, TRAINING_FILE])
    content = torch.load(path, weights_only=True)
    parent, key, name = chance.choice(list(_places(content)))
    kind = chance.choice([*ODD, GONE])
    if kind != GONE:
        parent[key] = ODD[kind]
    else:
        del parent[key]
    torch.save(content, path)
    vouch_for(checkpoint)
    return f"{path.name}: {name}", kind


def vouch_for(checkpoint: Path) -> None:
    """Write the sizes and checksums of what is there into the manifest."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"] = {name: entry for name, entry in _describe(checkpoint).items() if name != MANIFEST}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def _places(node: Any, name: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Every entry of every mapping and list, as (container, key, dotted name)."""
    entries = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    for key, value in entries:
        yield node, key, f"{name}.{key}"
        yield from _places(value, f"{name}.{key}")
