"""Names for people: what the actions of an environment do, and what the entries of its observation are."""

from __future__ import annotations

from typing import Any

from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.ui.dream.worlds import LiveWorld, World

# Gymnasium does not say what these mean in a form that a program can read.
_ACTIONS = {
    "CartPole-v1": ["left", "right"],
    "MountainCar-v0": ["left", "nothing", "right"],
    "Acrobot-v1": ["left", "nothing", "right"],
    "LunarLander-v3": ["nothing", "left", "up", "right"],
    "Pendulum-v1": ["torque"],
    "MountainCarContinuous-v0": ["push"],
}
_ENTRIES = {
    "CartPole-v1": ["position", "speed", "angle", "angular speed"],
    "Pendulum-v1": ["cos angle", "sin angle", "angular speed"],
    "MountainCar-v0": ["position", "speed"],
    "MountainCarContinuous-v0": ["position", "speed"],
    "Acrobot-v1": ["cos 1", "sin 1", "cos 2", "sin 2", "speed 1", "speed 2"],
}
_IDLE_NAMES = ("noop", "nothing", "no-op", "noaction", "done", "nop")


def action_legend(spec: ActionSpec, world: World) -> dict[str, Any]:
    """Kind and size of the action, a name for each class or entry, and the action that does nothing, if there is."""
    if spec.kind == "continuous":
        size = spec.encoded_size
        names = _own_names(world, size) or [f"entry {index}" for index in range(size)]
        return {"kind": "continuous", "names": names, "classes": [], "idle": [0.0] * size}
    classes = list(spec.classes)
    if len(classes) > 1:
        return {"kind": "discrete", "classes": classes, "names": [], "idle": [0] * len(classes)}
    names = _own_names(world, classes[0]) or [f"action {index}" for index in range(classes[0])]
    idle = next((index for index, name in enumerate(names) if name.lower() in _IDLE_NAMES), None)
    return {"kind": "discrete", "classes": classes, "names": names, "idle": None if idle is None else [idle]}


def _own_names(world: World, size: int) -> list[str] | None:
    """Names of the actions from the environment itself (Atari, MiniGrid), else from our table of known environments."""
    if not isinstance(world, LiveWorld):
        return None
    names: list[str] | None = _ACTIONS.get(world.settings.id)
    inner: Any = world.runner.environment.unwrapped
    if hasattr(inner, "get_action_meanings"):
        names = [str(name) for name in inner.get_action_meanings()]
    elif hasattr(getattr(inner, "actions", None), "__members__"):
        names = [str(name) for name in inner.actions.__members__]
    return names if names is not None and len(names) == size else None


def observation_names(observation: dict[str, ObservationSpec], environment: str) -> list[str]:
    """A name for each number of the traces, in their order."""
    known = _ENTRIES.get(environment)
    found: list[str] = []
    for key, spec in observation.items():
        if spec.kind == "image":
            continue
        size = int(spec.encoded_size) if spec.kind == "vector" else len(spec.classes)
        found += known if known is not None and len(known) == size else [f"{key} {index}" for index in range(size)]
    return found
