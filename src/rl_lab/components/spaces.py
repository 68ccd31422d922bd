"""Observation and action specs, given as such or as the plain mappings that a configuration holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_lab.errors import ConfigError
from rl_lab.specs import ActionSpec, ObservationSpec

SpecLike = ObservationSpec | Mapping[str, Any]


def observation_specs(observation: Mapping[str, SpecLike]) -> dict[str, ObservationSpec]:
    """Specs by key, in sorted key order: the order in which everything is concatenated."""
    if not observation:
        raise ConfigError("The observation has no keys: expected at least one image, vector or discrete key.")
    return {str(key): _observation_spec(str(key), observation[key]) for key in sorted(observation)}


def _observation_spec(key: str, spec: SpecLike) -> ObservationSpec:
    if isinstance(spec, ObservationSpec):
        return spec
    kind = spec["kind"]
    if kind not in ("image", "vector", "discrete"):
        raise ConfigError(f"observation.{key}.kind is '{kind}': expected image, vector or discrete.")
    classes = tuple(int(count) for count in spec.get("classes") or ())
    return ObservationSpec(kind, tuple(int(size) for size in spec["shape"]), str(spec["dtype"]), classes)


def action_spec(action: ActionSpec | Mapping[str, Any]) -> ActionSpec:
    if isinstance(action, ActionSpec):
        return action
    kind = action["kind"]
    if kind not in ("continuous", "discrete"):
        raise ConfigError(f"action.kind is '{kind}': expected continuous or discrete.")
    classes = tuple(int(count) for count in action.get("classes") or ())
    return ActionSpec(kind, tuple(int(size) for size in action["shape"]), classes, action.get("mask"))


def split_keys(specs: Mapping[str, ObservationSpec]) -> tuple[dict[str, ObservationSpec], dict[str, ObservationSpec]]:
    """(image keys, all the other keys), each in sorted order."""
    images = {key: spec for key, spec in specs.items() if spec.kind == "image"}
    others = {key: spec for key, spec in specs.items() if spec.kind != "image"}
    return images, others


def stacked_image_shape(images: Mapping[str, ObservationSpec], *, multiple: int) -> tuple[int, int, int]:
    """(height, width, summed channels) of images that go through one network.

    Raises where they differ in size or where the size is no multiple of what the network shrinks by.
    """
    for key, spec in images.items():
        if len(spec.shape) != 3:
            raise ConfigError(f"observation.{key} has shape {spec.shape}: an image is (height, width, channels).")
        height, width, _ = spec.shape
        if height % multiple or width % multiple:
            raise ConfigError(
                f"observation.{key} is an image of {height}×{width}: this image network needs a height and width that "
                f"are multiples of {multiple}. Set environment.image_size=64, for example."
            )
    sizes = {spec.shape[:2] for spec in images.values()}
    if len(sizes) > 1:
        seen = ", ".join(f"{key} {spec.shape[0]}×{spec.shape[1]}" for key, spec in images.items())
        raise ConfigError(
            f"The image keys have different sizes ({seen}), but one network takes them together. "
            "Set environment.image_size=64 to bring them to one size."
        )
    height, width = next(iter(sizes))
    return height, width, sum(spec.shape[2] for spec in images.values())
