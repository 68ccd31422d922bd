"""What must hold between phases, and between a phase and the rest of the run. Each breach is one ConfigError."""

from __future__ import annotations

from collections.abc import Sequence

from rl_lab.errors import ConfigError, nearest
from rl_lab.orchestration.conditions import check_metric
from rl_lab.orchestration.phase_records import COLLECTING_TYPES, END, PLACE, Phase, PhaseNames


def check_phases(phases: Sequence[Phase], names: PhaseNames) -> None:
    """Refuse what could never run, never end, or sample from nothing."""
    index_of: dict[str, int] = {}
    for index, phase in enumerate(phases):
        if phase.name in index_of:
            raise ConfigError(
                f"{PLACE}[{index}].name is '{phase.name}', which {PLACE}[{index_of[phase.name]}] has already."
                " Names are unique."
            )
        index_of[phase.name] = index
    for index, phase in enumerate(phases):
        place = f"{PLACE}[{index}]"
        _check_hooks(phase, place)
        _check_duration(phase, place)
        _check_references(phase, place, names, index_of)
    edges = _edges(phases, index_of)
    _check_loops(phases, edges)
    _check_filled(phases, names, edges)


def _check_hooks(phase: Phase, place: str) -> None:
    where = f"{place}.workflow_hooks"
    if phase.type in COLLECTING_TYPES and not phase.collects:
        raise ConfigError(
            f"{where} has no collect, but a phase of type {phase.type} collects. Add collect, or make it type: offline."
        )
    if phase.type not in COLLECTING_TYPES and phase.collects:
        raise ConfigError(
            f"{where} has collect, but a phase of type {phase.type} does not collect. Remove it, or make it"
            " type: online."
        )
    if phase.type == "eval_only" and any(hook.kind != "evaluate" for hook in phase.hooks):
        name = next(hook.name for hook in phase.hooks if hook.kind != "evaluate")
        raise ConfigError(f"{where} has {name}, but a phase of type eval_only only evaluates.")
    if not phase.collects and all(hook.every is not None and hook.every.unit != "cycles" for hook in phase.hooks):
        raise ConfigError(f"{where}: every hook waits for `every`, and nothing else happens, so none would ever run.")
    for index, hook in enumerate(phase.hooks):
        if hook.every is not None and hook.every.unit == "steps" and not phase.collects:
            raise ConfigError(f"{where}[{index}].every is {hook.every}, but the phase never collects: use updates.")
        if hook.every is not None and hook.every.unit == "updates" and not phase.updates:
            raise ConfigError(f"{where}[{index}].every is {hook.every}, but the phase makes no updates: use steps.")


def _check_duration(phase: Phase, place: str) -> None:
    if phase.duration is None:
        return
    if phase.duration.unit == "steps" and not phase.collects:
        raise ConfigError(
            f"{place}: the duration is {phase.duration}, but the phase never collects, so it would never end."
            " Use duration_updates or duration_cycles."
        )
    if phase.duration.unit == "updates" and not phase.updates:
        raise ConfigError(
            f"{place}: the duration is {phase.duration}, but the phase has no update hook, so it would never end."
            " Use duration_steps or duration_cycles."
        )


def _check_references(phase: Phase, place: str, names: PhaseNames, index_of: dict[str, int]) -> None:
    source, role = phase.data_source, phase.controller_role
    if source is not None and source not in names.data_sources:
        raise ConfigError(f"{place}.data_source is '{source}': no such source.{nearest(source, names.data_sources)}")
    if phase.collects and source in names.read_only:
        others = [name for name in names.data_sources if name not in names.read_only]
        raise ConfigError(
            f"{place} collects into '{source}', which takes no records. Name another data_source"
            f" ({', '.join(sorted(others)) or 'none is there'}), or a mixture of both."
        )
    if source is None and phase.updates:
        raise ConfigError(
            f"{place} has update hooks and no data_source. Name one of:"
            f" {', '.join(sorted(names.data_sources)) or 'none'}."
        )
    if role is not None and role not in names.roles:
        raise ConfigError(f"{place}.controller is '{role}': no controller has that role.{nearest(role, names.roles)}")
    targets = {f"{place}.next": phase.next, f"{place}.until.next": phase.until.next if phase.until else None}
    for key, target in targets.items():
        if target is not None and target != END and target not in index_of:
            raise ConfigError(f"{key} is '{target}': no phase has that name.{nearest(str(target), [*index_of, END])}")
    if phase.until is not None:
        check_metric(phase.until.metric, f"{place}.until")
    if phase.until is not None and phase.until.metric.startswith("eval/") and not phase.evaluates:
        raise ConfigError(
            f"{place}.until waits for {phase.until.metric}, but the phase never evaluates. Add evaluate to its hooks."
        )


def _edges(phases: Sequence[Phase], index_of: dict[str, int]) -> list[set[int]]:
    """For each phase, those that can follow it."""
    edges: list[set[int]] = []
    for index, phase in enumerate(phases):
        following: set[int] = set()
        for target in (phase.next, phase.until.next if phase.until and phase.until.next else phase.next):
            if target in index_of:
                following.add(index_of[target])
            elif target is None and index + 1 < len(phases):
                following.add(index + 1)
        edges.append(following)
    return edges


def _check_loops(phases: Sequence[Phase], edges: list[set[int]]) -> None:
    """A loop ends when env steps run out, so one that never collects and has no condition would not."""
    for start, phase in enumerate(phases):
        at, passed = start, [start]
        while len(edges[at]) == 1:
            at = next(iter(edges[at]))
            if at in passed:
                break
            passed.append(at)
        if at == start and edges[passed[-1]] == {start} and not any(phases[index].collects for index in passed):
            raise ConfigError(
                f"{PLACE}[{start}] ('{phase.name}') is part of a loop by `next` in which no phase collects, so it would"
                f" never end. Use repeat, or let the loop end with next: {END}."
            )


def _check_filled(phases: Sequence[Phase], names: PhaseNames, edges: list[set[int]]) -> None:
    """Whatever an update samples from must be filled before or in its phase."""
    for index, phase in enumerate(phases):
        if not phase.updates or phase.data_source is None:
            continue
        for source in _origins(phase.data_source, names):
            fillers = [
                at
                for at, other in enumerate(phases)
                if other.collects and other.data_source is not None and source in _origins(other.data_source, names)
            ]
            if not any(at == index or index in _reachable(at, edges) for at in fillers):
                raise ConfigError(
                    f"{PLACE}[{index}] ('{phase.name}') samples from '{source}', which no phase fills before it: add a"
                    f" phase that collects into {source}, or name a data source that holds data already."
                )


def _origins(source: str, names: PhaseNames, seen: tuple[str, ...] = ()) -> list[str]:
    """The sources that must be filled by collecting before `source` has data: itself, or those that it draws from."""
    others = [name for name in names.data_sources if name not in seen]
    if source in seen:
        raise ConfigError(f"data_sources: {' → '.join([*seen, source])} draw from each other in a circle.")
    if source not in names.data_sources:
        raise ConfigError(f"data_sources.{seen[-1]} draws from '{source}': no such source.{nearest(source, others)}")
    parts = names.parts.get(source)
    if not parts:
        return [] if source in names.prefilled else [source]
    return [origin for part in parts for origin in _origins(part, names, (*seen, source))]


def _reachable(start: int, edges: list[set[int]]) -> set[int]:
    found: set[int] = set()
    todo = [start]
    while todo:
        for index in edges[todo.pop()]:
            if index not in found:
                found.add(index)
                todo.append(index)
    return found
