"""Overrides for runs that tests make: quiet ones, and very small ones."""

from __future__ import annotations

QUIET = ["logging.console=off", "logging.tensorboard=false", "evaluation.video=false"]
TINY_DREAMER = [
    "+experiment=dreamer_v3",
    "environment.id=CartPole-v1",
    "size=tiny",
    "workflow.batch_size=2",
    "workflow.sequence_length=8",
    "workflow.horizon=3",
    "workflow.train_ratio=2",
    "evaluation.episodes=2",
    "training.total_timesteps=120",
]
RANDOM = ["+experiment=random", "environment.id=CartPole-v1", "training.total_timesteps=80", "evaluation.episodes=2"]
