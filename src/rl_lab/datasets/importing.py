"""From a file's episodes to the records of a run: keys and shapes matched, actions converted, everything checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from rl_lab.datasets.columns import UNNAMED
from rl_lab.datasets.episode import Episode, MissingLast
from rl_lab.datasets.formats.base import Reader
from rl_lab.environments.adapter import ActionConverter
from rl_lab.errors import DataError
from rl_lab.records import OBSERVATION_PREFIX, Fields, FieldSpec

SLACK = 1e-4  # by which a continuous action may leave [-1, 1]: rounding
ActionUnits = Literal["auto", "environment", "agent"]


@dataclass
class ImportReport:
    """Counts and remarks from importing episodes."""

    episodes: int = 0
    rewarded: bool = True
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class RecordImporter:
    """Turns episodes into records with the fields of a run."""

    def __init__(
        self,
        fields: Mapping[str, FieldSpec],  # those of the run: observations and the action are matched with them
        actions: ActionConverter | None,
        *,
        action_units: ActionUnits = "auto",
        missing_last: MissingLast = "auto",
    ) -> None:
        self._observation = {
            name.removeprefix(OBSERVATION_PREFIX): spec
            for name, spec in fields.items()
            if name.startswith(OBSERVATION_PREFIX)
        }
        self._action, self._converter = fields["action"], actions
        self._units, self._missing_last = action_units, missing_last
        self.report = ImportReport()

    def records(self, reader: Reader, *, first: int = 0, stop: int | None = None) -> Iterator[Fields]:
        """The records of episodes number `first` to `stop`, one episode at a time."""
        units = reader.attributes.action_units if self._units == "auto" else self._units
        for number, episode in enumerate(reader.episodes()):
            if number < first:
                continue
            if stop is not None and number >= stop:
                break
            yield self._converted(episode, reader.path, number, units)
        for note in reader.notes:
            self.report.note(note)

    def _converted(self, episode: Episode, path: Path, number: int, units: str) -> Fields:
        place = f"{path}, episode {number}"
        if not episode.is_complete:
            self._check_counts(episode, place)
            episode = episode.with_last_observation(self._missing_last)
            how = "repeated" if episode.terminated else "dropped with the action before it"
            self.report.note(f"the observation after an episode's last action was not kept: {how}")
        if not episode.decisions:
            raise DataError(f"{place}: has no action, so nothing can be learned from it.")
        if episode.reward is None:
            self.report.rewarded = False
        records = episode.to_records()
        converted = {OBSERVATION_PREFIX + key: self._observed(key, episode, place) for key in self._observation}
        converted["action"] = np.zeros((len(records["reward"]), *self._action.shape), self._action.dtype)
        converted["action"][:-1] = self._acted(episode.action, units, place)
        for name in ("reward", "is_first", "is_last", "is_terminal"):
            converted[name] = records[name]
        _check_finite(converted, place)
        self.report.episodes += 1
        return converted

    def _check_counts(self, episode: Episode, place: str) -> None:
        if episode.observations != episode.decisions:
            raise DataError(
                f"{place}: {episode.observations} observations and {episode.decisions} actions. Expected as many, or "
                "one observation more."
            )

    def _observed(self, key: str, episode: Episode, place: str) -> np.ndarray:
        """The data's value of a key of the run, in its shape and dtype."""
        own, spec = episode.observation, self._observation[key]
        name = key
        if key not in own and len(own) == 1 and len(self._observation) == 1:
            name = next(iter(own))
            if name != UNNAMED:
                self.report.note(f"the data's only observation, '{name}', is the environment's '{key}'")
        if name not in own:
            raise DataError(
                f"{place}: no observation '{key}', which the environment has. The data have {', '.join(sorted(own))}. "
                f"Say which is meant: mapping: {{observation.{key}: NAME}}."
            )
        value = own[name]
        if value.shape[1:] != spec.shape:
            value = self._reshaped(value, spec, key, place)
        if not np.can_cast(value.dtype, spec.dtype, "same_kind") and not _is_whole(value.dtype, spec.dtype):
            raise DataError(f"{place}: observation '{key}' is {value.dtype}, and the environment's is {spec.dtype}.")
        return np.ascontiguousarray(value, spec.dtype)

    def _reshaped(self, value: np.ndarray, spec: FieldSpec, key: str, place: str) -> np.ndarray:
        shape = value.shape[1:]
        if len(shape) == 3 and (*shape[1:], shape[0]) == spec.shape:
            self.report.note(f"'{key}' has its channels first: turned to height × width × channels")
            return np.moveaxis(value, 1, -1)
        if len(shape) != 3 and np.prod(shape, dtype=int) == np.prod(spec.shape, dtype=int):
            return value.reshape(len(value), *spec.shape)
        raise DataError(
            f"{place}: observation '{key}' has shape {shape}, and the environment's has {spec.shape}. The data are of "
            "another environment, or of other settings of it (environment.image_size, environment.frame_stack)."
        )

    def _acted(self, action: np.ndarray, units: str, place: str) -> np.ndarray:
        """The agent's actions: [-1, 1], or classes from 0."""
        expected = int(np.prod(self._action.shape, dtype=int))
        count = int(np.prod(action.shape[1:], dtype=int))
        if count != expected:
            raise DataError(f"{place}: an action has {count} entries, and the environment's has {expected}.")
        is_discrete = self._action.dtype == "int32"
        if is_discrete and not np.array_equal(action, np.rint(action)):
            raise DataError(f"{place}: the actions are not whole numbers, and the environment's are discrete.")
        if units == "environment" and self._converter is not None:
            action = self._converter.from_environment(action)
        action = action.reshape(len(action), *self._action.shape).astype(self._action.dtype)
        self._check_range(action, place)
        return action if is_discrete else np.clip(action, -1.0, 1.0)

    def _check_range(self, action: np.ndarray, place: str) -> None:
        with np.errstate(invalid="ignore"):
            if self._action.dtype == "int32":
                classes = self._converter.spec.classes if self._converter is not None else ()
                bad = (action < 0) | (action >= np.asarray(classes)) if classes else action < 0
            else:
                bad = np.abs(action) > 1.0 + SLACK
        if bad.any():
            row = int(np.flatnonzero(bad.reshape(len(bad), -1).any(1))[0])
            raise DataError(
                f"{place}, row {row}: the action {np.ravel(action[row]).tolist()} (as the agent sees it: from -1 to 1, "
                "or classes from 0) is outside the action space. The data are of another environment, or action_units "
                "is wrong (environment: its own units; agent: -1 to 1)."
            )


def _check_finite(records: Fields, place: str) -> None:
    for name, value in records.items():
        if not np.issubdtype(value.dtype, np.floating):
            continue
        good = np.isfinite(value)
        if not good.all():
            row = int(np.flatnonzero(~good.reshape(len(good), -1).all(1))[0])
            raise DataError(f"{place}, field '{name}', row {row}: holds NaN or an infinite number.")


def _is_whole(given: np.dtype, wanted: str) -> bool:
    """Integers of another size or sign: their values are checked where they matter."""
    return np.issubdtype(given, np.integer) and np.issubdtype(np.dtype(wanted), np.integer) and wanted != "uint8"
