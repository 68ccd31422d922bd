"""Uniform actions from a random stream that can be saved."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_lab.records import Observation
from rl_lab.specs import ActionSpec

BLOCK = 256  # decisions drawn at once: a draw costs as much for one as for many


def legal_action(action: np.ndarray, observation: Observation, spec: ActionSpec) -> np.ndarray:
    """Random actions as they are, or where they are masked, the legal ones that the same draw stands for."""
    if spec.mask is None:
        return action
    legal = observation[spec.mask] > 0
    number = action[:, 0] % np.maximum(legal.sum(-1), 1)  # counted among the legal ones
    chosen: np.ndarray = (legal.cumsum(-1) > number[:, None]).argmax(-1)
    return chosen.astype(action.dtype)[:, None]


class RandomActions:
    """Draws ahead in blocks; the saved state is the stream before the block, and how much of it is used."""

    def __init__(self, spec: ActionSpec, num_envs: int, seed: int) -> None:
        self._spec, self._num_envs = spec, num_envs
        self._rng = np.random.default_rng(np.random.SeedSequence([seed, 1]))
        self._before: dict[str, Any] = dict(self._rng.bit_generator.state)
        self._block = self._draw_block()
        self._used = 0

    def draw(self) -> np.ndarray:
        """One action for each environment, in the form of the action spec."""
        if self._used == BLOCK:
            self._before = dict(self._rng.bit_generator.state)
            self._block = self._draw_block()
            self._used = 0
        self._used += 1
        action: np.ndarray = self._block[self._used - 1]
        return action

    def _draw_block(self) -> np.ndarray:
        shape = (BLOCK, self._num_envs, *self._spec.shape)
        if self._spec.kind == "continuous":
            return self._rng.uniform(-1.0, 1.0, shape).astype(np.float32)
        return self._rng.integers(0, self._spec.classes, shape, dtype=np.int32)

    def state_dict(self) -> dict[str, Any]:
        return {"before": self._before, "used": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before, self._used = state["before"], state["used"]
        self._rng.bit_generator.state = self._before
        self._block = self._draw_block()
