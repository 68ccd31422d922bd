"""Recording episodes: whatever acts, in vector environments, as a list of whole episodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rl_lab.components.acting import Acts, Mode
from rl_lab.datasets.episode import Episode
from rl_lab.environments.adapter import ActionConverter
from rl_lab.environments.base import VectorEnv
from rl_lab.records import EpisodeEnd, VectorStep

Label = Literal["executed", "clean"]


@dataclass
class _Running:
    """An episode that is being played."""

    observations: list[dict[str, np.ndarray]] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RecordingSettings:
    """Settings for playing episodes and for the fields that are kept."""

    episodes: int
    noise: float = 0.0  # deviation that is added to continuous actions; share of discrete ones that are drawn at random
    label: Label = "executed"  # clean: what the actor chose is kept, while the action with noise is carried out (DART)
    mode: Mode = "eval"
    seed: int = 0  # of the noise


def record_episodes(
    actor: Acts, envs: VectorEnv, converter: ActionConverter, settings: RecordingSettings
) -> Iterator[Episode]:
    """Whole episodes in order, with the environment's own actions. Episode k is played in environment k mod n and has
    the k-th seed of the environments' stream, so that it does not depend on how many are played side by side."""
    count, wanted = envs.num_envs, settings.episodes
    rng = np.random.default_rng(np.random.SeedSequence([settings.seed, 0x7265]))
    running = [_Running() for _ in range(count)]
    played, finished, following = [0] * count, dict[int, Episode](), 0
    current, state = envs.reset(), actor.initial_state(count)
    while following < wanted:
        state = actor.reset_state(state, current.is_first)
        chosen, state = actor.act(current.observation, state, mode=settings.mode)
        executed = _with_noise(chosen, settings.noise, converter, rng)
        kept = chosen if settings.label == "clean" else executed
        _remember(running, current, np.asarray(converter(kept)))
        current = envs.step(executed)
        for index in range(count):
            running[index].rewards.append(float(current.reward[index]))
        if current.ended is not None:
            for position, index in enumerate(current.ended.indices.tolist()):
                number = index + played[index] * count
                if number < wanted:
                    finished[number] = _closed(running[index], current.ended, position)
                running[index] = _Running()
                played[index] += 1
        while following in finished:
            yield finished.pop(following)
            following += 1


def _with_noise(action: np.ndarray, noise: float, converter: ActionConverter, rng: np.random.Generator) -> np.ndarray:
    if noise == 0.0:
        return action
    if converter.spec.kind == "continuous":
        return np.clip(action + noise * rng.standard_normal(action.shape), -1.0, 1.0).astype(np.float32)
    others = np.stack([rng.integers(0, size, len(action)) for size in converter.spec.classes], -1).astype(np.int32)
    return np.where(rng.random((len(action), 1)) < noise, others, action)


def _remember(running: list[_Running], step: VectorStep, actions: np.ndarray) -> None:
    for index, episode in enumerate(running):
        episode.observations.append({key: value[index] for key, value in step.observation.items()})
        episode.actions.append(actions[index])


def _closed(episode: _Running, ended: EpisodeEnd, position: int) -> Episode:
    last = {key: value[position] for key, value in ended.observation.items()}
    observations = [*episode.observations, last]
    rewards = [*episode.rewards[:-1], float(ended.reward[position])]
    return Episode(
        {key: np.stack([observation[key] for observation in observations]) for key in last},
        np.stack(episode.actions),
        np.asarray(rewards, np.float32),
        bool(ended.is_terminal[position]),
    )
