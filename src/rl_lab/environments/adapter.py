"""Between an environment's own spaces and the agent: observations become a dict of named arrays, actions go back.

Every key of the agent's observation comes from one leaf of the environment's observation space (`LeafConverter`). A
nested Dict or Tuple is flattened with `_`; a plain space is called `vector`, `image` or `discrete` after what it holds.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.images import ImageTransform, image_layout
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import EnvironmentFailure
from rl_lab.records import Observation
from rl_lab.specs import ActionSpec, ObservationSpec

ACTION_MASK = "action_mask"  # the observation key that says which actions are legal
Path = tuple[Any, ...]  # keys and positions that lead from the raw observation to a leaf


class LeafConverter:
    """One key of the observation: where it stands in the raw one, its spec, and how its value is converted."""

    def __init__(
        self, key: str, path: Path, spec: ObservationSpec, convert: Callable[[Any], np.ndarray] | None, stack: int = 1
    ) -> None:
        self.key, self.path, self.convert, self._stack = key, path, convert, stack
        self._single = spec
        self._frames: list[np.ndarray] = []
        self.spec = spec if stack == 1 else ObservationSpec(spec.kind, self._stacked_shape(), spec.dtype, spec.classes)
        self.size = int(np.prod(self.spec.shape))

    def _stacked_shape(self) -> tuple[int, ...]:
        shape = self._single.shape
        if self._single.kind == "image":
            return (*shape[:-1], shape[-1] * self._stack)
        return (int(np.prod(shape)) * self._stack,)

    def value(self, raw: Any, first: bool) -> Any:
        """The converted value, or the raw one where assignment into an array of the spec converts it."""
        for step in self.path:
            raw = raw[step]
        if self.convert is not None:
            raw = self.convert(raw)
        return raw if self._stack == 1 else self._stacked(raw, first)

    def fitted(self, value: Any) -> np.ndarray:
        """A value in the shape of the spec. One number may stand for an array of one; nothing else is spread or cut."""
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"{type(value).__name__} is no number")
        if array.shape != self.spec.shape and not array.size == self.size == 1:
            raise ValueError(f"shape {array.shape} in place of {self.spec.shape}")
        return array.reshape(self.spec.shape)

    def _stacked(self, value: Any, first: bool) -> np.ndarray:
        frame = np.array(value, self._single.dtype)  # a copy: the environment may reuse its buffer
        if frame.shape != self._single.shape:
            raise ValueError(f"shape {frame.shape} in place of {self._single.shape}")
        self._frames = [frame] * self._stack if first or not self._frames else [*self._frames[1:], frame]
        if self._single.kind == "image":
            return np.concatenate(self._frames, -1)
        return np.concatenate([part.ravel() for part in self._frames])


class SpaceAdapter:
    """Converts one environment's observations and actions. Keeps the last frames where `frame_stack` is above 1."""

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Space, settings: EnvironmentSettings
    ) -> None:
        settings = settings.resolved()
        self._id, self.notes = settings.id, list[str]()
        leaves = self._select(list(self._leaves(observation_space, settings)), settings)
        self._leaf_list = self._stack(leaves, settings)
        self.observation_spec = {leaf.key: leaf.spec for leaf in self._leaf_list}
        self._actions = _action_converter(action_space, settings, self.notes)
        self.action_spec = _with_mask(self._actions.spec, self.observation_spec)

    # Observations -----------------------------------------------------------------------------------------------------

    def observation(self, raw: Any, first: bool = False) -> Observation:
        """One raw observation as the agent's dict. `first` starts the frame stack anew."""
        out: Observation = {}
        for leaf in self._leaf_list:
            value = np.asarray(leaf.value(raw, first), leaf.spec.dtype)
            if value.shape != leaf.spec.shape:
                value = value.reshape(leaf.spec.shape)
            out[leaf.key] = np.array(value)
        return out

    def write(self, raw: Any, out: Observation, row: int, first: bool) -> None:
        """The same, straight into row `row` of batch arrays."""
        try:
            for leaf in self._leaf_list:
                value = leaf.value(raw, first)
                if getattr(value, "shape", None) != leaf.spec.shape:
                    value = leaf.fitted(value)
                out[leaf.key][row] = value
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._mismatch(raw, error) from error

    def writer(self) -> Callable[[Any, Observation, int, bool], None]:
        """`write`, specialised where the whole observation is one plain array."""
        if len(self._leaf_list) == 1 and not self._leaf_list[0].path and self._leaf_list[0].convert is None:
            leaf, key, shape = self._leaf_list[0], self._leaf_list[0].key, self._leaf_list[0].spec.shape
            if leaf.spec == leaf._single:

                def write_plain(raw: Any, out: Observation, row: int, first: bool) -> None:
                    try:
                        out[key][row] = raw if getattr(raw, "shape", None) == shape else leaf.fitted(raw)
                    except (TypeError, ValueError) as error:
                        raise self._mismatch(raw, error) from error

                return write_plain
        return self.write

    def _mismatch(self, raw: Any, error: Exception) -> EnvironmentFailure:
        expected = ", ".join(f"{leaf.key} {leaf._single.shape}" for leaf in self._leaf_list)
        got = f"keys {sorted(map(str, raw))}" if isinstance(raw, dict) else f"an array of shape {np.shape(raw)}"
        return EnvironmentFailure(
            f"environment.id={self._id} returned an observation that does not fit its observation_space: got {got}, "
            f"expected {expected} ({error}). Make reset() and step() return what observation_space declares."
        )

    def _leaves(self, space: spaces.Space, settings: EnvironmentSettings) -> Iterator[LeafConverter]:
        taken: set[str] = set()
        for path, leaf_space in walk_space(space):
            converter = self._leaf(path, leaf_space, settings)
            if converter is None:
                continue
            while converter.key in taken:
                converter.key += "_"
            taken.add(converter.key)
            yield converter

    def _leaf(self, path: Path, space: spaces.Space, settings: EnvironmentSettings) -> LeafConverter | None:
        name = re.sub(r"[^A-Za-z0-9_-]", "_", "_".join(map(str, path)))
        where = f"observation key '{name}'" if name else "the observation"
        if isinstance(space, spaces.Box):
            if 0 in space.shape:
                self.notes.append(f"{where} is empty (shape {space.shape}) and was left out")
                return None
            return self._box(name, where, path, space, settings)
        if isinstance(space, spaces.Discrete):
            start = int(space.start)
            spec = ObservationSpec("discrete", (1,), "int32", (int(space.n),))
            return LeafConverter(name or "discrete", path, spec, (lambda raw: raw - start) if start else None)
        if isinstance(space, spaces.MultiDiscrete):
            start_array = np.asarray(space.start).ravel()
            classes = tuple(int(n) for n in np.ravel(space.nvec))
            spec = ObservationSpec("discrete", (len(classes),), "int32", classes)
            return LeafConverter(name or "discrete", path, spec, lambda raw: np.ravel(raw) - start_array)
        if isinstance(space, spaces.MultiBinary):
            spec = ObservationSpec("vector", tuple(space.shape), "float32")
            return LeafConverter(name or "vector", path, spec, None)
        if isinstance(space, spaces.Text) or space.dtype is str or space.dtype == np.dtype(str):
            self.notes.append(f"{where} is text and was left out")
            return None
        raise EnvironmentFailure(
            f"{where} has the space {type(space).__name__}, which RL Lab cannot read. Use Box, Dict, Tuple, Discrete, "
            "MultiDiscrete or MultiBinary (wrap the environment with gymnasium.wrappers.TransformObservation)."
        )

    def _box(
        self, name: str, where: str, path: Path, space: spaces.Box, settings: EnvironmentSettings
    ) -> LeafConverter:
        layout, scale = image_layout(space.shape), _image_scale(space)
        if layout is None or scale is None or (layout == "hw" and space.dtype != np.uint8):
            shape = space.shape or (1,)
            return LeafConverter(name or "vector", path, ObservationSpec("vector", shape, "float32"), None)
        size = settings.image_size
        assert size != "auto"
        assert settings.grayscale != "auto"
        image = ImageTransform(space.shape, layout=layout, scale=scale, size=size, grayscale=settings.grayscale)
        if image.resizes:
            self.notes.append(f"{where} was resized from {image.source} to {image.shape[0]}×{image.shape[1]}")
        if layout == "chw":
            self.notes.append(f"{where} has its channels first; they were moved last")
        if space.dtype != np.uint8:
            self.notes.append(f"{where} is a {space.dtype} picture and was converted to uint8")
        spec = ObservationSpec("image", image.shape, "uint8")
        plain = not image.resizes and layout == "hwc" and space.dtype == np.uint8 and image.shape == space.shape
        return LeafConverter(name or "image", path, spec, None if plain else image)

    def _select(self, leaves: list[LeafConverter], settings: EnvironmentSettings) -> list[LeafConverter]:
        """Keep what `environment.observation` asks for."""
        if settings.observation in ("pixels", "state"):
            images = settings.observation == "pixels"
            kept = [leaf for leaf in leaves if (leaf.spec.kind == "image") == images]
            dropped = [leaf.key for leaf in leaves if leaf not in kept]
            if dropped and kept:
                self.notes.append(f"environment.observation={settings.observation} left out {', '.join(dropped)}")
            leaves = kept
        if not leaves:
            raise EnvironmentFailure(
                f"environment.observation={settings.observation} leaves {settings.id} no observation. "
                "Set environment.observation=auto to see what it offers."
            )
        return leaves

    def _stack(self, leaves: list[LeafConverter], settings: EnvironmentSettings) -> list[LeafConverter]:
        depth = settings.frame_stack
        assert depth != "auto"
        if depth == 1:
            return leaves
        kind = "image" if any(leaf.spec.kind == "image" for leaf in leaves) else "vector"
        self.notes.append(f"the last {depth} observations are stacked in each {kind} key")
        return [
            LeafConverter(leaf.key, leaf.path, leaf.spec, leaf.convert, depth if leaf.spec.kind == kind else 1)
            for leaf in leaves
        ]

    # Actions ----------------------------------------------------------------------------------------------------------

    def action(self, agent_action: np.ndarray) -> Any:
        """One action of the agent as the environment's own."""
        return self.actions(np.asarray(agent_action).reshape(1, *self.action_spec.shape))[0]

    def actions(self, batch: np.ndarray) -> list[Any]:
        """A batch of the agent's actions [env, *shape] as a list of the environment's own."""
        return self._actions(batch)

    @property
    def action_converter(self) -> ActionConverter:
        return self._actions


