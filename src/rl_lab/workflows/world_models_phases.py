"""The order that the phases of World Models must keep: what each hook needs to have happened before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, TypeGuard

from rl_lab.components.dynamics.mdn_rnn import MDNRNN
from rl_lab.errors import ConfigError, nearest
from rl_lab.workflows.context import PhaseSteps

FLAGS = ("dream", "restart", "untrained")
OPTIONS = ("model", "temperature", "episodes", *FLAGS)
MODELS = ("V", "M")


def check_order(phases: Sequence[PhaseSteps], *, dream: bool) -> None:
    """Refuse an order in which a hook would work on nothing: codes from before the last collection, a controller on a
    memory that was never trained. `options: {untrained: true}` allows the latter, as a control."""
    done: set[str] = set()
    for phase in phases:
        _check_options(phase)
        for hook in phase.hooks:
            if hook == "collect":
                done.discard("encode")  # the new records have no code yet
                done.add("collect")
            elif hook == "encode":
                done.add("encode")
            elif hook == "update_world_model":
                _check_update(phase, done)
            elif hook == "assess":
                _require(phase, "M" in done, "assess measures M, which no phase before it has trained")
            elif hook == "evaluate_dream":
                _require(phase, "M" in done, "evaluate_dream plays inside M, which no phase before it has trained")
            elif hook == "evolve":
                _check_evolve(phase, done, dream=bool(phase.options.get("dream", dream)))


def check_dreams(config: Mapping[str, Any], *, dream: bool, dynamics: MDNRNN) -> None:
    """Refuse to evolve in the dream of an M that cannot tell one controller from another."""
    phases = config.get("training", {}).get("phases") or ()
    dreams = dream or any((phase.get("options") or {}).get("dream") for phase in phases)
    if dreams and dynamics.reward is None and dynamics.terminal is None:
        raise ConfigError(
            "dream: true: M predicts neither rewards nor the end of an episode, so all controllers look alike in "
            "its dream. Set components.dynamics.reward=true or components.dynamics.terminal=true."
        )


def _check_options(phase: PhaseSteps) -> None:
    for key in phase.options:
        if key not in OPTIONS:
            raise ConfigError(f"{phase.place}.options.{key} is not an option of world_models.{nearest(key, OPTIONS)}")
    place = f"{phase.place}.options"
    for key in FLAGS:
        if not isinstance(value := phase.options.get(key, False), bool):
            raise ConfigError(f"{place}.{key} must be true or false, got {value!r}.")
    temperature, episodes = phase.options.get("temperature", 1.0), phase.options.get("episodes", 1)
    if not _is_number(temperature) or temperature < 0:
        raise ConfigError(f"{place}.temperature must be a number of at least 0, got {temperature!r}.")
    if not _is_number(episodes) or episodes < 1 or episodes != int(episodes):
        raise ConfigError(f"{place}.episodes must be a whole number of at least 1, got {episodes!r}.")
    model = phase.options.get("model")
    if "update_world_model" in phase.hooks and model not in MODELS:
        raise ConfigError(
            f"{phase.place}.options.model is {model!r}: say which model update_world_model trains, V (single frames) "
            "or M (their order)."
        )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _check_update(phase: PhaseSteps, done: set[str]) -> None:
    if phase.options["model"] == "V":
        done.add("V")
        done.discard("encode")  # the codes are of another V
        return
    _require(phase, "encode" in done, "M learns from codes, and no phase has encoded the records as they are by then")
    done.add("M")


def _check_evolve(phase: PhaseSteps, done: set[str], *, dream: bool) -> None:
    if dream:
        _require(phase, "M" in done, "evolve with dream: true plays inside M, which no phase before it has trained")
    elif not phase.options.get("untrained"):
        hint = " Or set options: {untrained: true}, to see how far a random memory goes"
        _require(
            phase,
            "M" in done,
            "evolve needs M for the controller's memory, and no phase before it has trained it",
            hint,
        )


def _require(phase: PhaseSteps, holds: bool, problem: str, hint: str = "") -> None:
    if not holds:
        raise ConfigError(
            f"{phase.place} ('{phase.name}'): {problem}. The order is collect → update_world_model with options.model: "
            f"V → encode → update_world_model with options.model: M → evolve.{hint}"
        )
