"""The base of all vector environments: episode bookkeeping, failures, and replaying episodes from seed and actions."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from rl_lab.environments.action_log import ActionLog
from rl_lab.environments.base import VectorEnv
from rl_lab.environments.failures import last_words
from rl_lab.environments.runner import Ending, SeedPlan
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.environments.shared_arrays import ON, ONCE, STILL
from rl_lab.errors import CheckpointError, EnvironmentFailure
from rl_lab.records import EpisodeEnd, Observation, VectorStep
from rl_lab.specs import ActionSpec, ObservationSpec

MAX_FAILURES = 3  # of one environment without a finished episode in between
_NUMPY_DTYPES = {"uint8": np.uint8, "float32": np.float32, "int32": np.int32}


@dataclass(slots=True)
class EndedEpisode:
    """One episode that ended in this step, and the episode number that the next one needs for bringing it back."""

    index: int
    ending: Ending
    observation: Observation  # [...] the true last one, without an environment axis
    anchor: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Order to bring one environment back."""

    index: int
    anchor: int
    episode: int
    actions: np.ndarray


class EpisodicVectorEnv(VectorEnv):
    """A vector environment whose episodes can be brought back. Subclasses step the environments."""

    def __init__(
        self,
        *,
        settings: EnvironmentSettings,
        seeds: SeedPlan,
        observation_spec: dict[str, ObservationSpec],
        action_spec: ActionSpec,
        notes: Sequence[str] = (),
    ) -> None:
        self.settings, self._seeds = settings, seeds
        self.num_envs = seeds.num_envs
        self.observation_spec, self.action_spec = observation_spec, action_spec
        assert settings.action_repeat != "auto"
        self.action_repeat = settings.action_repeat
        self.notes = list(notes)
        self.restarts = 0
        self.events: list[dict[str, str]] = []
        self._failures = [0] * self.num_envs
        self._episode = [0] * self.num_envs
        self._anchor = [0] * self.num_envs
        self._log = ActionLog(self.num_envs, action_spec.shape, action_spec.dtype)
        self._action_shape = (self.num_envs, *action_spec.shape)
        self._layout = [
            (key, (self.num_envs, *spec.shape), _NUMPY_DTYPES[spec.dtype]) for key, spec in observation_spec.items()
        ]
        self._float_keys = [key for key, spec in observation_spec.items() if spec.dtype == "float32"]
        self._current: VectorStep | None = None
        self._play = np.full(self.num_envs, ON, np.uint8)

    # What a back end does ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _start_all(self, out: Observation, seeds: Sequence[int | None] | None) -> None:
        """Begin episode 0 everywhere, with these seeds or those of the plan."""

    def _begin_all(self, action: np.ndarray) -> None:
        """Let the environments set to work, where that needs no waiting."""

    @abstractmethod
    def _step_all(self, action: np.ndarray, out: Observation) -> tuple[Any, list[EndedEpisode]]:
        """One decision everywhere: rewards, and the episodes that ended (already begun anew in `out`)."""

    @abstractmethod
    def _replay_all(self, orders: list[Replay], out: Observation) -> tuple[list[float], list[bool], list[int]]:
        """Bring every environment back: the last rewards, whether an episode begins there, and the episode reached."""

    # Stepping ---------------------------------------------------------------------------------------------------------

    def reset(self, seeds: Sequence[int | None] | None = None) -> VectorStep:
        self._finish_work()
        out = self._empty()
        self._play[:] = ON if seeds is None else [STILL if seed is None else ONCE for seed in seeds]
        self._start_all(out, seeds)
        self._episode = [0] * self.num_envs
        self._anchor = [0] * self.num_envs
        self._log.clear()
        reward = np.zeros(self.num_envs, np.float32)
        self._check_finite(out, reward)
        self._current = VectorStep(out, reward, np.ones(self.num_envs, bool))
        return self._current

    def step(self, action: np.ndarray) -> VectorStep:
        self.send(action)
        return self.receive()

    def stop(self, indices: np.ndarray) -> None:
        self._play[indices] = STILL

    def send(self, action: np.ndarray) -> None:
        if self._current is None:
            raise EnvironmentFailure("step() was called before reset() or load_state_dict()")
        if action.shape != self._action_shape:
            raise EnvironmentFailure(
                f"step() was given actions of shape {action.shape}, expected {self._action_shape} (environments first)"
            )
        if self._sent is not None:
            raise EnvironmentFailure("step() was called before the step under way was received")
        self._sent = action
        self._begin_all(action)

    def receive(self) -> VectorStep:
        action, self._sent = self._sent, None
        if action is None:
            raise EnvironmentFailure("receive() was called without a send() before it")
        out = self._empty()
        rewards, endings = self._step_all(action, out)
        reward = np.array(rewards, np.float32)
        is_first = np.zeros(self.num_envs, bool)
        self._log.append(action)
        ended = self._close_episodes(endings, reward, is_first) if endings else None
        self._check_finite(out, reward)
        self._current = VectorStep(out, reward, is_first, ended)
        return self._current

    def _finish_work(self) -> None:
        """Before the environments are put elsewhere: a step under way must not answer in another's place."""
        if self._sent is not None:
            self.receive()

    def _empty(self) -> Observation:
        return {key: np.empty(shape, dtype) for key, shape, dtype in self._layout}

    def _close_episodes(self, endings: list[EndedEpisode], reward: np.ndarray, is_first: np.ndarray) -> EpisodeEnd:
        indices = np.array([item.index for item in endings], np.int64)
        reward[indices], is_first[indices] = 0.0, self._play[indices] == ON
        for item in endings:
            self._episode[item.index] += 1
            self._anchor[item.index] = item.anchor
            if item.anchor == self._episode[item.index]:
                self._log.begin(item.index)
            if not item.ending.info.get("worker_restarted"):
                self._failures[item.index] = 0
        last = {key: np.stack([item.observation[key] for item in endings]) for key in self.observation_spec}
        rewards = np.array([item.ending.reward for item in endings], np.float32)
        self._check_finite(last, rewards, indices)
        terminal = np.array([item.ending.is_terminal for item in endings])
        return EpisodeEnd(indices, last, rewards, terminal, [item.ending.info for item in endings])

    def _check_finite(self, out: Observation, reward: np.ndarray, indices: np.ndarray | None = None) -> None:
        """Stop at NaN or infinity. One dot product is the fast test; only where it fails are the numbers looked at."""
        for key in self._float_keys:
            flat = out[key].reshape(-1)
            if not isfinite(np.dot(flat, flat)):
                self._explain_nonfinite(f"observation '{key}'", out[key], indices)
        if not isfinite(np.dot(reward, reward)):
            self._explain_nonfinite("reward", reward, indices)

    def _explain_nonfinite(self, what: str, values: np.ndarray, indices: np.ndarray | None) -> None:
        bad = ~np.isfinite(values)
        if not bad.any():
            return
        row = int(np.argmax(bad.reshape(len(values), -1).any(1)))
        index = row if indices is None else int(indices[row])
        raise EnvironmentFailure(
            f"environment.id={self.settings.id}: {what} of environment {index} (episode {self._episode[index]}) is NaN "
            f"or infinite: {np.array2string(np.ravel(values[row]), threshold=12)}. The environment must return finite "
            "numbers; check its dynamics for division by zero or divergence, or clip there."
        )

    # Failures ---------------------------------------------------------------------------------------------------------

    def _failed(self, index: int, error: str, *, restarted: str) -> None:
        """Count a failure of one environment; the third in a row ends the run."""
        self._failures[index] += 1
        self.restarts += 1
        summary = last_words(error)
        self.events.append(
            {
                "kind": "worker_restart",
                "message": f"environment {index} failed in episode {self._episode[index]} ({summary}); {restarted} "
                f"restarted ({self._failures[index]} in a row)",
            }
        )
        if self._failures[index] >= MAX_FAILURES:
            raise EnvironmentFailure(
                f"environment.id={self.settings.id}: environment {index} failed {MAX_FAILURES} times without finishing "
                f"an episode. Its last error:\n{error.strip()}"
            )

    def _picture(self, frame: np.ndarray | str) -> np.ndarray | None:
        """A rendered frame; a reason why there is none becomes an event."""
        if not isinstance(frame, str):
            return frame
        self.events.append({"kind": "no_video", "message": f"environment.id={self.settings.id}: {frame}"})
        return None

    def _lost_episode(self, index: int, error: str) -> EndedEpisode:
        """The episode that a failure cut off: truncated at the last observation that is known."""
        assert self._current is not None
        last = {key: value[index].copy() for key, value in self._current.observation.items()}
        info = {"worker_restarted": True, "error": error.strip()[-2000:]}
        return EndedEpisode(index, Ending(0.0, False, info), last, self._episode[index] + 1)

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        import torch

        current = self._current
        if current is None or (self._play != ON).any():
            return {}
        actions = [self._compact(self._log.actions(index)) for index in range(self.num_envs)]
        return {
            "id": self.settings.id,
            "num_envs": self.num_envs,
            "episode": torch.tensor(self._episode, dtype=torch.int64),
            "anchor": torch.tensor(self._anchor, dtype=torch.int64),
            "failures": torch.tensor(self._failures, dtype=torch.int64),
            "actions": [torch.from_numpy(part) for part in actions],
            "observation": {key: torch.from_numpy(value.copy()) for key, value in current.observation.items()},
            "reward": torch.from_numpy(current.reward.copy()),
            "is_first": torch.from_numpy(current.is_first.copy()),
            "restarts": self.restarts,
        }

    def _compact(self, actions: np.ndarray) -> np.ndarray:
        small = self.action_spec.kind == "discrete" and max(self.action_spec.classes) <= 256
        return actions.astype(np.uint8 if small else actions.dtype, copy=True)

    def load_state_dict(self, state: dict[str, Any]) -> VectorStep:
        self._finish_work()
        if not state:
            return self.reset()
        if state["id"] != self.settings.id or state["num_envs"] != self.num_envs:
            raise CheckpointError(
                f"The checkpoint holds {state['num_envs']} environments of {state['id']}, this run has {self.num_envs} "
                f"of {self.settings.id}. Resume with the run's own environment settings."
            )
        self._play[:] = ON
        self._episode, self._anchor = state["episode"].tolist(), state["anchor"].tolist()
        self._failures, self.restarts = state["failures"].tolist(), int(state["restarts"])
        self._log.load([part.numpy() for part in state["actions"]])
        orders = [
            Replay(index, self._anchor[index], self._episode[index], np.array(self._log.actions(index)))
            for index in range(self.num_envs)
        ]
        out = self._empty()
        rewards, firsts, episodes = self._replay_all(orders, out)
        self._compare(state, out, rewards, firsts, episodes)
        reward, is_first = state["reward"].numpy().copy(), state["is_first"].numpy().copy()
        self._current = VectorStep(out, reward, is_first)
        return self._current

    def _compare(
        self, state: dict[str, Any], out: Observation, rewards: list[float], firsts: list[bool], episodes: list[int]
    ) -> None:
        """Say so where the replayed episodes are not the saved ones."""
        different = set()
        for key, value in state["observation"].items():
            same = np.equal(out[key], value.numpy()).reshape(self.num_envs, -1).all(1)
            different.update(np.flatnonzero(~same).tolist())
        saved_reward = state["reward"].numpy()
        for index in range(self.num_envs):
            ended = episodes[index] != self._episode[index] or firsts[index] != bool(state["is_first"][index])
            if ended or np.float32(rewards[index]) != saved_reward[index]:
                different.add(index)
        if different:
            message = (
                f"environment.id={self.settings.id}: this environment is not deterministic: the same seed and actions "
                f"led environment(s) {', '.join(map(str, sorted(different)))} elsewhere, so the resumed run goes on "
                "from there and will not equal the uninterrupted one. If only its reset leaves something behind, set "
                "environment.rebuild_each_episode=true."
            )
            self.events.append({"kind": "nondeterministic_environment", "message": message})
            warnings.warn(message, RuntimeWarning, stacklevel=3)
