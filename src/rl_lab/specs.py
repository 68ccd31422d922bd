"""Specs of observations and actions: the shape and kind of each observation key, and of the action."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

ObservationKind = Literal["image", "vector", "discrete"]
ActionKind = Literal["continuous", "discrete"]


@dataclass(frozen=True)
class ObservationSpec:
    """One key of the observation dict.

    `image`: uint8, height × width × channels. `vector`: any other numeric array, flattened by the encoder.
    `discrete`: integers, one per entry of `classes`, encoded as concatenated one-hots.
    """

    kind: ObservationKind
    shape: tuple[int, ...]
    dtype: str
    classes: tuple[int, ...] = ()

    @property
    def encoded_size(self) -> int:
        """Width of this key once it is flat (one-hots for discrete keys)."""
        return sum(self.classes) if self.kind == "discrete" else prod(self.shape)


@dataclass(frozen=True)
class ActionSpec:
    """The action as the agent sees it.

    `continuous`: float32 of `shape`, every entry in [-1, 1]. `discrete`: integers of shape (len(classes),), one class
    index per component, so a plain Discrete(n) has classes (n,) and shape (1,).

    `mask` is the observation key that says which classes are legal now (1) and which are not (0), where there is one.
    """

    kind: ActionKind
    shape: tuple[int, ...]
    classes: tuple[int, ...] = ()
    mask: str | None = None

    @property
    def dtype(self) -> str:
        return "float32" if self.kind == "continuous" else "int32"

    @property
    def encoded_size(self) -> int:
        """Width of the action as a model input: its entries, or its concatenated one-hots."""
        return sum(self.classes) if self.kind == "discrete" else prod(self.shape)
