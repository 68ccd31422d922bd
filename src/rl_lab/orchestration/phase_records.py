"""The records that `training.phases` becomes, and what phases may refer to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

Unit = Literal["steps", "updates", "cycles"]
HookKind = Literal["collect", "update", "evaluate", "own"]
PhaseType = Literal["online", "offline", "eval_only", "planner_only", "warmup"]

PHASE_TYPES: tuple[PhaseType, ...] = ("online", "offline", "eval_only", "planner_only", "warmup")
COLLECTING_TYPES = ("online", "planner_only", "warmup")
END = "end"  # reserved target of `next`: the run ends here
PLACE = "training.phases"


@dataclass(frozen=True)
class Amount:
    """A number of env steps, updates or cycles."""

    value: int
    unit: Unit

    def __str__(self) -> str:
        return f"{self.value}_{self.unit}"


@dataclass(frozen=True)
class Hook:
    """One entry of `workflow_hooks`: run `times` in each cycle, or in those cycles where `every` has come round, or
    `ratio` times per env step."""

    name: str
    kind: HookKind
    times: int = 1
    every: Amount | None = None
    ratio: Fraction | None = None

    def __str__(self) -> str:
        if self.ratio is not None:
            return f"{self.name} ×{float(self.ratio):g}/step"
        count = f" ×{self.times}" if self.times != 1 else ""
        return f"{self.name}{count}" + (f" every {self.every}" if self.every else "")


@dataclass(frozen=True)
class Until:
    """The phase ends once `metric` was good enough `times` times in a row; `next` then wins over the phase's own."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    times: int = 1
    next: str | None = None

    def met_by(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


@dataclass(frozen=True)
class Phase:
    """One phase, checked and with every default filled in."""

    name: str
    type: PhaseType
    hooks: tuple[Hook, ...]
    duration: Amount | None = None  # None: until `until` holds or training.total_timesteps is reached
    data_source: str | None = None
    controller_role: str | None = None
    repeat: int = 1
    until: Until | None = None
    next: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def collects(self) -> bool:
        return any(hook.kind == "collect" for hook in self.hooks)

    @property
    def updates(self) -> bool:
        return any(hook.kind == "update" for hook in self.hooks)

    @property
    def evaluates(self) -> bool:
        return any(hook.kind == "evaluate" for hook in self.hooks)


@dataclass(frozen=True)
class PhaseNames:
    """Names that phases may refer to, and defaults from the rest of the configuration."""

    update_hooks: tuple[str, ...]  # the workflow's own
    other_hooks: tuple[str, ...] = ()
    named_hooks: tuple[str, ...] = ()  # updates that run only where a phase names them
    data_sources: Collection[str] = ("replay",)
    prefilled: Collection[str] = ()  # sources that hold data before the run starts
    parts: Mapping[str, Collection[str]] = field(default_factory=dict)  # what a source itself draws from
    read_only: Collection[str] = ()  # sources that no phase can collect into
    roles: Collection[str] = ("random",)  # what `controller` may name
    default_ratio: float = 1.0  # updates per env step where the phase does not say
    evaluate_every: int | None = None  # evaluation.every: the frequency of a bare `evaluate`

    @property
    def kinds(self) -> dict[str, HookKind]:
        kinds: dict[str, HookKind] = {"collect": "collect", "evaluate": "evaluate"}
        kinds.update(dict.fromkeys((*self.update_hooks, *self.named_hooks), "update"))
        kinds.update(dict.fromkeys(self.other_hooks, "own"))
        return kinds
