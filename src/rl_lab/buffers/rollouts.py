"""Packs steps of all environments into rollouts of a fixed length, and orders their decisions into minibatches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.buffers.saving import field_file
from rl_lab.buffers.storage import row_bytes
from rl_lab.errors import CheckpointError, DataError
from rl_lab.records import OBSERVATION_PREFIX, Fields, FieldSpec, RecordBlock, Rollout, VectorStep

SUCCESSOR_FIELDS = ("reward", "is_last", "is_terminal")  # of the record that follows a decision


class RolloutPacker:
    """`length` decisions of every environment, time-major. The records that end episodes take no row of their own.

    What follows decision t (its reward, and whether the episode ended) is written into row t as soon as it is known;
    the last observations of truncated episodes, whose value is needed, are kept aside.
    """

    def __init__(self, fields: Mapping[str, FieldSpec], *, num_envs: int, length: int) -> None:
        self.fields, self.num_envs, self.length = dict(fields), num_envs, length
        self.arrays = {name: np.zeros((length, num_envs, *spec.shape), spec.dtype) for name, spec in fields.items()}
        self._own = [(name, array) for name, array in self.arrays.items() if name not in SUCCESSOR_FIELDS]
        self._reward, self._is_last, self._is_terminal = (self.arrays[name] for name in SUCCESSOR_FIELDS)
        self._keys = {name: name.removeprefix(OBSERVATION_PREFIX) for name in fields if _is_observation(name)}
        self.number = 0
        self.clear()

    def clear(self) -> None:
        """Begin the next rollout."""
        self.filled = 0
        self._following: VectorStep | None = None
        self._cuts: list[tuple[np.ndarray, Fields]] = []  # positions, observations by field

    @property
    def full(self) -> bool:
        return self.filled == self.length

    @property
    def bytes(self) -> int:
        return self.length * self.num_envs * sum(row_bytes(spec) for spec in self.fields.values())

    # Filling ----------------------------------------------------------------------------------------------------------

    def decide(self, fields: Fields) -> None:
        """One decision in every environment."""
        row = self.filled
        for name, array in self._own:
            value = fields.get(name)
            array[row] = 0 if value is None else value
        self._reward[row] = 0.0
        self._is_last[row] = self._is_terminal[row] = False
        self.filled = row + 1

    def end(self, block: RecordBlock) -> None:
        """The last records of some episodes: what followed the newest decision there."""
        row, fields, envs = self.filled - 1, block.fields, block.indices
        if row < 0 or envs is None or not fields["is_last"].all():
            raise DataError(
                "A stream takes one record of all environments at a time, and records of some of them only where their "
                "episodes ended. Use a replay for anything else."
            )
        terminal = fields["is_terminal"]
        self._reward[row, envs], self._is_last[row, envs], self._is_terminal[row, envs] = (
            fields["reward"],
            True,
            terminal,
        )
        cut = ~terminal
        if cut.any():
            observation = {name: fields[name][cut] for name in self._keys}
            self._cuts.append((row * self.num_envs + envs[cut], observation))

    def follow(self, step: VectorStep) -> None:
        """Take in the step that every environment stands at now. Its reward is 0 where an episode has just ended."""
        self._reward[self.filled - 1] += step.reward
        self._following = step

    # Reading ----------------------------------------------------------------------------------------------------------

    def rollout(self, device: str) -> Rollout:
        """The full rollout; on the CPU its tensors share memory with the packer, which waits until it is used up."""
        assert self.full
        assert self._following is not None
        tensors = {name: torch.from_numpy(array).to(device) for name, array in self.arrays.items()}
        positions, cut = self._joined_cuts()
        return Rollout(
            number=self.number,
            observation={key: tensors.pop(name) for name, key in self._keys.items()},
            following={key: torch.from_numpy(value).to(device) for key, value in self._following.observation.items()},
            following_first=torch.from_numpy(self._following.is_first).to(device),
            cut={self._keys[name]: torch.from_numpy(value).to(device) for name, value in cut.items()},
            cut_indices=torch.from_numpy(positions).to(device),
            **{name: tensors.pop(name) for name in ("action", "is_first", *SUCCESSOR_FIELDS)},
            extras=tensors,
        )

    def _joined_cuts(self) -> tuple[np.ndarray, Fields]:
        positions = [np.zeros(0, np.int64), *(positions for positions, _ in self._cuts)]
        fields = {}
        for name in self._keys:
            none = np.zeros((0, *self.fields[name].shape), self.fields[name].dtype)
            fields[name] = np.concatenate([none, *(observation[name] for _, observation in self._cuts)])
        return np.concatenate(positions), fields

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self, folder: Path) -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        positions, cut = self._joined_cuts()
        for name, array in self.arrays.items():
            np.save(folder / field_file(name, "npy"), array[: self.filled])
        for name, values in cut.items():
            np.save(folder / field_file(f"cut.{name}", "npy"), values)
        state: dict[str, Any] = {"number": self.number, "filled": self.filled, "cuts": torch.from_numpy(positions)}
        if self.full:
            assert self._following is not None
            state["following"] = {key: torch.from_numpy(value) for key, value in self._following.observation.items()}
            state["following_first"] = torch.from_numpy(self._following.is_first)
        return state

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        self.clear()
        self.number, self.filled = state["number"], state["filled"]
        for name, array in self.arrays.items():
            array[: self.filled] = self._load(folder, name, (self.filled, *array.shape[1:]))
        positions = state["cuts"].numpy()
        if len(positions):
            shapes = {name: (len(positions), *self.fields[name].shape) for name in self._keys}
            self._cuts = [(positions, {name: self._load(folder, name, shapes[name], "cut.") for name in self._keys})]
        if self.full:
            observation = {key: value.numpy() for key, value in state["following"].items()}
            first = state["following_first"].numpy()
            self._following = VectorStep(observation, np.zeros(self.num_envs, np.float32), first)

    def _load(self, folder: Path, name: str, shape: tuple[int, ...], prefix: str = "") -> np.ndarray:
        path = folder / field_file(prefix + name, "npy")
        try:
            saved: np.ndarray = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: the checkpoint's rollout is missing or cut off ({error}). Resume from an earlier one."
            ) from error
        if saved.shape != shape or saved.dtype != np.dtype(self.fields[name].dtype):
            raise CheckpointError(
                f"{path}: holds {saved.dtype} {saved.shape}, expected {self.fields[name].dtype} {shape}. The "
                "checkpoint belongs to a run with other observations or another model size."
            )
        return saved


class EpochOrder:
    """Which sequences come next: every one once in each epoch, in an order drawn anew for it."""

    def __init__(self, rng: np.random.Generator, *, epochs: int) -> None:
        self._rng, self.epochs = rng, epochs
        self.restart()

    def restart(self) -> None:
        self.epoch = 0
        self._order = np.zeros(0, np.int64)  # what is left of the epoch
        self._drawn = False

    def draw(self, count: int, *, of: int) -> tuple[np.ndarray, int, bool]:
        """The next `count` of `of` sequences (fewer at an epoch's end), their epoch, and whether they are the last."""
        if not self._drawn:
            self._order, self._drawn = self._rng.permutation(of), True
        epoch, chosen, self._order = self.epoch, self._order[:count], self._order[count:]
        if not len(self._order):
            self.epoch, self._drawn = epoch + 1, False
        return chosen, epoch, self.epoch == self.epochs

    def state_dict(self) -> dict[str, Any]:
        rng = json.dumps(self._rng.bit_generator.state)
        return {"rng": rng, "epoch": self.epoch, "drawn": self._drawn, "order": torch.from_numpy(self._order.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = json.loads(state["rng"])
        self.epoch, self._drawn, order = state["epoch"], state["drawn"], state["order"]
        assert isinstance(order, Tensor)
        self._order = order.numpy()


def _is_observation(name: str) -> bool:
    return name.startswith(OBSERVATION_PREFIX)
