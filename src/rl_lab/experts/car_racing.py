"""An expert for CarRacing that sees the track itself: it steers for a point ahead on the centre line."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from rl_lab.components.acting import AgentState, Mode
from rl_lab.experts.base import Expert
from rl_lab.records import Observation

AHEAD = 6  # tiles to the point that it steers for
CURVE = 14  # tiles over which the bend of the track is looked at
STEERING, STEERING_DAMPING = 1.8, 0.02
FAST, SLOW = 62.0, 26.0  # target speeds on a straight and in the sharpest bend


class CarRacingExpert(Expert):
    """Steers by the angle to a point `AHEAD` tiles on, minus the rate at which the car turns already; drives as fast as
    the bend of the next tiles allows. What it needs is not in the picture: it looks at the environment."""

    environment: ClassVar = {"id": "CarRacing-v3"}
    environments: ClassVar = r"^CarRacing-"

    def watch(self, environments: list[Any]) -> None:
        """The environments that it plays, in order."""
        self._environments = [environment.unwrapped for environment in environments]

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        chosen = [self._drive(environment) for environment in self._environments]
        return np.asarray(chosen, np.float32), state

    def _drive(self, environment: Any) -> tuple[float, float, float]:
        """Steering, gas and brake as the agent sees them, from -1 to 1."""
        track = np.asarray([tile[2:4] for tile in environment.track])
        headings = np.asarray([tile[1] for tile in environment.track])
        hull = environment.car.hull
        place = np.asarray(hull.position)
        nearest = int(np.square(track - place).sum(1).argmin())
        target = track[(nearest + AHEAD) % len(track)]
        forward = np.asarray(hull.GetWorldVector((0.0, 1.0)))
        error = _angle(forward, target - place)
        steering = -STEERING * error + STEERING_DAMPING * hull.angularVelocity
        bend = np.angle(np.exp(1j * np.diff(headings[(nearest + np.arange(CURVE + 1)) % len(track)])))
        sharpness = min(1.0, float(np.abs(bend).sum()) / 1.6)
        speed = float(np.linalg.norm(hull.linearVelocity))
        wanted = FAST + sharpness * (SLOW - FAST)
        gas = 0.6 if speed < wanted else 0.0
        brake = min(0.6, 0.04 * (speed - wanted - 4.0)) if speed > wanted + 4.0 else 0.0
        return float(np.clip(steering, -1.0, 1.0)), 2.0 * gas - 1.0, 2.0 * brake - 1.0


def _angle(start: np.ndarray, end: np.ndarray) -> float:
    """From one direction to another, counter-clockwise."""
    return float(np.arctan2(start[0] * end[1] - start[1] * end[0], start @ end))
