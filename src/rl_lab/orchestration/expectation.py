"""How many updates a run will make, reckoned from its phases before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_lab.data_sources.base import Wait
from rl_lab.orchestration.phase_records import Hook, Phase


def expected_updates(
    phases: Sequence[Phase], *, total_timesteps: int, num_envs: int, waits: Mapping[str, Wait]
) -> dict[str, int] | None:
    """About how many updates each phase makes, where no condition ends it earlier. None: the phases form a loop, and
    it cannot be said."""
    if any(phase.next is not None for phase in phases):
        return None
    left, collected = total_timesteps, dict.fromkeys(waits, 0)
    counts: dict[str, int] = {}
    for phase in phases:
        if not phase.collects:
            counts[phase.name] = _offline(phase)
            continue
        source = phase.data_source or ""
        wait = waits.get(source, Wait())
        steps = min(left, _steps(phase, num_envs, left))
        left -= steps
        used = steps if wait.each_time else max(0, steps - max(0, wait.records - collected.get(source, 0)))
        collected[source] = collected.get(source, 0) + steps
        counts[phase.name] = sum(_online(hook, used, phase, num_envs, wait) for hook in _updates(phase))
        if phase.duration is not None and phase.duration.unit == "updates":
            counts[phase.name] = min(counts[phase.name], phase.duration.value * phase.repeat)
    return counts


def _updates(phase: Phase) -> list[Hook]:
    return [hook for hook in phase.hooks if hook.kind == "update"]


def _offline(phase: Phase) -> int:
    duration, hooks = phase.duration, _updates(phase)
    if duration is None or not hooks:
        return 0
    if duration.unit == "updates":
        return duration.value * phase.repeat
    return duration.value * phase.repeat * sum(hook.times for hook in hooks if hook.every is None)


def _cycle(phase: Phase, num_envs: int) -> int:
    """Env steps of one cycle."""
    return num_envs * sum(hook.times for hook in phase.hooks if hook.kind == "collect")


def _steps(phase: Phase, num_envs: int, left: int) -> int:
    duration = phase.duration
    if duration is None or duration.unit == "updates":
        return left
    return duration.value * phase.repeat * (_cycle(phase, num_envs) if duration.unit == "cycles" else 1)


def _online(hook: Hook, steps: int, phase: Phase, num_envs: int, wait: Wait) -> int:
    if hook.ratio is not None:
        return int(hook.ratio * steps)
    if wait.each_time:
        return steps // max(1, wait.records) * hook.times
    every = hook.every
    if every is None or every.unit != "steps":
        cycles = steps // max(1, _cycle(phase, num_envs))
        return cycles // (every.value if every is not None else 1) * hook.times
    return steps // every.value * hook.times
