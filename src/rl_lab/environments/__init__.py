"""Environments: any Gymnasium id, Atari, Box2D, DeepMind Control and MiniGrid, vectorised and seeded per episode."""

from __future__ import annotations

from rl_lab import ranks
from rl_lab.environments.adapter import SpaceAdapter
from rl_lab.environments.base import SeedStream, VectorEnv, episode_seed
from rl_lab.environments.inspection import EnvironmentFacts, choose_backend, inspect_environment
from rl_lab.environments.runner import SeedPlan
from rl_lab.environments.settings import AtariSettings, EnvironmentSettings
from rl_lab.environments.sync import SyncVectorEnv
from rl_lab.environments.vector import EpisodicVectorEnv

__all__ = [
    "AtariSettings",
    "EnvironmentFacts",
    "EnvironmentSettings",
    "SpaceAdapter",
    "VectorEnv",
    "episode_seed",
    "inspect_environment",
    "make_vector_env",
]


def make_vector_env(
    settings: EnvironmentSettings,
    *,
    seed: int,
    num_envs: int | None = None,
    stream: SeedStream = "train",
    render: bool = False,
    overlap: bool = False,
) -> EpisodicVectorEnv:
    """Environments that are stepped together. `render=True` lets `render()` show environment 0; `overlap=True` says
    that the caller works on something else between `send` and `receive`."""
    settings = settings.resolved() if stream == "train" else settings.resolved().for_evaluation()
    num_envs = num_envs or settings.num_envs
    seeds = SeedPlan(seed, stream, num_envs, first=ranks.rank() * num_envs if stream == "train" else 0)
    if settings.backend == "envpool" and not render:
        from rl_lab.environments.pool import STREAMS, PooledVectorEnv

        if stream in STREAMS:
            return PooledVectorEnv(settings=settings, seeds=seeds)
    if settings.backend == "ray" and stream == "train":
        if settings.staleness is not None:  # the collectors have their own; these show what they are like
            return SyncVectorEnv(settings=settings, seeds=seeds, render=render)
        from rl_lab.environments.ray_actors import RayVectorEnv

        return RayVectorEnv(settings=settings, seeds=seeds, render=render)
    if choose_backend(settings, seeds.num_envs, overlap=overlap) == "process":
        from rl_lab.environments.process import ProcessVectorEnv

        return ProcessVectorEnv(settings=settings, seeds=seeds, render=render)
    return SyncVectorEnv(settings=settings, seeds=seeds, render=render)