def walk_space(space: spaces.Space, path: Path = ()) -> Iterator[tuple[Path, spaces.Space]]:
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from walk_space(part, (*path, name))
    elif isinstance(space, spaces.Tuple):
        for position, part in enumerate(space.spaces):
            yield from walk_space(part, (*path, position))
    else:
        yield path, space


def _image_scale(space: spaces.Box) -> float | None:
    """The factor to 0..255 for spaces that can be pictures: bytes, or floats in [0, 1] or [0, 255]."""
    if space.dtype == np.uint8:
        return 1.0
    low, high = float(np.min(space.low)), float(np.max(space.high))
    if np.issubdtype(space.dtype, np.floating) and low == 0.0 and high in (1.0, 255.0):
        return 255.0 / high
    return None


class ActionConverter(ABC):
    """Between the agent's actions [rows, *spec.shape] and the environment's own."""

    spec: ActionSpec

    @abstractmethod
    def __call__(self, batch: np.ndarray) -> list[Any]:
        """The agent's actions as a list of the environment's own."""

    @abstractmethod
    def from_environment(self, actions: np.ndarray) -> np.ndarray:
        """The environment's own actions [rows, ...] as the agent's, not clipped: what lies outside the space stays
        outside [-1, 1], or outside the classes."""


class _DiscreteActions(ActionConverter):
    """Class indices as scalars of the space's own integer type, as its `sample` gives them."""

    def __init__(self, spec: ActionSpec, space: spaces.Discrete) -> None:
        self.spec, self._start, self._dtype = spec, space.start, space.dtype

    def __call__(self, batch: np.ndarray) -> list[Any]:
        return list(batch[:, 0].astype(self._dtype) + self._start)

    def from_environment(self, actions: np.ndarray) -> np.ndarray:
        return (actions.reshape(len(actions), 1) - self._start).astype(np.int32)


