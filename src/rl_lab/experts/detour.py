"""An expert that passes an obstacle on either side."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from rl_lab.components.acting import AgentState, Mode
from rl_lab.environments.detour import GOAL, OBSTACLE_RADIUS, SPEED
from rl_lab.experts.base import Expert
from rl_lab.records import Observation

PASSING_RADIUS = OBSTACLE_RADIUS + 0.1  # of the circle along which it passes


class DetourExpert(Expert):
    """Draws a side at the start of an episode, and takes the shortest way around the obstacle on that side: along the
    tangent of a slightly larger circle, then straight to the goal. At the start both sides are equally good, and right
    after it nothing but the position tells which one was taken."""

    environment: ClassVar = {"id": "rl_lab/Detour-v0"}
    environments: ClassVar = r"Detour-v0$"

    def initial_state(self, num_envs: int) -> AgentState:
        return {"side": torch.zeros(num_envs)}

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        drawn = torch.where(torch.rand(len(state["side"])) < 0.5, -1.0, 1.0)
        side = torch.where(state["side"] == 0.0, drawn, state["side"])
        position = observation["vector"].astype(np.float64)
        to_centre = np.arctan2(-position[:, 1], -position[:, 0])
        distance = np.maximum(np.linalg.norm(position, axis=1), PASSING_RADIUS)
        tangent = to_centre + side.numpy() * np.arcsin(PASSING_RADIUS / distance)
        ahead = np.asarray(GOAL) - position
        straight = np.arctan2(ahead[:, 1], ahead[:, 0])
        turn = np.angle(np.exp(1j * (straight - to_centre))) * side.numpy()
        heading = np.where(turn >= np.arcsin(PASSING_RADIUS / distance), straight, tangent)
        pace = np.minimum(1.0, np.linalg.norm(ahead, axis=1) / SPEED)[:, None]
        action = pace * np.stack([np.cos(heading), np.sin(heading)], -1)
        return action.astype(np.float32), {"side": side}
