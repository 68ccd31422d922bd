"""Recording a dataset with the agent of a run, with a planner, or with a scripted expert."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rl_lab.components.acting import Mode
from rl_lab.datasets.episode import Attributes
from rl_lab.datasets.files import write_dataset
from rl_lab.datasets.recording import Label, RecordingSettings, record_episodes
from rl_lab.environments import inspect_environment, make_vector_env
from rl_lab.errors import ConfigError
from rl_lab.experiment.agent import load_run
from rl_lab.experiment.device import set_threads
from rl_lab.experts.base import find_expert
from rl_lab.experts.demonstrations import Demonstrations
from rl_lab.orchestration.randomness import forked_random

EXPERT_PREFIX = "expert:"
DOMAIN = 0x726563  # keeps the draws of whoever acts apart from every other use of the seed


@dataclass(frozen=True, kw_only=True)
class RecordingRequest:
    """The arguments of `rl-lab data record`."""

    actor: str  # a run, or expert:NAME
    output: Path
    episodes: int
    format_name: str = "auto"
    noise: float = 0.0
    label: Label = "executed"
    mode: Mode = "eval"
    seed: int = 0
    num_envs: int = 8
    controller: str | None = None  # the role that acts in place of the agent
    environment: str | None = None  # experts: another environment than their usual one
    run_root: str = "experiments"
    trust: bool = False  # let a run that was not made here name code of its own


def record_dataset(request: RecordingRequest) -> Path:
    """Play the episodes and write them; the path of the dataset."""
    if request.noise < 0.0:
        raise ConfigError(f"--noise {request.noise}: expected a number from 0.")
    if request.actor.startswith(EXPERT_PREFIX):
        return _record_expert(request)
    return _record_run(request)


def _record_expert(request: RecordingRequest) -> Path:
    name = request.actor.removeprefix(EXPERT_PREFIX)
    demonstrations = Demonstrations(
        name=name, episodes=request.episodes, seed=request.seed, noise=request.noise, label=request.label
    )
    overrides = {} if request.environment is None else {"id": request.environment}
    settings = find_expert(name).settings(**overrides)
    set_threads("auto", torch.device("cpu"))  # an expert that plans does so with many small operations
    with forked_random(DOMAIN, request.seed):
        return demonstrations.record(settings, request.output, request.format_name)


def _record_run(request: RecordingRequest) -> Path:
    loaded = load_run(request.actor, run_root=request.run_root, trust=request.trust)
    workflow = loaded.workflow
    set_threads(loaded.settings.training.threads, workflow.context.device)
    settings = replace(loaded.settings.environment, num_envs=min(request.num_envs, request.episodes))
    converter = inspect_environment(settings).actions
    assert converter is not None
    recording = RecordingSettings(
        episodes=request.episodes, noise=request.noise, label=request.label, mode=request.mode, seed=request.seed
    )
    if request.controller is not None and workflow.context.controllers.acting(request.controller) is None:
        raise ConfigError(f"--controller {request.controller}: no controller of this run with that role can act.")
    envs = make_vector_env(settings, seed=request.seed, stream="record")
    try:
        with forked_random(DOMAIN, request.seed):
            episodes = record_episodes(workflow.who_acts(request.controller), envs, converter, recording)
            attributes = Attributes(settings.id, "environment", str(loaded.run.path))
            return write_dataset(request.output, episodes, attributes, format_name=request.format_name)
    finally:
        envs.close()
