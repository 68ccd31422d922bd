"""Evaluation: whole episodes with held-out seeds, that training never notices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from rl_lab.components.acting import Acts, Mode
from rl_lab.environments.base import SeedStream, VectorEnv
from rl_lab.errors import ConfigError
from rl_lab.orchestration.randomness import forked_random

_STREAMS: tuple[SeedStream, ...] = ("train", "eval", "final")
_DOMAIN = 0x65766C  # keeps the seeds of acting apart from every other use of the run's seed


@dataclass(frozen=True)
class EvaluationResult:
    """The episodes of one evaluation, in order."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]  # agent decisions
    shares: dict[str, float] = field(default_factory=dict)  # of episodes whose last `info` had a flag set, by its name
    frames: np.ndarray | None = None  # [time, height, width, 3] of the first episode, where it was asked for

    @property
    def return_mean(self) -> float:
        return math.fsum(self.returns) / len(self.returns)

    @property
    def return_std(self) -> float:
        """Spread over the episodes (population)."""
        mean = self.return_mean
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.returns) / len(self.returns))

    def metrics(self) -> dict[str, float]:
        return {
            "eval/return_mean": self.return_mean,
            "eval/return_std": self.return_std,
            "eval/return_min": min(self.returns),
            "eval/return_max": max(self.returns),
            "eval/length_mean": sum(self.lengths) / len(self.lengths),
            "eval/episodes": len(self.returns),
            **{f"eval/share_{name}": share for name, share in self.shares.items()},
        }


def evaluate(
    actor: Acts,
    envs: VectorEnv,
    episodes: int,
    *,
    seed: int,
    stream: SeedStream = "eval",
    mode: Mode = "eval",
    record: bool = False,
    stop: Callable[[], bool] | None = None,
    progress: Callable[[int], object] | None = None,
) -> EvaluationResult | None:
    """Play `episodes` episodes; None where `stop` asked to give up. `progress` hears how many are done.

    Episode k runs in environment k mod n, decided before the start, and all are waited for: counting whichever episodes
    end first would favour short ones. The environments' seeds come from their own stream, and whatever acting draws is
    seeded from (seed, stream), so the same agent gets the same score each time.
    """
    if episodes < 1:
        raise ConfigError(f"evaluation.episodes is {episodes}: expected at least 1.")
    with forked_random(_DOMAIN, seed, _STREAMS.index(stream)), torch.no_grad():
        return _play(actor, envs, episodes, mode, record, stop, progress)


def _play(
    actor: Acts,
    envs: VectorEnv,
    episodes: int,
    mode: Mode,
    record: bool,
    stop: Callable[[], bool] | None,
    progress: Callable[[int], object] | None,
) -> EvaluationResult | None:
    count = envs.num_envs
    returns, lengths = [0.0] * episodes, [0] * episodes
    quota = [len(range(index, episodes, count)) for index in range(count)]
    played = [0] * count
    running_return, running_length = np.zeros(count, np.float64), np.zeros(count, np.int64)
    frames: list[np.ndarray] = []
    flags: list[dict[str, bool]] = []
    current, state = envs.reset(), actor.initial_state(count)
    left = episodes
    while left:
        if stop is not None and stop():
            return None
        if record and played[0] == 0:
            frame = envs.render()
            record = frame is not None and (not frames or frame.shape == frames[0].shape)
            if record and frame is not None:
                frames.append(frame)
        state = actor.reset_state(state, current.is_first)
        action, state = actor.act(current.observation, state, mode=mode)
        current = envs.step(action)
        running_return += current.reward
        running_length += 1
        ended = current.ended
        if ended is None:
            continue
        for position, index in enumerate(ended.indices.tolist()):
            if played[index] < quota[index]:
                episode = index + played[index] * count
                returns[episode] = float(running_return[index] + ended.reward[position])
                lengths[episode] = int(running_length[index])
                flags.append({name: value for name, value in ended.info[position].items() if isinstance(value, bool)})
                left -= 1
            played[index] += 1
        running_return[ended.indices] = 0.0
        running_length[ended.indices] = 0
        if progress is not None:
            progress(episodes - left)
    return EvaluationResult(tuple(returns), tuple(lengths), _shares(flags), np.stack(frames) if frames else None)


def _shares(flags: list[dict[str, bool]]) -> dict[str, float]:
    """The share of episodes that ended with each flag set, of those flags that all of them had."""
    common = set.intersection(*map(set, flags)) if flags else set()
    return {name: sum(entry[name] for entry in flags) / len(flags) for name in sorted(common)}