class _MultiDiscreteActions(ActionConverter):
    def __init__(self, spec: ActionSpec, space: spaces.MultiDiscrete) -> None:
        self.spec, self._shape, self._dtype, self._start = spec, space.nvec.shape, space.dtype, space.start

    def __call__(self, batch: np.ndarray) -> list[Any]:
        return list(batch.reshape(-1, *self._shape).astype(self._dtype) + self._start)

    def from_environment(self, actions: np.ndarray) -> np.ndarray:
        shifted = actions.reshape(len(actions), *self._shape) - self._start
        return shifted.reshape(len(actions), *self.spec.shape).astype(np.int32)


class _MultiBinaryActions(ActionConverter):
    def __init__(self, spec: ActionSpec, space: spaces.MultiBinary) -> None:
        self.spec, self._shape, self._dtype = spec, tuple(space.shape), space.dtype

    def __call__(self, batch: np.ndarray) -> list[Any]:
        return list(batch.reshape(-1, *self._shape).astype(self._dtype))

    def from_environment(self, actions: np.ndarray) -> np.ndarray:
        return actions.reshape(len(actions), *self.spec.shape).astype(np.int32)


class _BoxActions(ActionConverter):
    """[-1, 1] onto [low, high]. An entry without bounds, or all where normalisation is off, keeps its value."""

    def __init__(self, spec: ActionSpec, space: spaces.Box, normalize: bool) -> None:
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        bounded = np.isfinite(low) & np.isfinite(high)
        scale, shift = np.ones_like(low), np.zeros_like(low)
        if normalize:
            scale[bounded] = (high[bounded] - low[bounded]) / 2
            shift[bounded] = (high[bounded] + low[bounded]) / 2
        self.spec, self._shape, self._dtype = spec, tuple(space.shape), space.dtype
        self._scale, self._shift = scale, shift
        self._low, self._high, self._whole = low, high, np.issubdtype(space.dtype, np.integer)
        self._identity = bool(np.all(scale == 1) and np.all(shift == 0) and np.all(low <= -1) and np.all(high >= 1))

    def __call__(self, batch: np.ndarray) -> list[Any]:
        batch = np.minimum(np.maximum(batch.reshape(-1, *self._shape), -1.0), 1.0)
        if not self._identity:  # in float64, then clipped: rounding must not leave the space
            batch = np.clip(batch * self._scale + self._shift, self._low, self._high)
        if self._whole:
            batch = np.rint(batch)
        return list(batch.astype(self._dtype))

    def from_environment(self, actions: np.ndarray) -> np.ndarray:
        values = actions.reshape(len(actions), *self._shape).astype(np.float64)
        return ((values - self._shift) / self._scale).astype(np.float32).reshape(len(actions), *self.spec.shape)


