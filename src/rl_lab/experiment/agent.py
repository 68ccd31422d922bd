"""A trained agent, from its run directory alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rl_lab.environments.adapter import SpaceAdapter
from rl_lab.environments.factory import build_environment
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.experiment.config import compose_option, resolve
from rl_lab.experiment.device import resolve_device, resolve_precision
from rl_lab.experiment.model import build_model
from rl_lab.experiment.resume import find_checkpoint
from rl_lab.experiment.trust import open_config
from rl_lab.experiment.validation import Settings, validate
from rl_lab.kernels import registry
from rl_lab.orchestration.checkpoint import Checkpoint, CheckpointManager
from rl_lab.orchestration.nonfinite import nonfinite_parameter
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.orchestration.run_state import load_agent
from rl_lab.records import Observation
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import WorkflowContext

PLANNERS = "controllers/planners"


@dataclass(frozen=True)
class LoadedRun:
    """A workflow with the weights of a checkpoint, and where they come from."""

    run: RunDirectory
    config: dict[str, Any]
    settings: Settings
    workflow: Workflow
    checkpoint: Checkpoint


@dataclass(frozen=True)
class AgentMemory:
    """The agent's memory of each environment: opaque to the caller, who hands it from act to act."""

    state: AgentState
    adapters: tuple[SpaceAdapter, ...]
    is_first: np.ndarray  # [env] whether the next observation begins an episode


def load(
    run: str | Path,
    *,
    run_root: str | Path = "experiments",
    device: str = "auto",
    env: gymnasium.Env | None = None,
    trust: bool = False,
) -> Agent:
    """The agent of a run (a run directory, its name, `latest`) or of one of its checkpoints.

    Observations and actions are those of the run's environment, or of `env` where one is given. A run that was not made
    here may name no code of its own, unless you `trust` it.
    """
    loaded = load_run(run, run_root=run_root, device=device, trust=trust, builds_environment=env is None)
    if env is not None:
        return Agent(loaded, env.observation_space, env.action_space)
    built = build_environment(loaded.settings.environment)
    try:
        return Agent(loaded, built.env.observation_space, built.env.action_space)
    finally:
        built.env.close()


def load_run(
    run: str | Path,
    *,
    run_root: str | Path = "experiments",
    device: str = "auto",
    planner: str | None = None,
    planner_settings: Sequence[str] = (),
    trust: bool = False,
    builds_environment: bool = True,
) -> LoadedRun:
    """Rebuild the model from the run's own configuration and put its weights in place.

    `planner`, one of the group controllers/planners, takes the place of the run's own; `planner_settings` are key=value
    of it. A planner has nothing that is learned, so any can plan in any model. `trust` lets a run that was not made
    here name code of its own.
    """
    directory, path = find_checkpoint(str(run), run_root)
    stored = open_config(directory, trust=trust, builds_environment=builds_environment).config
    if planner is not None:
        stored.setdefault("controllers", {})["planner"] = compose_option(PLANNERS, planner, planner_settings)
        if "act_with" in stored["workflow"]:  # it could have learned to act by its policy alone
            stored["workflow"]["act_with"] = "planner"
    config = resolve(stored)
    config["experiment"]["device"] = device
    settings = validate(config)
    where = resolve_device(device)
    model = build_model(config, where)
    autocast_dtype = resolve_precision(settings.training.precision, where)
    registry.enable(model.modules, device=where, dtype=autocast_dtype or torch.float32, mode=settings.training.kernels)
    manager = CheckpointManager(directory.checkpoints, workflow=model.workflow.name)
    if path is None and settings.evaluation.select == "best":
        path = manager.best()
    checkpoint = manager.load(path, agent_only=True)
    context = WorkflowContext(
        config=config,
        device=where,
        seed=settings.experiment.seed,
        observation_spec=model.observation_spec,
        action_spec=model.action_spec,
        components=model.components,
        controllers=model.controllers,
        autocast_dtype=autocast_dtype,
    )
    model.workflow.initialize(context)
    if planner is not None and getattr(model.workflow, "planner", None) is None:
        raise ConfigError(
            f"planner={planner}: {directory.path} is a run of {model.workflow.name}, which has no model to plan in. "
            "MPC, MBMPC, PlaNet, the Dreamers, TD-MPC and TD-MPC2 have one."
        )
    load_agent(checkpoint, model.workflow, context, exchanged=() if planner is None else ("planner",))
    bad = nonfinite_parameter(model.modules)
    if bad is not None:
        raise CheckpointError(
            f"{checkpoint.path} holds the parameter {bad}, which is NaN or infinite. Use another one."
        )
    return LoadedRun(directory, config, settings, model.workflow, checkpoint)


