"""An expert for Push-T: MPPI in the true physics."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from rl_lab.components.acting import AgentState, Mode
from rl_lab.components.planners.mppi import MPPI
from rl_lab.experts.base import Expert
from rl_lab.records import Observation
from rl_lab.simulation.analytic import AnalyticSimulator
from rl_lab.simulation.push_t import SIZE, PushT

REACH = 40.0  # pixels from the disc to where it is sent: the pace of somebody who pushes with care
PLANNER: dict[str, Any] = {
    "horizon": 30, "samples": 192, "iterations": 2, "temperature": 0.05, "std": 0.7, "noise_beta": 2.0,
    "elites": None, "min_std": None, "class_floor": 0.0, "execute": "mean", "discount": 1.0, "particles": 1,
    "bootstrap": "never", "warm_start": True,
}  # fmt: skip


class PushTExpert(Expert):
    """Every decision tries 2 × 192 sequences of 30 in the physics and averages them by their returns. It looks at the
    environment itself, so that it plays alike whatever the agent sees."""

    environment: ClassVar = {"id": "rl_lab/PushT-v0", "image_size": 96}
    environments: ClassVar = r"^rl_lab/PushT"

    def __init__(self) -> None:
        super().__init__()
        self._task = PushT(reach=REACH)
        self.planner = MPPI(action=self._task.action, **PLANNER)
        self.planner.attach(AnalyticSimulator(self._task))
        self._environments: list[Any] | None = None

    def watch(self, environments: list[Any]) -> None:
        self._environments = [environment.unwrapped for environment in environments]

    def initial_state(self, num_envs: int) -> AgentState:
        return self.planner.initial_memory(num_envs)

    @torch.no_grad()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        if self._environments is None:
            seen = observation["vector"]
        else:
            seen = np.stack([environment.state() for environment in self._environments])
        place = self._task.decode(torch.from_numpy(seen).float())
        plan = self.planner.plan(place, state)
        target = self._task.target(place, plan.actions[:, 0])
        return (target / (SIZE / 2) - 1.0).numpy().astype(np.float32), plan.memory
