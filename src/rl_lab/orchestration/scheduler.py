"""The finite-state machine over the phases: what the run does next. Pure logic, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rl_lab.errors import CheckpointError, ConfigError, DataError, nearest
from rl_lab.orchestration.phase_records import END, Hook, HookKind, Phase


class Action(NamedTuple):
    """One thing to do. Update hooks that share a pass share a batch: `new_batch` says when to draw one."""

    hook: str
    kind: HookKind
    phase: Phase
    new_batch: bool = False
    batch_index: int = 0  # which batch of the cycle


@dataclass
class _Progress:
    """The progress of one phase, over all its runs. Marks and credits belong to its hooks, in order."""

    marks: list[int]  # where `every` was last met, or up to which step `ratio` was counted
    credits: list[int]  # what `ratio` has left over, in units of 1/denominator
    steps: int = 0
    updates: int = 0
    cycles: int = 0
    start: list[int] = field(default_factory=lambda: [0, 0, 0])  # steps, updates, cycles when this run of it began
    run: int = 0  # which run in a row (`repeat`)
    streak: int = 0  # how often in a row `until` held
    met: bool = False


class _Segment(NamedTuple):
    """A stretch of a cycle: one hook, or consecutive update hooks, which are interleaved."""

    hooks: tuple[Hook, ...]
    offset: int  # index of the first hook within the phase
    kind: HookKind
    action: Action  # ready-made, for hooks that stand alone


class PhaseScheduler:
    """Says what to do next, and is told what was done.

    A cycle runs the hooks of the phase in order. Consecutive update hooks form a group that goes pass by pass: pass r
    runs every hook of the group that is still due, all on one batch. `ratio` counts updates per env step and keeps the
    remainder; steps collected while the data source is not ready count for nothing, so no burst follows a wait. `every`
    fires at most once in a cycle. Steps and marks of a phase go on when the phase is entered again.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        total_timesteps: int,
        *,
        ready: Callable[[str], bool] | None = None,
    ) -> None:
        if not phases:
            raise ConfigError("training.phases is empty: expected at least one phase.")
        if total_timesteps < 0:
            raise ConfigError(f"training.total_timesteps is {total_timesteps}: expected 0 or more.")
        self.phases, self.total_timesteps = tuple(phases), int(total_timesteps)
        self._ready = ready or (lambda source: True)
        self._index_of = {phase.name: index for index, phase in enumerate(self.phases)}
        self._plans = [_segments(phase) for phase in self.phases]
        self._progress = [_Progress([0] * len(phase.hooks), [0] * len(phase.hooks)) for phase in self.phases]
        self.env_steps = 0
        self.updates = 0
        self.waiting_for: str | None = None  # the data source that updates wait for
        self._capped: str | None = None  # the first phase that total_timesteps cut short
        self._finished = False
        self._pending: Action | None = None
        self._dues: list[int] = []  # how often each update of the current group runs in this cycle
        self._segment = -1  # where in the cycle; -1: before it, where the phase's end is looked at
        self._go_to(0)

    # Asking -----------------------------------------------------------------------------------------------------------

    def current_phase(self) -> Phase:
        return self._phase

    def phase_counts(self) -> dict[str, int]:
        """Index of the phase, and its steps, updates and cycles so far."""
        p = self._now
        return {"index": self._index, "steps": p.steps, "updates": p.updates, "cycles": p.cycles}

    def progress(self) -> float | None:
        """The share of the run that is done, 0 to 1, by env steps; by the phase's updates where nothing is ever
        collected."""
        if any(phase.collects for phase in self.phases):
            return self.env_steps / self.total_timesteps if self.total_timesteps else None
        left = self.updates_left()
        return None if left is None else 1.0 - left / max(1, left + self._now.updates - self._now.start[1])

    def updates_left(self) -> int | None:
        """Updates until the phase's budget is used up, where it is counted in updates."""
        duration, p = self._phase.duration, self._now
        if duration is None or duration.unit != "updates":
            return None
        return max(0, duration.value - (p.updates - p.start[1]))

    def next_action(self) -> Action | None:
        """The action to take now; the same answer until `advance` is called. None: the run is complete."""
        if self._pending is None and not self._finished:
            self._pending = self._find()
        return self._pending

    def _find(self) -> Action | None:
        while True:
            if self._segment < 0:
                if self._over():
                    if self._leave():
                        continue
                    self._finished = True
                    return None
                self._segment = 0
            plan = self._plan
            while self._segment < len(plan):
                segment = plan[self._segment]
                action = self._from_group(segment) if segment.kind == "update" else self._from_single(segment)
                if action is not None:
                    return action
                self._segment += 1
                self._left = -1
                self._dues = []
            self._now.cycles += 1
            self._segment = -1

    def _from_single(self, segment: _Segment) -> Action | None:
        if self._left < 0:
            self._left = self._due(segment.hooks[0], segment.offset)
        if self._left == 0 or (segment.kind == "collect" and self._steps_used_up()):
            return None
        return segment.action

    def _from_group(self, segment: _Segment) -> Action | None:
        if not self._dues:
            self._dues = self._group_dues(segment)
            self._pass, self._slot, self._fresh = 0, 0, True
        hooks = segment.hooks
        while True:
            while self._slot < len(hooks):
                if self._dues[self._slot] > self._pass:
                    if self._fresh and not self._may_start_pass():
                        return None
                    hook = hooks[self._slot]
                    return Action(hook.name, "update", self._phase, self._fresh, self._pass)
                self._slot += 1
            self._pass, self._slot, self._fresh = self._pass + 1, 0, True
            if self._pass >= max(self._dues):
                return None

    def _may_start_pass(self) -> bool:
        """Updates end exactly with the phase's budget, and only while there is data (a stream may run dry)."""
        duration, p = self._phase.duration, self._now
        if duration is not None and duration.unit == "updates" and p.updates - p.start[1] >= duration.value:
            return False
        return self._pass == 0 or self._source_ready()

    def _group_dues(self, segment: _Segment) -> list[int]:
        """The number of runs of each hook of the group in this cycle."""
        ready = self._source_ready()
        p, dues = self._now, []
        for index, hook in enumerate(segment.hooks, segment.offset):
            if hook.ratio is None:
                dues.append(self._due(hook, index) if ready else 0)
                continue
            steps, p.marks[index] = p.steps - p.marks[index], p.steps
            credit = p.credits[index] + (hook.ratio.numerator * steps if ready else 0)
            due, p.credits[index] = divmod(credit, hook.ratio.denominator)
            dues.append(due)
        return dues

    def _due(self, hook: Hook, index: int) -> int:
        every = hook.every
        if every is None:
            return hook.times
        p = self._now
        count = p.steps if every.unit == "steps" else p.updates if every.unit == "updates" else p.cycles + 1
        passed = count - p.marks[index]
        if passed < every.value:
            return 0
        p.marks[index] += passed - passed % every.value
        return hook.times

    def _source_ready(self) -> bool:
        source = self._phase.data_source
        if source is None or self._ready(source):
            self.waiting_for = None
            return True
        if not self._collects:
            raise DataError(
                f"Phase '{self._phase.name}' updates from '{source}', which holds too few records for one batch, and"
                " the phase collects none. Put a longer collecting phase before it, or use smaller batches."
            )
        self.waiting_for = source
        return False

    # Being told -------------------------------------------------------------------------------------------------------

    def advance(self, action: Action, *, steps: int = 0, updates: int = 0, finished: bool = True) -> None:
        """`action` is done, after `steps` env steps and `updates` updates. Unless it is `finished`, it comes again."""
        self._pending = None
        p = self._now
        if steps:
            p.steps += steps
            self.env_steps += steps
        if action.kind == "update":
            p.updates += updates
            self.updates += updates
            self._slot += 1
            self._fresh = False
        else:
            p.updates += updates
            self.updates += updates
            self._left -= int(finished)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Show the newest metrics to the phase's `until`; it ends with its cycle once the condition holds."""
        until, p = self._phase.until, self._now
        if until is None or until.metric not in metrics:
            return
        p.streak = p.streak + 1 if until.met_by(float(metrics[until.metric])) else 0
        p.met = p.met or p.streak >= until.times

    def jump(self, name: str) -> None:
        """Go to a phase by name, at once; nothing happens where it is the current one."""
        if name not in self._index_of:
            raise ConfigError(f"plan_phase chose '{name}': no phase has that name.{nearest(name, self._index_of)}")
        if name != self._phase.name:
            self._pending, self._finished = None, False
            self._go_to(self._index_of[name])

    def look_for_data_again(self) -> None:
        """After data were given up: updates that were due are not, where there are none for them now."""
        if self._dues and not self._source_ready():
            self._dues = []

    # Moving between phases --------------------------------------------------------------------------------------------

    def _steps_used_up(self) -> bool:
        duration, p = self._phase.duration, self._now
        if self.env_steps >= self.total_timesteps:
            return True
        return duration is not None and duration.unit == "steps" and p.steps - p.start[0] >= duration.value

    def _over(self) -> bool:
        p, duration = self._now, self._phase.duration
        if p.met:
            return True
        if (self._collects or p.steps > p.start[0]) and self.env_steps >= self.total_timesteps:
            self._capped = self._capped or self._phase.name
            return True
        if duration is None:
            return False
        unit = ("steps", "updates", "cycles").index(duration.unit)
        return (p.steps, p.updates, p.cycles)[unit] - p.start[unit] >= duration.value

    def _leave(self) -> bool:
        """Enter what follows the phase that is over; False where nothing does."""
        phase, p = self._phase, self._now
        if not p.met and p.run + 1 < phase.repeat and self._capped != phase.name:
            self._go_to(self._index, run=p.run + 1)
            return True
        target = phase.until.next if p.met and phase.until and phase.until.next else phase.next
        if target == END:
            return False
        index = self._index + 1 if target is None else self._index_of[target]
        if index >= len(self.phases):
            return False
        if index <= self._index and self.env_steps >= self.total_timesteps:
            return False  # a loop ends when the env steps are used up
        self._go_to(index)
        return True

    def _go_to(self, index: int, run: int = 0) -> None:
        self._enter(index)
        p = self._now
        p.start = [p.steps, p.updates, p.cycles]
        p.run, p.streak, p.met = run, 0, False

    def _enter(self, index: int) -> None:
        """Stand at the beginning of a cycle of a phase."""
        self._index = index
        self._phase, self._plan, self._now = self.phases[index], self._plans[index], self._progress[index]
        self._collects = self._phase.collects
        self._segment = -1
        self._left = -1  # runs that the segment's hook still has in this cycle; -1: not known yet
        self._dues = []
        self._pass = self._slot = 0
        self._fresh = True
        self.waiting_for = None

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values: where the run stands, to the action."""
        return {
            "phase": self._phase.name,
            "env_steps": self.env_steps,
            "updates": self.updates,
            "capped": self._capped,
            "finished": self._finished,
            "segment": self._segment,
            "left": self._left,
            "dues": list(self._dues),
            "pass": self._pass,
            "slot": self._slot,
            "fresh": self._fresh,
            "progress": {
                phase.name: {name: _plain(value) for name, value in vars(progress).items()}
                for phase, progress in zip(self.phases, self._progress, strict=True)
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. Budgets may have grown since: a run that had used them up goes on."""
        for name, saved in state["progress"].items():
            if name not in self._index_of or len(saved["marks"]) != len(self.phases[self._index_of[name]].hooks):
                raise CheckpointError(
                    f"The checkpoint was made with other phases: '{name}' is missing or has other hooks now. Resume"
                    " with the phases of the run's own config.yaml."
                )
            self._progress[self._index_of[name]] = _Progress(**{key: _plain(value) for key, value in saved.items()})
        self.env_steps, self.updates = state["env_steps"], state["updates"]
        self._capped, self._finished, self._pending = state["capped"], False, None
        grown = self._capped is not None and self.env_steps < self.total_timesteps
        self._enter(self._index_of[self._capped if grown and self._capped else state["phase"]])
        if grown:
            self._capped = None
        elif not state["finished"]:
            self._segment, self._left, self._dues = state["segment"], state["left"], list(state["dues"])
            self._pass, self._slot, self._fresh = state["pass"], state["slot"], state["fresh"]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _segments(phase: Phase) -> list[_Segment]:
    """Cut the hooks of a phase into single hooks and groups of consecutive updates."""
    segments: list[_Segment] = []
    group: list[Hook] = []
    for index, hook in enumerate(phase.hooks):
        if hook.kind == "update":
            group.append(hook)
            following = phase.hooks[index + 1] if index + 1 < len(phase.hooks) else None
            if following is None or following.kind != "update":
                first = index + 1 - len(group)
                segments.append(_Segment(tuple(group), first, "update", Action(group[0].name, "update", phase)))
                group = []
        else:
            segments.append(_Segment((hook,), index, hook.kind, Action(hook.name, hook.kind, phase)))
    return segments
