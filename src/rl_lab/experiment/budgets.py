"""Budgets and evaluations of a composed experiment follow what the user typed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from rl_lab.errors import ConfigError
from rl_lab.orchestration.phases import parse_amount

BUDGET_KEY = "training.total_timesteps"
_OFFLINE_KEYS = ("duration_updates", "duration_cycles", "duration")


def apply_typed(config: DictConfig, typed: Collection[str], own_budget: Any) -> None:
    """Let the experiment's phases follow what was typed. `own_budget` is the experiment's `training.total_timesteps`.

    A shorter budget shortens phases that do not collect in proportion; `evaluation.every` reaches every phase that
    collects and evaluates; `evaluation.episodes` is the number of the final episodes too. Phases that the user typed
    stay as they are.
    """
    phases = OmegaConf.select(config, "training.phases")
    if isinstance(phases, ListConfig) and not any(key.startswith("training.phases") for key in typed):
        if BUDGET_KEY in typed:
            _shorten_offline(config, phases, own_budget)
        if "evaluation.every" in typed:
            _evaluate_as_typed(phases)
    if "evaluation.episodes" in typed and "evaluation.final_episodes" not in typed:
        OmegaConf.update(config, "evaluation.final_episodes", None)


def _shorten_offline(config: DictConfig, phases: ListConfig, own_budget: Any) -> None:
    budget = config.training.total_timesteps
    if not (isinstance(budget, int | float) and isinstance(own_budget, int | float) and 0 < budget < own_budget):
        return
    mappings = [phase for phase in phases if isinstance(phase, DictConfig)]
    if not any(_collects(phase) for phase in mappings):
        return  # nothing in the run is counted in env steps
    for phase in mappings:
        if _collects(phase):
            continue
        for key in _OFFLINE_KEYS:
            _shorten(phase, key, budget / own_budget)


def _shorten(phase: DictConfig, key: str, share: float) -> None:
    value = phase._get_node(key)
    raw = value._value() if value is not None else None
    if raw is None or (isinstance(raw, str) and "${" in raw):
        return
    unit = key.removeprefix("duration_") if key != "duration" else "updates"
    try:
        amount = parse_amount(raw, key, bare=unit)  # type: ignore[arg-type]
    except ConfigError:
        return  # reading the phases says what is wrong with it
    if amount.unit != "steps":
        shorter = max(1, round(amount.value * share))
        phase[key] = shorter if key != "duration" else f"{shorter}_{amount.unit}"


def _collects(phase: DictConfig) -> bool:
    hooks = phase.get("workflow_hooks")
    if hooks is None:
        return phase.get("type", "online") not in ("offline", "eval_only")
    return any(_name(hook) == "collect" for hook in hooks)


def _name(hook: Any) -> Any:
    if isinstance(hook, DictConfig):
        return hook.get("name") or next(iter(hook), None)
    return hook


def _evaluate_as_typed(phases: ListConfig) -> None:
    """A bare `evaluate` takes evaluation.every."""
    for phase in phases:
        if isinstance(phase, DictConfig) and _collects(phase) and phase.get("workflow_hooks") is not None:
            names = ("evaluate", "eval")
            phase.workflow_hooks = ["evaluate" if _name(hook) in names else hook for hook in phase.workflow_hooks]
