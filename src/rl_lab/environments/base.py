"""The interface of vector environments, and the seed of an episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from rl_lab import ranks
from rl_lab.errors import EnvironmentFailure
from rl_lab.records import VectorStep
from rl_lab.specs import ActionSpec, ObservationSpec

SeedStream = Literal["train", "eval", "final", "evolution", "record"]
PER_ENV = ("episode", "anchor", "failures", "actions", "observation", "reward", "is_first")  # rows of a saved state
EpisodeSeed = Callable[[int, int], int]  # (environment index, episode number) -> seed


def episode_seed(run_seed: int, env_index: int, episode: int, stream: SeedStream = "train") -> int:
    """The seed of one episode. The streams never share a seed sequence, so evaluation episodes are held out
    from training and from recorded datasets."""
    domain = get_args(SeedStream).index(stream)
    return int(np.random.SeedSequence([run_seed, domain, env_index, episode]).generate_state(1)[0] >> 1)


class VectorEnv(ABC):
    """Environments stepped together. Every `step` is one agent decision in each of them.

    An episode that ends is reset within the same step (see `VectorStep`), with the next seed of its environment.
    Actions are those of `action_spec`: [env, *shape]. The environment keeps the actions of the running episodes, so
    that `state_dict` / `load_state_dict` can bring them back by resetting with the episode's seed and replaying them.

    `send` and `receive` are the two halves of `step`: in between the caller may do something else. The state of that
    moment is the one before `send`: whoever restores it sends the actions again.
    """

    num_envs: int
    observation_spec: dict[str, ObservationSpec]
    action_spec: ActionSpec
    action_repeat: int
    backend: str = "sync"
    restarts: int = 0  # environments or workers that failed and were replaced, so far
    _sent: np.ndarray | None = None  # the actions of the step that was begun
    events: list[dict[str, str]]  # what happened and was not drained yet (worker restarts): dicts of `kind`, `message`

    def drain_events(self) -> list[dict[str, str]]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    @abstractmethod
    def reset(self, seeds: Sequence[int | None] | None = None) -> VectorStep:
        """Start the first episode in every environment.

        With `seeds`, one for each environment, each plays that one episode and then stands still: its observation and
        a reward of 0 are repeated. None: it does not play at all. The state of such episodes cannot be saved.
        """

    def stop(self, indices: np.ndarray) -> None:
        """Let these environments stand still until the next `reset`."""
        raise NotImplementedError(f"{type(self).__name__} cannot stop single environments")

    @abstractmethod
    def step(self, action: np.ndarray) -> VectorStep: ...

    def send(self, action: np.ndarray) -> None:
        """Begin a step. Environments that work elsewhere begin to work; others do when they are asked to `receive`."""
        self._sent = action

    def receive(self) -> VectorStep:
        """End the step that `send` began."""
        if self._sent is None:
            raise EnvironmentFailure("receive() was called without a send() before it")
        action, self._sent = self._sent, None
        return self.step(action)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Episode numbers, the actions of the running episodes and counters: tensors and plain values only."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> VectorStep:
        """Bring every environment back to the saved moment; the step that the agent acts on next."""

    @abstractmethod
    def render(self) -> np.ndarray | None:
        """An RGB frame of environment 0, height × width × 3, or None where it cannot be rendered."""

    @abstractmethod
    def close(self) -> None: ...


def dealt_environments(states: Sequence[Mapping[str, Any]], own: slice) -> dict[str, Any]:
    """A state for `load_state_dict` of this rank, from the `states` that another number of ranks saved: the running
    episodes of the environments `own`, among all, go on. Empty where episodes could not be saved."""
    if not all(states):
        return {}
    rows = {name: ranks.dealt([state[name] for state in states], own) for name in PER_ENV}
    return {**states[0], **rows, "num_envs": own.stop - own.start}