def _with_mask(action: ActionSpec, observation: Mapping[str, ObservationSpec]) -> ActionSpec:
    """The action with the key of its mask, where the observation has one for one discrete action."""
    seen = observation.get(ACTION_MASK)
    if seen is None or len(action.classes) != 1:
        return action
    if seen.kind != "vector" or seen.shape != action.classes:
        raise EnvironmentFailure(
            f"The observation '{ACTION_MASK}' has the shape {seen.shape}, but there are {action.classes[0]} actions: "
            "expected one number for each, 1 where it is legal and 0 where it is not."
        )
    return replace(action, mask=ACTION_MASK)


def _action_converter(space: spaces.Space, settings: EnvironmentSettings, notes: list[str]) -> ActionConverter:
    if isinstance(space, spaces.Discrete):
        return _DiscreteActions(ActionSpec("discrete", (1,), (int(space.n),)), space)
    if isinstance(space, spaces.MultiDiscrete):
        classes = tuple(int(n) for n in np.ravel(space.nvec))
        return _MultiDiscreteActions(ActionSpec("discrete", (len(classes),), classes), space)
    if isinstance(space, spaces.MultiBinary):
        count = int(np.prod(space.shape))
        return _MultiBinaryActions(ActionSpec("discrete", (count,), (2,) * count), space)
    if isinstance(space, spaces.Box):
        if not np.all(np.isfinite(space.low) & np.isfinite(space.high)):
            notes.append("the action space has no bounds in some entries; there the agent's [-1, 1] is used as it is")
        return _BoxActions(ActionSpec("continuous", space.shape or (1,)), space, settings.normalize_actions)
    raise EnvironmentFailure(
        f"The action space {space} of gymnasium {gymnasium.__version__} is not supported. Use Box, Discrete, "
        "MultiDiscrete or MultiBinary (wrap the environment with gymnasium.wrappers.TransformAction)."
    )
