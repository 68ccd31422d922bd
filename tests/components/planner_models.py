"""Models with known answers for planners."""

from __future__ import annotations

from typing import Any

import torch
from tests.packaged import adjusted

from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.diffusion import DiffusionPlanner
from rl_lab.components.planners.gradient import GradientPlanner
from rl_lab.components.planners.icem import ICEM
from rl_lab.components.planners.mppi import MPPI
from rl_lab.components.planners.policy_guided import PolicyGuided
from rl_lab.components.planners.random_shooting import RandomShooting
from rl_lab.simulation.simulator import SimulatedStep, Simulator

MOVES = torch.tensor([-0.5, 0.0, 0.5])
CONTINUOUS, DISCRETE = ActionLayout(2), ActionLayout(0, (3, 3))
MIXED = ActionLayout(1, (3,))


FILES = {
    CEM: "cem", ICEM: "icem", MPPI: "mppi", GradientPlanner: "gradient", PolicyGuided: "policy_guided",
    RandomShooting: "random_shooting", DiffusionPlanner: "diffusion",
}  # fmt: skip


def make_planner(kind: Any, **settings: Any) -> Any:
    """A planner with the packaged settings of its kind but for these; a subclass has those of its parent."""
    name = next(FILES[parent] for parent in kind.__mro__ if parent in FILES)
    return kind(**adjusted(f"controllers/planners/{name}", **settings))


class Pull(Simulator):
    """x' = x + move, reward -|x'|²: the best first move is -x, the best return 0 (where -x is a move)."""

    def __init__(self, layout: ActionLayout) -> None:
        self.layout = layout

    def observe(self, observation, *, previous=None, action=None, is_first=None):
        return observation["vector"]

    def move(self, action):
        parts = [action[..., : self.layout.continuous]]
        if self.layout.classes:
            parts += [group @ MOVES[:, None] for group in action[..., self.layout.continuous :].split(3, -1)]
        return torch.cat(parts, -1)

    def step(self, state, action):
        state = state + self.move(action)
        reward = -state.square().sum(-1)
        return SimulatedStep(state, reward, torch.ones_like(reward))


class ValuedPull(Pull):
    has_value = has_policy = True

    def value(self, state):
        return -state.square().sum(-1)

    def policy(self, state):
        """A bad one: the other way, or always the last class."""
        continuous = state[..., : self.layout.continuous].clamp(-1.0, 1.0)
        classes = [torch.tensor([0.0, 0.0, 1.0]).expand(len(state), 3) for _ in self.layout.classes]
        return torch.cat([continuous, *classes], -1)


class BrokenPull(ValuedPull):
    """Not finite for rows whose first move goes up; the others earn less than nothing."""

    def step(self, state, action):
        step = super().step(state, action)
        return step._replace(reward=torch.where(self.move(action)[:, 0] > 0.0, torch.nan, step.reward - 1.0))
