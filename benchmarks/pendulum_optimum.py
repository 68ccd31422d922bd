"""What can be reached on Pendulum-v1 from the starts that are scored: at all, and by exact plans of so many steps.

The value of every state is computed backwards in time on a grid (dynamic programming, with the equations that the
planners have), then what it says is played in the environment itself. A plan of h steps is the first step of the best
h: it sees nothing of what follows. Run it: python benchmarks/pendulum_optimum.py [--json results/matrix/pendulum.json]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.experiment.build import make_eval_envs
from rl_lab.experiment.prepare import prepare
from rl_lab.orchestration.evaluation import evaluate
from rl_lab.orchestration.run_directory import git_commit
from rl_lab.simulation.classic_control import Pendulum

STEPS = 200  # of an episode
ANGLES, SPEEDS, TORQUES = 361, 321, 41  # places of the grid; the speeds' ends are the fastest
SEEDS, STARTS, HORIZONS = (0, 1, 2), (10, 20, 100), (20, 25, 30, 40)


class Table:
    """A value for each place; between places it is interpolated, and angles go round."""

    def __init__(self, equations: Pendulum) -> None:
        self.equations = equations
        self.top_speed = equations.max_speed
        angle = torch.linspace(-math.pi, math.pi, ANGLES)
        speed = torch.linspace(-self.top_speed, self.top_speed, SPEEDS)
        self.states = torch.cartesian_prod(angle, speed)

    def places(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The four neighbours of each state [n, 4] and their weights."""
        turn = torch.remainder(state[:, 0] + math.pi, 2 * math.pi) * ((ANGLES - 1) / (2 * math.pi))
        speed = (state[:, 1] + self.top_speed) * ((SPEEDS - 1) / (2 * self.top_speed))
        row, column = turn.floor().clamp(0, ANGLES - 2), speed.floor().clamp(0, SPEEDS - 2)
        right, above = turn - row, speed - column
        first = (row * SPEEDS + column).long()
        weights = [(1 - right) * (1 - above), (1 - right) * above, right * (1 - above), right * above]
        return torch.stack([first, first + 1, first + SPEEDS, first + SPEEDS + 1], 1), torch.stack(weights, 1)

    def looked_up(self, value: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        neighbours, weights = places
        return (value[neighbours] * weights).sum(1)

    def values(self) -> list[Tensor]:
        """The best return of so many steps, from every place."""
        outcomes = []
        for torque in torch.linspace(-1.0, 1.0, TORQUES):
            action = torque.expand(len(self.states), 1)
            following = self.equations.step(self.states, action)
            outcomes.append((self.equations.reward(self.states, action, following), self.places(following)))
        values = [torch.zeros(len(self.states))]
        for _ in range(STEPS):
            best = torch.full((len(self.states),), -math.inf)
            for reward, places in outcomes:
                best = torch.maximum(best, reward + self.looked_up(values[-1], places))
            values.append(best)
        return values


class Planner:
    """Acts as `evaluate` asks agents to: by the best of the next `horizon` steps, or of all that are left."""

    def __init__(self, table: Table, values: list[Tensor], horizon: int | None) -> None:
        self.table, self.values, self.horizon = table, values, horizon
        self.torques = torch.linspace(-1.0, 1.0, 8 * (TORQUES - 1) + 1)
        self.played = 0

    def initial_state(self, count: int) -> dict[str, Tensor]:
        return {}

    def reset_state(self, state: dict[str, Tensor], is_first: np.ndarray) -> dict[str, Tensor]:
        self.played = 0 if is_first.all() else self.played  # all episodes have the same length
        return state

    def act(
        self, observation: dict[str, np.ndarray], state: dict[str, Tensor], *, mode: str
    ) -> tuple[np.ndarray, dict[str, Tensor]]:
        left = STEPS - self.played if self.horizon is None else self.horizon
        self.played += 1
        equations, (seen,) = self.table.equations, observation.values()
        now = equations.decode(torch.as_tensor(seen)).repeat_interleave(len(self.torques), 0)
        action = self.torques.repeat(len(seen)).unsqueeze(1)
        following = equations.step(now, action)
        after = self.table.looked_up(self.values[left - 1], self.table.places(following))
        worth = (equations.reward(now, action, following) + after).view(len(seen), -1)
        return self.torques[worth.argmax(1)].unsqueeze(1).numpy(), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the result")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(Pendulum())
    values = table.values()
    at_rest = (
        (table.states[:, 1].abs() <= 1.0).nonzero().squeeze(1)
    )  # an episode starts at any angle, with such a speed
    everywhere = float(values[STEPS][at_rest].mean())
    print(f"the best from all starts: {everywhere:.1f}")
    rows: list[dict[str, Any]] = []
    for horizon in (None, *HORIZONS):
        for starts in STARTS:
            returns = []
            for seed in SEEDS:
                settings = prepare(["+experiment=mpc_pendulum", f"experiment.seed={seed}"]).settings
                envs = make_eval_envs(settings, "final", render=False, episodes=starts)
                result = evaluate(Planner(table, values, horizon), envs, starts, seed=seed, stream="final")  # type: ignore[arg-type]
                envs.close()
                assert result is not None
                returns.append(round(result.return_mean, 1))
            rows.append({"horizon": horizon, "starts": starts, "seeds": list(SEEDS), "returns": returns})
            print(rows[-1], flush=True)
    if asked.json:
        record = {"environment": "Pendulum-v1", "commit": git_commit(), "best_from_all_starts": round(everywhere, 1)}
        asked.json.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
