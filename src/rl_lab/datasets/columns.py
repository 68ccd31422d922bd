"""From named columns, one row a step, to episodes: which column is what, and where one episode ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rl_lab.datasets.episode import Alignment, Episode
from rl_lab.errors import DataError, nearest
from rl_lab.records import OBSERVATION_PREFIX

# Names under which other programs keep the same thing. The first one that a file has is taken.
ALIASES: dict[str, tuple[str, ...]] = {
    "observation": ("observation", "observations", "obs", "state", "states", "observation.state", "image", "images"),
    "next_observation": ("next_observation", "next_observations", "next_obs", "next_state", "next_states"),
    "action": ("action", "actions", "act", "a"),
    "reward": ("reward", "rewards", "rew", "r", "next.reward"),
    "terminated": (
        "terminated", "terminations", "terminals", "terminal", "is_terminal", "next.terminated", "next.done", "dones",
        "done",
    ),
    "truncated": ("truncated", "truncations", "timeouts", "timeout", "next.truncated"),
    "episode_ends": ("episode_ends",),
    "episode_index": ("episode_index", "episode", "traj_id"),
    "is_first": ("is_first",),
    "is_last": ("is_last",),
}  # fmt: skip
NESTED = ("observation.", "observations.", "obs.", "observations/", "obs/", "observation/")  # before a key of its own
NESTED_NEXT = ("next_observation.", "next_observations.", "next_obs.", "next_observations/", "next_obs/")
UNNAMED = "observation"  # the key of an observation that has no name of its own
FieldMapping = Mapping[str, str]  # role (`action`, `observation.camera`, …) → the file's own name


class Column(Protocol):
    """An array, or something that is read from a file piece by piece."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, rows: slice) -> Any: ...


@dataclass
class Roles:
    """The columns that were recognised."""

    observation: dict[str, str]  # key → column
    next_observation: dict[str, str]
    action: str
    others: dict[str, str] = field(default_factory=dict)  # reward, terminated, …: role → column
    notes: list[str] = field(default_factory=list)


def recognise(names: list[str], mapping: FieldMapping, place: str) -> Roles:
    """Find out which column is what, by the mapping first and the usual names then."""
    for role, name in mapping.items():
        if name not in names:
            raise DataError(f"{place}: mapping.{role}='{name}': the data have no such field.{nearest(name, names)}")
        if role not in ALIASES and not role.startswith((OBSERVATION_PREFIX, "next_observation.")):
            known = [*ALIASES, "observation.<key>", "next_observation.<key>"]
            raise DataError(f"{place}: mapping.{role} is not something that a dataset holds.{nearest(role, known)}")
    found = {role: mapping[role] for role in ALIASES if role in mapping}
    for role, aliases in ALIASES.items():
        match = next((name for name in aliases if name in names and name not in mapping.values()), None)
        if role not in found and match is not None:
            found[role] = match
    observation = _keys(names, mapping, OBSERVATION_PREFIX, NESTED, found.pop("observation", None))
    following = _keys(names, mapping, "next_observation.", NESTED_NEXT, found.pop("next_observation", None))
    if not observation:
        raise DataError(
            f"{place}: no observation was recognised among {', '.join(sorted(names))}. Say which it is: "
            "mapping: {observation: NAME}, or {observation.camera: NAME} for each key."
        )
    if "action" not in found:
        raise DataError(
            f"{place}: no action was recognised among {', '.join(sorted(names))}. Say which it is: mapping: "
            "{action: NAME}."
        )
    roles = Roles(observation, following, found.pop("action"), found)
    if found.get("terminated") in ("done", "dones", "next.done") and "truncated" not in found:
        roles.notes.append(f"'{found['terminated']}' does not tell time limits from terminations: taken as the latter")
    return roles


def _keys(
    names: list[str], mapping: FieldMapping, prefix: str, nested: tuple[str, ...], plain: str | None
) -> dict[str, str]:
    """Observation keys: those that the mapping names, else those that stand below a common name, else the plain one."""
    given = {role.removeprefix(prefix): name for role, name in mapping.items() if role.startswith(prefix)}
    if given:
        return given
    if prefix.rstrip(".") in mapping and plain is not None:
        return {UNNAMED: plain}
    for start in nested:
        below = {name.removeprefix(start): name for name in names if name.startswith(start)}
        if below:
            return below
    return {UNNAMED: plain} if plain is not None else {}


