"""`make torture`: the whole campaign. Writes results/reliability.json from a clean commit."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A process that is killed loses nothing that it wrote, and to wait for a disk takes time.
os.environ.setdefault("TMPDIR", "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rl-lab-state-")

import torch  # after the number of threads
from tests.torture import fuzz, kills, nonfinite, strangers
from tests.torture.cases import CASES, warm_up, without_reports
from tests.torture.damage import DamageCampaign
from tests.torture.forged import ForgingCampaign
from tests.torture.locks import contend
from tests.torture.tally import Tally

from rl_lab.orchestration.files import to_json, write_atomic
from rl_lab.orchestration.run_directory import git_commit, timestamp, versions

RESULTS = Path(__file__).resolve().parents[2] / "results" / "reliability.json"
# What each part gets of the time. What one of them leaves over, those after it share.
SHARES = {
    "strangers": 0.07,
    "fuzz": 0.04,
    "kills": 0.2,
    "file_operations": 0.12,
    "signals": 0.05,
    "full_disks": 0.05,
    "damage": 0.34,
    "nonfinite": 0.07,
    "forged": 0.06,
}


class Campaign:
    """Parts that go on until their time is up."""

    def __init__(self, seed: int, cases: list[str]) -> None:
        self.tally, self.chance, self.seed, self.cases = Tally(), random.Random(seed), seed, cases

    def kills(self, late: Callable[[], bool]) -> None:
        for case in self._cases(late):
            kills.killed_at_random(case, self.chance.randint(1, 4), self.chance, self.tally)

    def file_operations(self, late: Callable[[], bool]) -> None:
        for case in itertools.cycle(case for case in ("random", "dreamer_v3, disk", "ppo") if case in self.cases):
            for name in kills.INJECTED:
                for count in itertools.count(1):
                    if late() or not kills.killed_at_call(case, name, count, self.tally):
                        break
            if late():
                return

    def signals(self, late: Callable[[], bool]) -> None:
        numbers = itertools.cycle([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        for case, number in zip(self._cases(late), numbers, strict=False):
            kills.killed_at_random(case, 1, self.chance, self.tally, number)

    def full_disks(self, late: Callable[[], bool]) -> None:
        for case in self._cases(late):
            kills.starved(case, self.chance.choice([600, 2_000, 5_000, 20_000, 60_000, 200_000]), self.tally)

    def damage(self, late: Callable[[], bool]) -> None:
        with kills.folder() as root:
            campaigns = [DamageCampaign(case, root / str(number)) for number, case in enumerate(("random", "dqn"))]
            while not late():
                self.chance.choice(campaigns).damage_one(self.chance, self.tally)

    def forged(self, late: Callable[[], bool]) -> None:
        with kills.folder() as root:
            chosen = [case for case in ("dqn", "ppo", "dreamer_v3", "tdmpc2") if case in self.cases]
            campaigns = [ForgingCampaign(case, root / str(number)) for number, case in enumerate(chosen)]
            while campaigns and not late():
                self.chance.choice(campaigns).forge_one(self.chance, self.tally)

    def strangers(self, late: Callable[[], bool]) -> None:
        strangers.hostile_directories(self.tally)
        for name in self.chance.sample(strangers.BAD_IDS, len(strangers.BAD_IDS)):
            strangers.bad_environment(name, self.tally)
            if late():
                return

    def nonfinite(self, late: Callable[[], bool]) -> None:
        for case in self._cases(late):
            for module in itertools.count():
                value, policy = (
                    self.chance.choice([float("nan"), float("inf")]),
                    self.chance.choice(["stop", "rollback"]),
                )
                if late() or not nonfinite.poisoned(case, module, value, policy, self.tally):
                    break

    def fuzz(self, late: Callable[[], bool]) -> None:
        for number in itertools.count():
            fuzz.configurations(self.seed + number, self.tally)
            fuzz.datasets(self.seed + number, self.tally)
            if late():
                return

    def _cases(self, late: Callable[[], bool]) -> Iterator[str]:
        """Every case in turn, in another order each time."""
        while True:
            for case in self.chance.sample(self.cases, len(self.cases)):
                if late():
                    return
                yield case


def one_turn(seed: int) -> Tally:
    """One turn of each part on the smallest run, in seconds: the short form in the test suite."""
    tally, chance = Tally(), random.Random(seed)
    if not kills.killed_at_call("random", "rename", 3, tally):
        tally.bad("the run made no third rename to be killed at")
    kills.starved("random", 2_000, tally)
    with kills.folder() as root:
        campaign = DamageCampaign("random", root)
        for _ in range(4):
            campaign.damage_one(chance, tally)
        ForgingCampaign("random", root / "forged").forge_one(chance, tally)
    strangers.hostile_directories(tally, every=40)
    strangers.bad_environment("BadEnv-exit-step-v0", tally)
    nonfinite.poisoned("dqn", 0, float("inf"), "stop", tally)
    fuzz.configurations(seed, tally, count=6)
    fuzz.datasets(seed, tally, count=6)
    return tally


def run(seconds: float, seed: int, only: list[str], cases: list[str]) -> Tally:
    """The campaign; each part says when it is done."""
    campaign = Campaign(seed, cases)
    holders = contend(Path(tempfile.mkdtemp()), processes=20, rounds=100)
    campaign.tally.add("lock_attempts", 20 * len(holders))
    for count in holders:
        if count != 1:
            campaign.tally.bad(f"the lock had {count} holders at once")
    parts, last = [name for name in SHARES if not only or name in only], time.monotonic() + seconds
    for number, name in enumerate(parts):
        start = time.monotonic()
        end = start + (last - start) * SHARES[name] / sum(SHARES[later] for later in parts[number:])
        getattr(campaign, name)(lambda end=end: time.monotonic() >= end)
        counts = ", ".join(f"{key} {value}" for key, value in sorted(campaign.tally.counts.items()))
        sys.stdout.write(f"{name}: {time.monotonic() - start:.0f} s. So far: {counts}\n")
        sys.stdout.flush()
    return campaign.tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--hours", type=float, default=0.1)
    parser.add_argument("--once", action="store_true", help="one turn of each part, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], choices=list(SHARES))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), help="default: all of them")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    without_reports()
    start = time.monotonic()
    if options.once:
        tally = one_turn(options.seed)
    else:
        warm_up()
        tally = run(3600 * options.hours, options.seed, options.only, options.cases)
    result = {
        "commit": git_commit(),
        "time": timestamp(),
        "seconds": round(time.monotonic() - start),
        "seed": options.seed,
        "cases": options.cases,
        "versions": versions(),
        **tally.as_dict(),
    }
    if str(result["commit"]).endswith("-dirty") and options.out == RESULTS:
        sys.stdout.write(to_json(result) + "Not written: results come from a clean commit.\n")
    else:
        write_atomic(options.out, to_json(result))
        sys.stdout.write(f"{options.out}\n")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