class Agent:
    """Acts in the environment that it was trained in, with the same code that training used."""

    def __init__(self, loaded: LoadedRun, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.run, self.config, self.workflow = loaded.run, loaded.config, loaded.workflow
        self.settings: EnvironmentSettings = loaded.settings.environment
        self.observation_space, self.action_space = observation_space, action_space
        expected = loaded.workflow.context.observation_spec
        adapter = self._adapter()
        if adapter.observation_spec != dict(expected):
            raise ConfigError(
                f"The agent of {self.run.path} sees {_text(expected)}, but this environment gives "
                f"{_text(adapter.observation_spec)}. Use the environment that it was trained in ({self.settings.id})."
            )

    def _adapter(self) -> SpaceAdapter:
        return SpaceAdapter(self.observation_space, self.action_space, self.settings)

    def initial_state(self, num_envs: int = 1) -> AgentMemory:
        """No memory yet: call it at the start of every episode (of all environments)."""
        adapters = tuple(self._adapter() for _ in range(num_envs))
        return AgentMemory(self.workflow.initial_state(num_envs), adapters, np.ones(num_envs, bool))

    def reset_state(self, state: AgentMemory, is_first: np.ndarray) -> AgentMemory:
        """Forget the environments whose next observation begins an episode, and only those."""
        flags = np.asarray(is_first, bool)
        return AgentMemory(self.workflow.reset_state(state.state, flags), state.adapters, state.is_first | flags)

    def act(self, observation: Any, state: AgentMemory, *, mode: Mode = "eval") -> tuple[Any, AgentMemory]:
        """An action for `env.step`. The observation is the environment's own: of one, or a batch of `num_envs`."""
        count = len(state.adapters)
        batched = self._is_batched(observation, count)
        rows = [_row(observation, index) for index in range(count)] if batched else [observation]
        parts = [
            adapter.observation(row, bool(first))
            for adapter, row, first in zip(state.adapters, rows, state.is_first, strict=True)
        ]
        batch: Observation = {key: np.stack([part[key] for part in parts]) for key in parts[0]}
        with torch.no_grad():
            action, memory = self.workflow.act(batch, state.state, mode=mode)
        actions = state.adapters[0].actions(action)
        chosen = np.stack(actions) if batched else actions[0]
        return chosen, AgentMemory(memory, state.adapters, np.zeros(count, bool))

    def _is_batched(self, observation: Any, count: int) -> bool:
        space, value = self.observation_space, observation
        while isinstance(space, spaces.Dict | spaces.Tuple):
            key: Any = next(iter(space.spaces)) if isinstance(space, spaces.Dict) else 0
            if isinstance(space, spaces.Dict) and (not isinstance(value, Mapping) or key not in value):
                raise ConfigError(
                    f"The observation must be a mapping with the keys {', '.join(map(str, space.spaces))}."
                )
            space, value = space.spaces[key], value[key]
        shape, expected = np.shape(value), tuple(space.shape or ())
        if shape == expected and count == 1:
            return False
        if shape == (count, *expected):
            return True
        raise ConfigError(
            f"The observation has shape {shape}; the state is for {count} environment(s), so it must be "
            f"{(count, *expected)}{f' or {expected}' if count == 1 else ''}."
        )


def _row(observation: Any, index: int) -> Any:
    """One environment's part of a batched observation."""
    if isinstance(observation, Mapping):
        return {key: _row(value, index) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return tuple(_row(value, index) for value in observation)
    return observation[index]


def _text(specs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {spec.kind} {list(spec.shape)}" for key, spec in specs.items())