@dataclass(frozen=True)
class Steps:
    """Columns of equal length, with their roles."""

    columns: Mapping[str, Column]
    roles: Roles
    place: str  # of the file, for messages
    last: Mapping[str, Column] = field(default_factory=dict)  # key → the observation after each episode's last action

    @property
    def rows(self) -> int:
        return self.columns[self.roles.action].shape[0]

    def check_lengths(self) -> None:
        """Every column that is used has one row a step; the observation of a single episode may have one more."""
        used = {**self.roles.observation, "action": self.roles.action}
        used |= {role: name for role, name in self.roles.others.items() if role != "episode_ends"}
        single = not self._has_boundaries()
        for role, name in used.items():
            shape = self.columns[name].shape
            count = shape[0] if shape else 0
            if count != self.rows and not (single and role in self.roles.observation and count == self.rows + 1):
                raise DataError(
                    f"{self.place}: '{name}' has {count} rows and '{self.roles.action}' has {self.rows}: expected as "
                    "many (one more only for the observations of a single episode)."
                )

    def _has_boundaries(self) -> bool:
        others = self.roles.others
        return any(name in others for name in ("episode_ends", "episode_index", "is_first", "is_last"))

    def boundaries(self) -> np.ndarray:
        """The exclusive end of every episode, ascending; the last one is the number of rows."""
        others, rows = self.roles.others, self.rows
        if "episode_ends" in others:
            ends = np.asarray(self.columns[others["episode_ends"]][:]).astype(np.int64)
            if len(ends) and (ends[-1] != rows or np.any(np.diff(ends) <= 0) or ends[0] <= 0):
                raise DataError(
                    f"{self.place}: '{others['episode_ends']}' must rise to the number of steps, {rows}; it ends with "
                    f"{ends[-1]}."
                )
            return ends
        if "episode_index" in others:
            index = np.asarray(self.columns[others["episode_index"]][:]).reshape(-1)
            return np.append(np.flatnonzero(index[1:] != index[:-1]) + 1, rows)
        if "is_first" in others:
            first = np.asarray(self.columns[others["is_first"]][:]).reshape(-1).astype(bool)
            starts = np.flatnonzero(first)
            return np.append(starts[starts > 0], rows)
        done = np.zeros(rows, bool)
        for role in ("terminated", "truncated", "is_last"):
            if role in others:
                done |= np.asarray(self.columns[others[role]][:]).reshape(-1).astype(bool)
        ends = np.flatnonzero(done) + 1
        return ends if len(ends) and ends[-1] == rows else np.append(ends, rows)

    def episodes(self, alignment: Alignment = "after") -> Iterator[Episode]:
        """One episode after another, read when it is asked for."""
        self.check_lengths()
        if not self.rows:
            return
        start = 0
        for number, end in enumerate(self.boundaries().tolist()):
            yield self._episode(number, start, end).aligned(alignment)
            start = end

    def _episode(self, number: int, start: int, end: int) -> Episode:
        rows, others = slice(start, end), self.roles.others
        single = end == self.rows and start == 0
        observation = {
            key: np.asarray(self.columns[name][slice(start, None) if single else rows])
            for key, name in self.roles.observation.items()
        }
        for key, name in self.roles.next_observation.items():
            last = np.asarray(self.columns[name][slice(end - 1, end)])
            if key in observation and len(observation[key]) == end - start:
                observation[key] = np.concatenate([observation[key], last.astype(observation[key].dtype)])
        for key, column in self.last.items():
            observation[key] = np.concatenate([observation[key], np.asarray(column[number : number + 1])])
        reward = None
        if "reward" in others:
            reward = np.asarray(self.columns[others["reward"]][rows]).reshape(end - start).astype(np.float32)
        terminated = False
        if "terminated" in others:
            terminated = bool(np.asarray(self.columns[others["terminated"]][slice(end - 1, end)]).reshape(-1)[0])
        return Episode(observation, np.asarray(self.columns[self.roles.action][rows]), reward, terminated)
