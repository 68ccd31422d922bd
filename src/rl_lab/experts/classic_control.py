"""Rules that solve CartPole and swing up a pendulum."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rl_lab.components.acting import AgentState, Mode
from rl_lab.experts.base import Expert
from rl_lab.records import Observation


class CartPoleExpert(Expert):
    """Push to the side that the pole falls to: right where θ + θ̇/2 > 0. It balances for all 500 steps."""

    environment: ClassVar = {"id": "CartPole-v1"}
    environments: ClassVar = r"^CartPole-"

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        angle, velocity = observation["vector"][:, 2], observation["vector"][:, 3]
        return (angle + 0.5 * velocity > 0.0).astype(np.int32)[:, None], state


class PendulumExpert(Expert):
    """Energy shaping far from the top, a PD controller near it.

    With mass and length 1 and g = 10 the energy is E = θ̇²/6 + 5(cos θ - 1), and 0 at rest at the top. Away from it the
    torque -4·E·sign(θ̇) brings the energy to 0; where |θ| < 0.5 the torque is -(20θ + 2θ̇). Torques are cut off at 2.
    """

    environment: ClassVar = {"id": "Pendulum-v1"}
    environments: ClassVar = r"^Pendulum-"

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        cosine, sine, velocity = observation["vector"].astype(np.float64).T
        angle = np.arctan2(sine, cosine)
        energy = velocity**2 / 6.0 + 5.0 * (cosine - 1.0)
        swing = -4.0 * energy * np.where(velocity >= 0.0, 1.0, -1.0)
        balance = -(20.0 * angle + 2.0 * velocity)
        torque = np.clip(np.where(np.abs(angle) < 0.5, balance, swing), -2.0, 2.0)
        return (torque / 2.0).astype(np.float32)[:, None], state
