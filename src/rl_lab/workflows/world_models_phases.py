"""The order that the phases of World Models must keep: what each hook needs to have happened before it."""

from __future__ import annotations

from collections.abc import Sequence

from rl_lab.errors import ConfigError, nearest
from rl_lab.workflows.context import PhaseSteps

OPTIONS = ("model", "dream", "temperature", "episodes", "restart", "untrained")
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


def _check_options(phase: PhaseSteps) -> None:
    for key in phase.options:
        if key not in OPTIONS:
            raise ConfigError(f"{phase.place}.options.{key} is not an option of world_models.{nearest(key, OPTIONS)}")
    model = phase.options.get("model")
    if "update_world_model" in phase.hooks and model not in MODELS:
        raise ConfigError(
            f"{phase.place}.options.model is {model!r}: say which model update_world_model trains, V (single frames) "
            "or M (their order)."
        )


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
