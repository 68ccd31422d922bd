"""The context's handle on the run's model."""

from __future__ import annotations

from rl_lab.errors import ConfigError
from rl_lab.simulation.simulator import Simulator


class SimulatorService:
    """Holds the run's simulator, which a workflow may exchange (for a model that was re-trained, say).

    Planners keep the service, so they always plan in the present model.
    """

    def __init__(self, simulator: Simulator | None = None) -> None:
        self._simulator = simulator

    def attach(self, simulator: Simulator) -> None:
        """Plan in this model from now on."""
        self._simulator = simulator

    @property
    def is_attached(self) -> bool:
        return self._simulator is not None

    @property
    def simulator(self) -> Simulator:
        if self._simulator is None:
            raise ConfigError(
                "No simulator is attached: a planner was asked to plan before the workflow gave it a model. Workflows"
                " attach theirs with context.simulator.attach(…) in _bind_context."
            )
        return self._simulator
