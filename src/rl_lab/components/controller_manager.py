"""Controllers by role: who acts, who learns, and with which optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rl_lab.components.acting import ActingController, LearningController
from rl_lab.errors import ConfigError, nearest
from rl_lab.metrics.values import Metrics, pack
from rl_lab.nn.optimizers import gradient_step
from rl_lab.records import Batch, BatchSpec

RANDOM_ROLE = "random"  # built in: uniform actions, no controller object behind it
DISTILL_ROLES = ("distill_target", "prior")  # learn beside any workflow, from its batches (the hook `distill`)


class ControllerManager:
    """The things that choose or judge actions, by role: `policy`, `critic`, `planner`, `distill_target`, …"""

    def __init__(self, controllers: Mapping[str, nn.Module]) -> None:
        self._controllers = dict(controllers)
        self._optimizers: Mapping[str, torch.optim.Optimizer] = {}

    def get(self, role: str) -> nn.Module:
        if role not in self._controllers:
            raise ConfigError(f"No controller has the role '{role}'.{nearest(role, self._controllers)}")
        return self._controllers[role]

    def __contains__(self, role: str) -> bool:
        return role == RANDOM_ROLE or role in self._controllers

    def __iter__(self) -> Iterator[str]:
        return iter(self._controllers)

    def items(self) -> list[tuple[str, nn.Module]]:
        return list(self._controllers.items())

    def acting(self, role: str | None) -> ActingController | None:
        """The controller with that role, where it can act by itself."""
        controller = self._controllers.get(role) if role is not None else None
        return controller if isinstance(controller, ActingController) else None

    # Learning ---------------------------------------------------------------------------------------------------------

    def attach_optimizers(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """`learn` takes its steps with the optimiser that has the role's name."""
        self._optimizers = optimizers

    @property
    def distilled(self) -> list[str]:
        """The roles that the hook `distill` teaches: those of `DISTILL_ROLES` that are there, at least one."""
        return [role for role in DISTILL_ROLES if role in self._controllers] or [DISTILL_ROLES[0]]

    def batch_spec(self, device: str) -> BatchSpec | None:
        """The batches that the controller to be distilled would choose, for workflows without updates of their own."""
        target = self._controllers.get(self.distilled[0])
        return target.batch_spec(device) if isinstance(target, LearningController) else None

    def learn(self, role: str, batch: Batch, statistics: Mapping[str, Any] | None = None) -> Metrics:
        """One gradient step of the controller with that role. `statistics`: those of the dataset that the batch comes
        from, by field; None where it comes from none."""
        controller, optimizer = self.learner(role)
        if statistics is not None:
            controller.use_statistics(statistics)
        loss, metrics = controller.loss(batch)
        step = gradient_step(optimizer, loss)
        controller.after_update()
        return pack({"loss": loss.detach(), **metrics, **{f"optimizer/{name}": value for name, value in step.items()}})

    def learner(self, role: str) -> tuple[LearningController, Any]:
        """The controller with that role, which must learn, and its optimiser, which must be there."""
        controller = self.get(role)
        if not isinstance(controller, LearningController):
            raise ConfigError(f"controllers.{role} is a {type(controller).__name__}, which does not learn.")
        if role not in self._optimizers:
            raise ConfigError(
                f"controllers.{role} learns, and optimizers.{role} is missing: add optimizers: {{{role}: {{modules: "
                f"[{role}], lr: 1e-3}}}}, and leave its modules out of the other optimisers (modules: rest)."
            )
        return controller, self._optimizers[role]

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict]:
        return {role: controller.state_dict() for role, controller in self._controllers.items()}

    def load_state_dict(self, state: Mapping[str, dict]) -> None:
        for role, controller in self._controllers.items():
            controller.load_state_dict(state[role])
