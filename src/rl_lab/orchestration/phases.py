"""Reads `training.phases`: what each phase runs, for how long, on which data. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from rl_lab.errors import ConfigError, nearest
from rl_lab.orchestration.phase_checks import check_phases
from rl_lab.orchestration.phase_records import (
    COLLECTING_TYPES,
    END,
    PHASE_TYPES,
    PLACE,
    Amount,
    Hook,
    HookKind,
    Phase,
    PhaseNames,
    PhaseType,
    Unit,
    Until,
)

__all__ = ["Amount", "Hook", "Phase", "PhaseNames", "Until", "parse_amount", "parse_phases"]

HOOK_ALIASES = {"world_model": "update_world_model", "controller": "update_controller", "eval": "evaluate"}

_DURATIONS: dict[str, Unit] = {"duration_steps": "steps", "duration_updates": "updates", "duration_cycles": "cycles"}
_KEYS = (
    "name",
    "type",
    "duration",
    *_DURATIONS,
    "workflow_hooks",
    "buffer",
    "data_source",
    "controller",
    "controller_role",
    "repeat",
    "until",
    "next",
    "options",
)
_FREQUENCIES = ("times", "every", "ratio")
_AMOUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e\+?\d+)?)(?:[_ ]?(?:env_)?(step|update|cycle)s?)?", re.IGNORECASE)


def parse_phases(raw: Sequence[Any] | None, names: PhaseNames) -> tuple[Phase, ...]:
    """Read `training.phases`. Without any, one implicit online phase runs until training.total_timesteps."""
    if raw is None:
        phases: tuple[Phase, ...] = (_implicit_phase(names),)
    elif isinstance(raw, str | Mapping) or not isinstance(raw, Sequence) or not raw:
        raise ConfigError(f"{PLACE} is {raw!r}: expected a list of phases, or null for one default online phase.")
    else:
        phases = tuple(_parse_phase(entry, f"{PLACE}[{index}]", index, names) for index, entry in enumerate(raw))
    check_phases(phases, names)
    return phases


def _implicit_phase(names: PhaseNames) -> Phase:
    hooks = _default_hooks("online", names)
    if names.evaluate_every:
        hooks = (*hooks, Hook("evaluate", "evaluate", every=Amount(names.evaluate_every, "steps")))
    return Phase("train", "online", hooks, data_source=_default_source(names))


def _parse_phase(entry: Any, place: str, index: int, names: PhaseNames) -> Phase:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{place} is {entry!r}: expected a mapping with name, type, a duration and workflow_hooks.")
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"{place}.{key} is not a key of a phase.{nearest(str(key), _KEYS)}")
    type_ = entry.get("type", "online")
    if type_ not in PHASE_TYPES:
        raise ConfigError(f"{place}.type is {type_!r}: not a phase type.{nearest(str(type_), PHASE_TYPES)}")
    name = entry["name"] if entry.get("name") is not None else f"{type_}_{index}"
    if not isinstance(name, str) or not name.strip() or name == END:
        raise ConfigError(
            f"{place}.name is {name!r}: expected a text, which is not empty and not '{END}', which ends the run."
        )
    hooks = _parse_hooks(entry.get("workflow_hooks"), place, type_, names)
    role = _either(entry, "controller", "controller_role", place)
    source = _either(entry, "buffer", "data_source", place)
    needs_source = any(hook.kind != "evaluate" for hook in hooks)
    return Phase(
        name=name,
        type=type_,
        hooks=hooks,
        duration=_parse_duration(entry, place, type_),
        data_source=source if source is not None else _default_source(names) if needs_source else None,
        controller_role=role if role is not None else "planner" if type_ == "planner_only" else None,
        repeat=_positive(entry.get("repeat", 1), f"{place}.repeat", "how many times the phase runs in a row"),
        until=_parse_until(entry["until"], f"{place}.until") if entry.get("until") is not None else None,
        next=entry.get("next"),
        options=_options(entry.get("options"), f"{place}.options"),
    )


def _options(value: Any, place: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{place} is {value!r}: expected a mapping.")
    return dict(value or {})


def _default_source(names: PhaseNames) -> str | None:
    """The only source there is, or `replay` among several."""
    sources = list(names.data_sources)
    return sources[0] if len(sources) == 1 else "replay" if "replay" in sources else None


def _either(entry: Mapping[str, Any], short: str, long: str, place: str) -> Any:
    """The value of a key that has two spellings."""
    if entry.get(short) is not None and entry.get(long) is not None and entry[short] != entry[long]:
        raise ConfigError(
            f"{place} has both {short}: {entry[short]} and {long}: {entry[long]}. They are two spellings of one"
            " setting: keep one."
        )
    return entry.get(short) if entry.get(short) is not None else entry.get(long)


# Numbers --------------------------------------------------------------------------------------------------------------


def _positive(value: Any, place: str, meaning: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{place} is {value!r}: expected a whole number ({meaning}).")
    if value <= 0:
        raise ConfigError(f"{place} is {value}: expected a number above 0 ({meaning}).")
    return value


def parse_amount(value: Any, place: str, *, bare: Unit) -> Amount:
    """`10_000_steps`, `500_updates`, `5_cycles`, or a number in the unit `bare`."""
    if not isinstance(value, str):
        return Amount(_positive(value, place, f"{bare}, or a text such as '500_updates'"), bare)
    match = _AMOUNT.fullmatch(value.strip())
    if match:
        unit = f"{match[2].lower()}s" if match[2] else bare
        return Amount(_positive(float(match[1].replace("_", "")), place, unit), unit)  # type: ignore[arg-type]
    raise ConfigError(
        f"{place} is '{value}': expected a number above 0 with a unit, such as 10_000_steps, 500_updates or 5_cycles."
    )


def _parse_duration(entry: Mapping[str, Any], place: str, type_: PhaseType) -> Amount | None:
    given = [key for key in ("duration", *_DURATIONS) if entry.get(key) is not None]
    if len(given) > 1:
        raise ConfigError(f"{place} has {' and '.join(given)}: a phase has one duration. Keep one of them.")
    if given:
        unit = _DURATIONS.get(given[0])
        amount = parse_amount(entry[given[0]], f"{place}.{given[0]}", bare=unit or "steps")
        if unit is not None and amount.unit != unit:
            raise ConfigError(f"{place}.{given[0]} is {entry[given[0]]!r}: expected a number of {unit}.")
        return amount
    if type_ == "eval_only":
        return Amount(1, "cycles")
    if entry.get("until") is not None and type_ in COLLECTING_TYPES:
        return None
    raise ConfigError(
        f"{place} has no duration: give one of duration_steps, duration_updates, duration_cycles, or"
        " duration: 10_000_steps."
    )


# Hooks ----------------------------------------------------------------------------------------------------------------


def _default_hooks(type_: PhaseType, names: PhaseNames) -> tuple[Hook, ...]:
    """The hooks of a phase without `workflow_hooks`."""
    ratio = Fraction(names.default_ratio).limit_denominator(10**6)
    # The joint update is the algorithm; the hooks beside it do a part of it each, for curricula.
    learning = ("update",) if "update" in names.update_hooks else names.update_hooks
    if type_ == "eval_only":
        return (Hook("evaluate", "evaluate"),)
    if type_ == "offline":
        return tuple(Hook(name, "update") for name in learning)
    learns = type_ == "online" and ratio > 0
    updates = tuple(Hook(name, "update", ratio=ratio) for name in learning) if learns else ()
    return (Hook("collect", "collect"), *updates)


def _parse_hooks(raw: Any, place: str, type_: PhaseType, names: PhaseNames) -> tuple[Hook, ...]:
    if raw is None:
        return _default_hooks(type_, names)
    if isinstance(raw, str | Mapping) or not isinstance(raw, Sequence) or not raw:
        raise ConfigError(f"{place}.workflow_hooks is {raw!r}: expected a list such as [collect, update, evaluate].")
    named = [_hook_name(entry, f"{place}.workflow_hooks[{index}]", names) for index, entry in enumerate(raw)]
    collects = any(name == "collect" for name, _ in named)
    bare: Unit = "steps" if collects else "updates"
    hooks = []
    for index, (name, frequency) in enumerate(named):
        hook = _parse_hook(name, frequency, f"{place}.workflow_hooks[{index}]", names.kinds[name], bare)
        if hook.kind == "evaluate" and not frequency and names.evaluate_every and type_ != "eval_only":
            hook = replace(hook, every=Amount(names.evaluate_every, bare))
        hooks.append(hook)
    return tuple(hooks)


def _hook_name(entry: Any, place: str, names: PhaseNames) -> tuple[str, Mapping[str, Any]]:
    """Name and frequency of `collect`, `{collect: {times: 4}}` or `{name: collect, times: 4}`."""
    frequency: Any = {}
    if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
        frequency = {key: value for key, value in entry.items() if key != "name"}
        entry = entry["name"]
    elif isinstance(entry, Mapping) and len(entry) == 1:
        entry, frequency = next(iter(entry.items()))
    if not isinstance(entry, str) or not isinstance(frequency or {}, Mapping):
        raise ConfigError(
            f"{place} is {entry!r}: expected a hook's name, or a mapping such as {{collect: {{times: 4}}}} or"
            " {name: collect, times: 4}."
        )
    name = HOOK_ALIASES.get(entry, entry)
    if name not in names.kinds:
        raise ConfigError(f"{place} is '{entry}': this workflow has no such hook.{nearest(entry, names.kinds)}")
    return name, frequency or {}


def _parse_hook(name: str, frequency: Mapping[str, Any], place: str, kind: HookKind, bare: Unit) -> Hook:
    for key in frequency:
        if key not in _FREQUENCIES:
            raise ConfigError(f"{place}.{key} is not a frequency of a hook.{nearest(str(key), _FREQUENCIES)}")
    times = _positive(frequency.get("times", 1), f"{place}.times", "how often in a cycle")
    every, ratio = frequency.get("every"), frequency.get("ratio")
    if kind == "collect" and (every is not None or ratio is not None):
        word = "ratio" if ratio is not None else "every"
        raise ConfigError(
            f"{place}: collect has {word}: {frequency[word]}. Collection sets the pace of the phase, so it takes"
            " `times` only; put the ratio on the update hooks (updates per env step)."
        )
    if ratio is None:
        return Hook(name, kind, times, parse_amount(every, f"{place}.every", bare=bare) if every is not None else None)
    if kind != "update":
        raise ConfigError(f"{place}: {name} has ratio: {ratio}, which is for update hooks. Use times or every.")
    if every is not None or "times" in frequency:
        raise ConfigError(f"{place}: {name} has ratio together with times or every. Keep one of them.")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < 1e6:
        raise ConfigError(f"{place}.ratio is {ratio!r}: expected a number above 0 (updates per env step).")
    if bare != "steps":
        raise ConfigError(
            f"{place}: {name} has ratio: {ratio}, but the phase never collects, so no update would ever be due."
            " Use times."
        )
    return Hook(name, kind, ratio=Fraction(ratio).limit_denominator(10**6))


def _parse_until(raw: Any, place: str) -> Until:
    keys = ("metric", "at_least", "at_most", "times", "next")
    if not isinstance(raw, Mapping) or not isinstance(raw.get("metric"), str):
        raise ConfigError(f"{place} is {raw!r}: expected {{metric: eval/return_mean, at_least: 475}}.")
    for key in raw:
        if key not in keys:
            raise ConfigError(f"{place}.{key} is not a key of a condition.{nearest(str(key), keys)}")
    limits = {}
    for key in ("at_least", "at_most"):
        value = raw.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{place}.{key} is {value!r}: expected a number.")
        limits[key] = float(value)
    if not limits:
        raise ConfigError(f"{place} has no limit: give at_least or at_most.")
    times = _positive(raw.get("times", 1), f"{place}.times", "how many times in a row")
    return Until(raw["metric"], times=times, next=raw.get("next"), **limits)
