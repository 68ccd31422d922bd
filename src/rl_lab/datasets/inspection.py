"""What a dataset holds: counts, returns, ranges, bad numbers, and whether its actions stand where they should."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_lab.datasets.episode import Episode
from rl_lab.datasets.formats.base import Reader
from rl_lab.errors import DataError

MOST_PAIRS = 20_000  # transitions that the alignment test looks at
MOST_ENTRIES = 256  # of a vector; a longer one would take too long to regress
LARGEST = 1e100  # whose squares can be added up
CLEAR = 1.5  # ratio of the two errors from which one alignment is believed
SHOWN_FRAMES = 12


@dataclass
class FieldSummary:
    """One field over all episodes."""

    shape: tuple[int, ...]
    dtype: str
    low: np.ndarray
    high: np.ndarray
    bad: int = 0  # numbers that are NaN or infinite

    @property
    def constant(self) -> list[int]:
        """Entries that never change, by their place in the flat field."""
        return np.flatnonzero(np.ravel(self.low == self.high)).tolist()


@dataclass
class DatasetSummary:
    """Everything that `rl-lab data inspect` says."""

    path: str
    environment: str | None
    recorded_from: str | None
    episodes: int = 0
    terminated: int = 0
    lengths: list[int] = field(default_factory=list)  # decisions
    returns: list[float] | None = field(default_factory=list)  # None: no rewards
    incomplete: int = 0  # episodes without the observation after their last action
    fields: dict[str, FieldSummary] = field(default_factory=dict)
    alignment: str = ""
    notes: list[str] = field(default_factory=list)
    frames: dict[str, np.ndarray] = field(default_factory=dict)  # some images of the first episode, by key

    def as_dict(self) -> dict[str, Any]:
        lengths = np.asarray(self.lengths)
        return {
            "path": self.path,
            "environment": self.environment,
            "recorded_from": self.recorded_from,
            "episodes": self.episodes,
            "decisions": int(lengths.sum()),
            "length_min": int(lengths.min()),
            "length_max": int(lengths.max()),
            "terminated": self.terminated,
            "without_last_observation": self.incomplete,
            **_returns(self.returns),
            "fields": {
                name: {
                    "shape": list(entry.shape),
                    "dtype": entry.dtype,
                    "low": float(entry.low.min()),
                    "high": float(entry.high.max()),
                    "not_finite": entry.bad,
                    "constant_entries": entry.constant,
                }
                for name, entry in self.fields.items()
            },
            "alignment": self.alignment,
            "notes": self.notes,
        }


def _returns(returns: list[float] | None) -> dict[str, Any]:
    if returns is None:
        return {"return_mean": None}
    values = np.asarray(returns)
    counts, edges = np.histogram(values, bins=min(10, max(1, len(values))))
    return {
        "return_mean": float(values.mean()),
        "return_std": float(values.std()),
        "return_min": float(values.min()),
        "return_max": float(values.max()),
        "returns_histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def inspect_dataset(reader: Reader) -> DatasetSummary:
    """One pass over all episodes."""
    attributes = reader.attributes
    summary = DatasetSummary(str(reader.path), attributes.environment, attributes.recorded_from)
    test = _AlignmentTest()
    for episode in reader.episodes():
        if not summary.episodes:
            summary.frames = _some_frames(episode)
        _count(summary, episode)
        test.add(episode)
    if not summary.episodes:
        raise DataError(f"{reader.path}: no episodes. The dataset is empty.")
    summary.alignment = test.verdict()
    summary.notes = list(reader.notes)
    return summary


def _count(summary: DatasetSummary, episode: Episode) -> None:
    summary.episodes += 1
    summary.terminated += episode.terminated
    summary.lengths.append(episode.decisions)
    summary.incomplete += not episode.is_complete
    if episode.reward is None:
        summary.returns = None
    elif summary.returns is not None:
        summary.returns.append(float(episode.reward.sum(dtype=np.float64)))
    values = {f"observation.{key}": value for key, value in episode.observation.items()}
    for name, value in {**values, "action": episode.action, "reward": episode.reward}.items():
        if value is None or not len(value):
            continue
        numeric = np.issubdtype(value.dtype, np.floating)
        bad = int(value.size - np.isfinite(value).sum()) if numeric else 0
        low, high = (np.nanmin(value, 0), np.nanmax(value, 0)) if bad else (value.min(0), value.max(0))
        known = summary.fields.get(name)
        if known is None:
            summary.fields[name] = FieldSummary(value.shape[1:], str(value.dtype), low, high, bad)
        else:
            known.low, known.high = np.minimum(known.low, low), np.maximum(known.high, high)
            known.bad += bad


def _some_frames(episode: Episode) -> dict[str, np.ndarray]:
    frames = {}
    for key, value in episode.observation.items():
        if value.dtype == np.uint8 and value.ndim == 4 and value.shape[-1] in (1, 3):
            frames[key] = value[np.linspace(0, len(value) - 1, min(SHOWN_FRAMES, len(value))).astype(int)]
    return frames


class _AlignmentTest:
    """Does action t, or action t + 1, explain how observation t changes into observation t + 1?

    Linear regression of the change on the observation and either action. What counts is the entry of the observation
    for which it matters most. Of vectors only.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self._count = 0

    def add(self, episode: Episode) -> None:
        vectors = [value for value in episode.observation.values() if value.ndim == 2 and value.dtype != np.uint8]
        if not vectors or self._count >= MOST_PAIRS or episode.decisions < 3:
            return
        state = np.concatenate(vectors, -1).astype(np.float64)
        action = episode.action.reshape(episode.decisions, -1).astype(np.float64)
        count = min(len(state), len(action)) - 1
        if state.shape[1] <= MOST_ENTRIES:
            self._pairs.append((state[:count], state[1 : count + 1], action[:count], action[1 : count + 1]))
            self._count += count

    def verdict(self) -> str:
        if not self._pairs:
            return "not tested: no vector observations"
        state, following, now, later = (np.concatenate(parts) for parts in zip(*self._pairs, strict=True))
        numbers = np.concatenate([state, following, now, later], -1)
        keep = (np.abs(numbers) < LARGEST).all(1)  # neither NaN
        if keep.sum() < 2:
            return "not tested: its numbers are not finite"
        errors = [_residuals(state[keep], following[keep], action[keep]) for action in (now, later)]
        entry = int(np.abs(np.log(errors[0] / errors[1])).argmax())
        after, before = (float(error[entry]) for error in errors)
        what = f"error {after:.3g} with the action beside an observation, {before:.3g} with the one beside the next"
        if after * CLEAR < before:
            return f"actions follow their observation ({what})"
        if before * CLEAR < after:
            return f"actions seem to LEAD to their observation: read with alignment=before ({what})"
        return f"cannot be told ({what})"


def _residuals(state: np.ndarray, following: np.ndarray, action: np.ndarray) -> np.ndarray:
    """The share of each entry's change that a linear model of observation and action leaves unexplained."""
    ones = np.ones((len(state), 1))
    scale = np.maximum((following - state).std(0), 1e-9)
    change = (following - state) / scale
    inputs = np.concatenate([state, action, ones], -1)
    solution, *_ = np.linalg.lstsq(inputs, change, rcond=None)
    return np.square(inputs @ solution - change).mean(0) + 1e-6
