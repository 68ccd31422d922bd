"""A run of World Models so small that it takes seconds."""

from __future__ import annotations

PHASES = (
    "training.phases=["
    "{name: collect, type: warmup, duration_steps: 120, workflow_hooks: [collect], controller: explorer},"
    "{name: V, type: offline, duration_updates: 6, workflow_hooks: [update_world_model], options: {model: V}},"
    "{name: encode, type: offline, duration_cycles: 1, workflow_hooks: [encode]},"
    "{name: M, type: offline, duration_updates: 6, workflow_hooks: [update_world_model], options: {model: M}},"
    "{name: assess, type: offline, duration_cycles: 1, workflow_hooks: [assess]},"
    "{name: dream, type: offline, duration_cycles: 2, workflow_hooks: [evolve, {evaluate_dream: {every: 2_cycles}}],"
    " options: {dream: true}},"
    "{name: C, type: offline, duration_cycles: 2, workflow_hooks: [evolve, {evaluate: {every: 2_cycles}}],"
    " options: {restart: true}}]"
)
TINY = (
    "+experiment=world_models", "environment.id=CartPole-v1", "environment.num_envs=2", "environment.backend=sync",
    "components.representation.depth=2", "components.representation.latent_size=4", "components.dynamics.units=8",
    "components.dynamics.mixtures=2", "components.dynamics.terminal=true", "components.dynamics.reward=true",
    "workflow.frames=8", "workflow.sequences=4", "workflow.sequence_length=8", "workflow.encode_records=50",
    "workflow.episodes=2", "workflow.evolution_envs=3", "workflow.dream_horizon=10",
    "controllers.evolution.population=4",
    "data_sources.replay.capacity=400", "evaluation.episodes=2", "evaluation.num_envs=2", "evaluation.video=false",
    "logging.console=off", "logging.tensorboard=false", "experiment.device=cpu", "logging.every=4", PHASES,
)  # fmt: skip
