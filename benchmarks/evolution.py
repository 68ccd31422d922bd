"""A generation of 32 members × 4 episodes of CartPole-v1 in one batched pass, against one episode after the other.

Every episode is played with its member's own controller; V is the identity, M an LSTM of 256 units, as in
+experiment=world_models_state. Both ways play the same episodes, and their returns must agree. One thread.
Run it: python benchmarks/evolution.py [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from measuring import write_record

from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.orchestration.run_directory import RunDirectory

MEMBERS, EPISODES = 32, 4


@contextmanager
def workflow(num_envs: int) -> Iterator[Any]:
    """World Models on the state of CartPole, with that many environments for evolution."""
    overrides = ["+experiment=world_models_state", f"workflow.evolution_envs={num_envs}", "environment.backend=sync"]
    with TemporaryDirectory() as folder:
        prepared = prepare([*overrides, "experiment.device=cpu", "logging.console=off", f"run_root={folder}"])
        experiment = build(prepared, RunDirectory.create(Path(folder), "benchmark", 0))
        yield experiment.orchestrator.workflow
        experiment.orchestrator.close()


def generation(workflow: Any, vectors: torch.Tensor, rows: int) -> tuple[np.ndarray, float, float]:
    """Returns of all episodes, played `rows` at a time; wall and CPU seconds."""
    members, episodes = np.divmod(np.arange(MEMBERS * EPISODES), EPISODES)
    wall, cpu, returns = time.perf_counter(), time.process_time(), []
    for start in range(0, len(members), rows):
        part = slice(start, start + rows)
        returns.append(workflow.game.play(vectors, members[part], episodes[part], generation=0).returns)
    return np.concatenate(returns), time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    total = MEMBERS * EPISODES
    with workflow(total) as batched, workflow(1) as single:
        vectors = 0.5 * torch.randn(MEMBERS, batched.policy.size, generator=torch.Generator().manual_seed(0))
        single.dynamics.load_state_dict(batched.dynamics.state_dict())
        pairs = [(generation(batched, vectors, total), generation(single, vectors, 1)) for _ in range(rounds + 1)][1:]
    for (together, _, _), (alone, _, _) in pairs:
        np.testing.assert_array_equal(together, alone)
    seconds = {
        name: {clock: median(pair[way][index] for pair in pairs) for clock, index in (("wall_s", 1), ("cpu_s", 2))}
        for name, way in (("batched", 0), ("one_by_one", 1))
    }
    record = {
        "environment": "CartPole-v1", "members": MEMBERS, "episodes": EPISODES, "rounds": rounds,
        "decisions": int(pairs[0][0][0].sum()), **seconds,
        "times_as_fast": {
            clock: seconds["one_by_one"][clock] / seconds["batched"][clock] for clock in ("wall_s", "cpu_s")
        },
        "device": "cpu", "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    write_record("evolution", record)
    print(record)


if __name__ == "__main__":
    main()
