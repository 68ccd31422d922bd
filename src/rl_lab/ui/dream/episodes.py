"""Episodes to begin from: those that a checkpoint's replay holds, and recordings; and writing what was played."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.saving import field_file
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.files import write_dataset
from rl_lab.errors import ConfigError
from rl_lab.orchestration.checkpoint import SOURCES, TRAINING_FILE
from rl_lab.records import OBSERVATION_PREFIX, Fields, Observation
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.ui.dream.model import DreamModel
from rl_lab.ui.dream.tape import Moment

LISTED = 1000  # episodes that are offered, the newest
RECORDINGS = "recordings"  # folder in the run
STANDARD = ("action", "reward", "is_first", "is_last", "is_terminal")


@dataclass(frozen=True)
class StoredEpisode:
    """The rows of a saved replay that hold one episode."""

    folder: Path
    rows: np.ndarray
    episode_return: float

    @property
    def label(self) -> str:
        return f"replay: return {self.episode_return:.4g}, {len(self.rows) - 1} steps"

    def read(self, keys: list[str]) -> Fields:
        names = [*(OBSERVATION_PREFIX + key for key in keys), *STANDARD]
        return {
            name: np.array(np.load(self.folder / field_file(name, "npy"), mmap_mode="r")[self.rows]) for name in names
        }


def stored_episodes(checkpoint: Path) -> list[StoredEpisode]:
    """Whole episodes in the replay of a checkpoint, the newest first; none where the replay is not saved with it."""
    training = checkpoint / TRAINING_FILE
    if not training.is_file():
        return []
    try:
        sources = torch.load(training, map_location="cpu", weights_only=True, mmap=True)["sources"]
        found = [
            episode for name, state in sources.items() for episode in _of_source(checkpoint / SOURCES / name, state)
        ]
    except (OSError, RuntimeError, KeyError, TypeError, ValueError):
        return []
    return found[::-1][:LISTED]


def _of_source(folder: Path, state: dict[str, Any]) -> list[StoredEpisode]:
    if "streams" not in state or not (folder / field_file("is_first", "npy")).is_file():
        return []
    first, last, reward = (
        np.load(folder / field_file(name, "npy"), mmap_mode="r") for name in ("is_first", "is_last", "reward")
    )
    written = np.asarray(state["streams"]["written"]).astype(np.int64)
    length, offset, found = int(state["length"]), 0, []
    for count in written.tolist():
        held = min(count, length)
        # Oldest first: the ring's oldest row lies where the next one would be written.
        rows = offset + (np.arange(held) + (count if count > length else 0)) % max(held, 1)
        starts = np.flatnonzero(np.asarray(first[rows]))
        ends = np.flatnonzero(np.asarray(last[rows]))
        for start in starts.tolist():
            later = ends[ends >= start]
            following = starts[starts > start]
            if len(later) and (not len(following) or later[0] < following[0]) and later[0] > start:
                own = rows[start : int(later[0]) + 1]
                found.append(StoredEpisode(folder, own, float(np.asarray(reward[own], np.float64)[1:].sum())))
        offset += held
    return found


# Recording ------------------------------------------------------------------------------------------------------------


def episode_of(moment: Moment, world: str, observation: dict[str, ObservationSpec], action: ActionSpec) -> Fields:
    """The records of a branch, as an episode: from the game what was real, from the dream what was dreamed.

    Record t holds the observation, the reward received on arriving at it, the flags, and the action taken after it; the
    last record carries a zero action.
    """
    path = [one for one in moment.path() if world == "dream" or one.real is not None]
    if len(path) < 2:
        raise ConfigError("There is nothing to record yet: play at least one step.")
    shown = [_observation(one, world) for one in path]
    missing = sorted(set(observation) - set(shown[-1]))
    if missing:
        raise ConfigError(f"The dream cannot be recorded: its model shows no '{missing[0]}'. Record the game instead.")
    fields: Fields = {}
    for key, spec in observation.items():
        fields[OBSERVATION_PREFIX + key] = np.stack([_cast(one[key], spec) for one in shown])
    fields["action"] = np.stack(
        [*(np.asarray(one.action, action.dtype) for one in path[1:]), np.zeros(action.shape, action.dtype)]
    )
    rewards = [0.0, *(_reward(one, world) for one in path[1:])]
    fields["reward"] = np.array(rewards, np.float32)
    flags = np.zeros((3, len(path)), bool)
    flags[0, 0], flags[1, -1] = True, True
    end = path[-1]
    flags[2, -1] = end.real.is_terminal if world == "game" and end.real else (end.continuation or 1.0) < 0.5
    return fields | dict(zip(("is_first", "is_last", "is_terminal"), flags, strict=True))


def _observation(moment: Moment, world: str) -> Observation:
    """The observation of a moment; in a dream the real one up to the hand-over and the dreamed one after it."""
    if moment.real is not None and (world == "game" or moment.time <= moment.since):
        return moment.real.observation
    return moment.dreamed


def _reward(moment: Moment, world: str) -> float:
    if world == "dream" and moment.dream_reward is not None:
        return moment.dream_reward
    return moment.real.reward if moment.real is not None else 0.0


def _cast(value: np.ndarray, spec: ObservationSpec) -> np.ndarray:
    if spec.kind == "image" and value.dtype != np.uint8:
        value = (value * 255.0).round().clip(0, 255)
    return value.astype(spec.dtype)


def record(folder: Path, moment: Moment, model: DreamModel, *, world: str, seed: int) -> dict[str, Any]:
    """Write the branch that ends at `moment` as an episode of the run's recordings; the message that says where."""
    context = model.workflow.context
    fields = episode_of(moment, world, dict(context.observation_spec), context.action_spec)
    drivers = sorted({one.driver for one in moment.path() if one.driver})
    facts = {"world": world, "drivers": drivers, "checkpoint": model.checkpoint, "seed": seed}
    environment = model.loaded.settings.environment.id
    place = folder / RECORDINGS / world
    path = write_episode(place, fields, environment=environment, run=str(folder), facts=facts)
    train = ["rl-lab", "train", "+experiment=bc", f"environment.id={environment}", f"data_sources.demos.path={place}"]
    return {"type": "recorded", "file": str(path), "folder": str(place), "records": len(fields["reward"]),
            "return": float(fields["reward"].sum()), "command": shlex.join(train)}  # fmt: skip


def write_episode(folder: Path, fields: Fields, *, environment: str, run: str, facts: dict[str, Any]) -> Path:
    """Add an episode to a recording, a dataset of one .npz file an episode; the file."""
    number = len(list(folder.glob("episode-*.npz")))
    attributes = Attributes(environment=environment, action_units="agent", recorded_from=run, further=facts)
    folder.mkdir(parents=True, exist_ok=True)
    return write_dataset(folder / f"episode-{number:05d}.npz", [Episode.from_records(fields)], attributes)
