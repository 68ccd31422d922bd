"""Files of a run that are cut, flipped, emptied or gone: refused or told, never silently used."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.torture.cases import Result, events, folder_in, go_on, result_of, train
from tests.torture.children import in_child
from tests.torture.kills import folder
from tests.torture.tally import Tally

Damage = Callable[[Path, random.Random], object]
BUDGET = "training.total_timesteps=160"  # beyond what the run had: it goes on, and reads what it left


def _cut(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(max(1, len(content)))])


def _flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(content))


def _grow(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randrange(1, 200)))


def _noise(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(max(1, path.stat().st_size)))


DAMAGES: dict[str, Damage] = {
    "cut": _cut,
    "flipped": _flip,
    "grown": _grow,
    "noise": _noise,
    "emptied": lambda path, chance: path.write_bytes(b""),
    "deleted": lambda path, chance: path.unlink(),
    "a folder": lambda path, chance: (path.unlink(), path.mkdir()),
}


class DamageCampaign:
    """One finished run, of which copies are damaged and resumed."""

    def __init__(self, case: str, root: Path) -> None:
        ended = in_child(lambda: str(train(case, root)), limit=600)
        self.case, self.run = case, Path(ended.value)
        with folder() as copy:
            self.expected = self._resumed(self._copy(copy))
        self.files = sorted(path for path in self.run.rglob("*") if path.is_file() and not path.is_symlink())

    def _copy(self, root: Path) -> Path:
        return Path(shutil.copytree(self.run, root / self.run.parent.name / self.run.name, symlinks=True))

    def _resumed(self, run: Path) -> Result:
        ended = in_child(lambda: go_on(run, BUDGET), limit=600)
        assert ended.status == "done", ended.text
        return result_of(run)

    def damage_one(self, chance: random.Random, tally: Tally) -> None:
        """Damage a file of a copy and go on with it."""
        path, kind = chance.choice(self.files), chance.choice(list(DAMAGES))
        with folder() as root:
            run = self._copy(root)
            damaged = run / path.relative_to(self.run)
            before = damaged.read_bytes()
            DAMAGES[kind](damaged, chance)
            if damaged.is_file() and damaged.read_bytes() == before:
                return
            ended = in_child(lambda: go_on(run, BUDGET), limit=600)
            tally.add("damaged_files")
            what = f"{self.case}: {path.relative_to(self.run)} {kind}"
            if ended.status == "refused":
                tally.add("damaged_files_refused")
            elif ended.status != "done":
                tally.bad(f"{what}: {ended.status}: {ended.text}")
            elif any(kind == "damaged" and damaged.name in text for kind, text in events(folder_in(root) or run)):
                tally.add("damaged_files_told")
            elif result_of(run) == self.expected:
                tally.add("damaged_files_without_effect")
            else:
                tally.bad(f"{what}: used without a word")
