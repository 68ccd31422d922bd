"""Arrays that the parent and its workers both see: one anonymous file, mapped by each."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from math import prod

import numpy as np

from rl_lab.records import Observation
from rl_lab.specs import ActionSpec, ObservationSpec

STILL, ONCE, ON = range(3)  # an environment stands still, plays one episode, or one after another
_ALIGN = 64


@dataclass(frozen=True)
class ArrayPlan:
    """Names, shapes and dtypes of the arrays, in the order in which they lie in the file."""

    arrays: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, num_envs: int, observation: dict[str, ObservationSpec], action: ActionSpec) -> ArrayPlan:
        arrays: list[tuple[str, tuple[int, ...], str]] = []
        for prefix in ("now", "last"):  # the record to act on, and the last one of an episode that ended
            arrays += [(f"{prefix}.{key}", (num_envs, *spec.shape), spec.dtype) for key, spec in observation.items()]
        arrays.append(("action", (num_envs, *action.shape), action.dtype))
        arrays.append(("reward", (num_envs,), "float32"))
        arrays.append(("play", (num_envs,), "uint8"))  # STILL, ONCE or ON
        arrays.append(("busy", (num_envs,), "int32"))  # entry i, of worker i: the environment it is working on
        return cls(tuple(arrays))

    @property
    def size(self) -> int:
        return sum(_padded(shape, dtype) for _, shape, dtype in self.arrays)


class SharedArrays:
    """The mapped arrays. Nothing is left behind when every process is gone, however it went."""

    def __init__(self, plan: ArrayPlan, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, plan.size)
        views: Observation = {}
        offset = 0
        for name, shape, dtype in plan.arrays:
            views[name] = np.frombuffer(self._map, dtype, prod(shape), offset).reshape(shape)
            offset += _padded(shape, dtype)
        self.now = {name[4:]: view for name, view in views.items() if name.startswith("now.")}
        self.last = {name[5:]: view for name, view in views.items() if name.startswith("last.")}
        self.action, self.reward, self.busy = views["action"], views["reward"], views["busy"]
        self.play = views["play"]


def anonymous_file() -> int:
    """A descriptor of a file without a name, in memory where the system has such a place."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rl_lab_environments")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _padded(shape: tuple[int, ...], dtype: str) -> int:
    return -(-prod(shape) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
