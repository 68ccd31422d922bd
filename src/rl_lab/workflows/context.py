"""Everything that a workflow is given. It builds nothing itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rl_lab.components.controllers.manager import ControllerManager
from rl_lab.data_sources.base import DataSource
from rl_lab.environments.base import VectorEnv
from rl_lab.errors import ConfigError, nearest
from rl_lab.records import VectorStep
from rl_lab.simulation.service import SimulatorService
from rl_lab.specs import ActionSpec, ObservationSpec

Part = TypeVar("Part")


class MetricsSink(Protocol):
    """Where a workflow may write values outside the returned metrics (`log_metrics`)."""

    def scalar(self, name: str, value: float) -> None: ...


@dataclass(frozen=True)
class PhaseView:
    """What a workflow may know of the running phase."""

    name: str
    type: str
    data_source: str | None = None
    controller_role: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkflowContext:
    """The wired parts of one run."""

    config: Mapping[str, Any]  # the resolved configuration, plain containers
    device: torch.device
    seed: int
    observation_spec: Mapping[str, ObservationSpec]
    action_spec: ActionSpec
    components: Mapping[str, nn.Module]
    controllers: ControllerManager
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    data_sources: Mapping[str, DataSource] = field(default_factory=dict)
    train_envs: VectorEnv | None = None  # None where a run is only loaded to act
    eval_envs: VectorEnv | None = None
    initial: VectorStep | None = None  # the first step of the training environments
    simulator: SimulatorService = field(default_factory=SimulatorService)  # the workflow attaches its model
    checkpoints: Any = None  # orchestration.CheckpointManager
    metrics: MetricsSink | None = None
    global_step: int = 0
    compile: bool = False  # training.compile resolved against the device
    overlap: bool = False  # the training environments step while updates run (training.overlap)
    autocast_dtype: torch.dtype | None = None  # bf16 compute on CUDA, None: float32

    def component(self, name: str, kind: type[Part]) -> Part:
        """The component of that name, which must be of that kind."""
        return _checked(f"components.{name}", self.components.get(name), kind, self.components)

    def controller(self, role: str, kind: type[Part]) -> Part:
        """The controller with that role, which must be of that kind."""
        return _checked(f"controllers.{role}", self.controllers.get(role), kind, self.controllers)

    def optimizer(self, name: str, kind: type[Part]) -> Part:
        """The optimiser of that name, which must be of that kind."""
        return _checked(f"optimizers.{name}", self.optimizers.get(name), kind, self.optimizers)

    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scale gradients down to a global norm; returns the norm before, on the device."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def autocast(self) -> torch.autocast:
        """Mixed precision as configured; parameters stay float32."""
        return torch.autocast(
            self.device.type, self.autocast_dtype or torch.bfloat16, enabled=self.autocast_dtype is not None
        )


def _checked(place: str, part: Any, kind: type[Part], known: Iterable[str]) -> Part:
    if part is None:
        raise ConfigError(f"{place} is missing: the workflow needs it.{nearest(place.split('.')[1], known)}")
    if not isinstance(part, kind):
        raise ConfigError(f"{place} is a {type(part).__name__}: this workflow needs a {kind.__name__}.")
    return part
