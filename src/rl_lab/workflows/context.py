"""Everything that a workflow is given. It builds nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rl_lab.components.controller_manager import ControllerManager
from rl_lab.data_sources.base import DataSource
from rl_lab.environments.base import VectorEnv
from rl_lab.errors import ConfigError, nearest
from rl_lab.metrics.values import Metrics
from rl_lab.records import VectorStep
from rl_lab.simulation.service import SimulatorService
from rl_lab.specs import ActionSpec, ObservationSpec

Part = TypeVar("Part")


class EnvsFactory(Protocol):
    """Makes further environments of the run's task, with held-out seeds or with those that `reset` is given."""

    def __call__(self, *, num_envs: int) -> VectorEnv: ...


class MetricsSink(Protocol):
    """Takes values that a workflow writes outside the returned metrics (`log_metrics`)."""

    def scalar(self, name: str, value: float) -> None: ...


@dataclass(frozen=True)
class PhaseView:
    """The facts about the running phase that a workflow may know."""

    name: str
    type: str
    data_source: str | None = None
    controller_role: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PhaseSteps:
    """The facts about a phase that a workflow may know before the run: its place, its hooks in order and its
    options."""

    place: str  # training.phases[2]
    name: str
    hooks: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HookResult:
    """The result of a workflow's own hook where bare metrics do not say enough."""

    metrics: Metrics = field(default_factory=dict)  # logged under workflow/
    env_steps: int = 0  # decisions that it took in environments of its own
    updates: int = 0
    finished: bool = True  # False: a part of the work is done, the rest follows in the next call
    log: bool = False  # write a row of metrics now


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
    make_envs: EnvsFactory | None = None  # None where a run is only loaded to act
    simulator: SimulatorService = field(default_factory=SimulatorService)  # the workflow attaches its model
    checkpoints: Any = None  # orchestration.CheckpointManager
    metrics: MetricsSink | None = None
    global_step: int = 0
    compile: bool = False  # training.compile resolved against the device
    overlap: bool = False  # the training environments step while updates run (training.overlap)
    autocast_dtype: torch.dtype | None = None  # bf16 compute on CUDA, None: float32

    @property
    def modules(self) -> list[nn.Module]:
        """All components and controllers."""
        return [*self.components.values(), *(module for _, module in self.controllers.items())]

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

    @property
    def autocast(self) -> Callable[[], torch.autocast]:
        """`with context.autocast():` is mixed precision as configured; parameters stay float32."""
        dtype = self.autocast_dtype or torch.bfloat16
        return partial(torch.autocast, self.device.type, dtype, enabled=self.autocast_dtype is not None)

    @property
    def planning_dtype(self) -> torch.dtype | None:
        """That of the weights' copies that plans are computed with; None: there are none. float16 has the mantissa of
        TF32 and takes half as long, so it is for a GPU where products may have short mantissas."""
        short = self.autocast_dtype is not None or torch.get_float32_matmul_precision() != "highest"
        return torch.float16 if short and self.device.type == "cuda" else None


def _checked(place: str, part: Any, kind: type[Part], known: Iterable[str]) -> Part:
    if part is None:
        raise ConfigError(f"{place} is missing: the workflow needs it.{nearest(place.split('.')[1], known)}")
    if not isinstance(part, kind):
        raise ConfigError(f"{place} is a {type(part).__name__}: this workflow needs a {kind.__name__}.")
    return part
