"""Real beside imagined: plays held-out episodes and lets the workflow's model predict them open loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rl_lab.environments import make_vector_env
from rl_lab.environments.base import VectorEnv
from rl_lab.errors import ConfigError
from rl_lab.experiment.agent import load_run
from rl_lab.experiment.device import set_threads
from rl_lab.experiment.planning import can_plan, write_run_planning
from rl_lab.experiment.validation import Settings
from rl_lab.metrics.illustrations import write_illustrations
from rl_lab.metrics.imagination import write_imagination
from rl_lab.metrics.report import write_report
from rl_lab.orchestration.randomness import forked_random
from rl_lab.records import SequenceBatch, VectorStep
from rl_lab.workflows.base import Workflow

DEFAULT_CONTEXT, DEFAULT_HORIZON = 5, 45
EPISODES = 4  # played side by side; the longest are shown
SEED_DOMAIN = 0x1346

Rows = list[dict[str, np.ndarray]]  # the records of one episode


def can_imagine(workflow: Workflow) -> bool:
    return type(workflow).imagine is not Workflow.imagine


def can_illustrate(workflow: Workflow) -> bool:
    """Whether there is anything to draw of its model: what it imagines, or pictures of its own."""
    return can_imagine(workflow) or type(workflow).illustrate is not Workflow.illustrate


def write_run_imagination(
    workflow: Workflow,
    settings: Settings,
    folder: Path,
    *,
    context: int = DEFAULT_CONTEXT,
    horizon: int = DEFAULT_HORIZON,
    seed: int | None = None,
) -> list[Path]:
    """Play, predict and draw into `folder`/imagination; the files, the main picture first."""
    seed = settings.experiment.seed if seed is None else seed
    envs = make_vector_env(settings.environment, seed=seed, num_envs=EPISODES, stream="final")
    try:
        with forked_random(SEED_DOMAIN, seed), torch.no_grad():
            episodes = play_episodes(workflow, envs, context + horizon)
            batch = batch_of(episodes, context + horizon, workflow.context.device)
            steps = batch.reward.shape[1]
            if steps < 2:
                raise ConfigError("Every episode ended after one step: there is nothing to imagine.")
            rollout = workflow.imagine(batch, context=min(context, steps // 2)) if can_imagine(workflow) else None
            further = workflow.illustrate(batch)
    finally:
        envs.close()
    paths = [] if rollout is None else write_imagination(rollout, folder / "imagination")
    return [*paths, *write_illustrations(further, folder / "imagination")] if further else paths


def imagine_run(
    run: str | Path,
    *,
    run_root: str | Path = "experiments",
    context: int,
    horizon: int,
    seed: int | None = None,
    trust: bool = False,
) -> list[Path]:
    """Draw into the run's folder imagination/ and write its report anew; the files."""
    loaded = load_run(run, run_root=run_root, trust=trust)
    if not can_illustrate(loaded.workflow):
        raise ConfigError(f"{loaded.run.path}: the workflow '{loaded.workflow.name}' has no model to imagine with.")
    set_threads(loaded.settings.training.threads, loaded.workflow.context.device)
    folder = loaded.run.path
    paths = write_run_imagination(loaded.workflow, loaded.settings, folder, context=context, horizon=horizon, seed=seed)
    if can_plan(loaded.workflow):
        paths += write_run_planning(loaded.workflow, loaded.settings, folder, seed=seed)
    return [*paths, write_report(folder)]


def play_episodes(workflow: Workflow, envs: VectorEnv, steps: int) -> list[Rows]:
    """The first episode of every environment, or as much of it as is asked for."""
    count = envs.num_envs
    current, state = envs.reset(), workflow.initial_state(count)
    episodes: list[Rows] = [[] for _ in range(count)]
    running = set(range(count))
    for _ in range(steps):
        state = workflow.reset_state(state, current.is_first)
        action, state = workflow.act(current.observation, state, mode="eval")
        for index in running:
            episodes[index].append(_record(current, index, action[index]))
        current = envs.step(action)
        if current.ended is not None:
            for position, index in enumerate(current.ended.indices.tolist()):
                if index in running:
                    ended = current.ended
                    last = {f"observation.{key}": value[position] for key, value in ended.observation.items()}
                    terminal = ended.is_terminal[position]
                    flags = {"is_first": np.False_, "is_last": np.True_, "is_terminal": terminal}
                    last |= {"action": np.zeros_like(action[index]), "reward": ended.reward[position], **flags}
                    episodes[index].append(last)
                    running.discard(index)
        if not running:
            break
    return episodes


def _record(step: VectorStep, index: int, action: np.ndarray) -> dict[str, np.ndarray]:
    record = {f"observation.{key}": value[index] for key, value in step.observation.items()}
    flags = {"is_first": step.is_first[index], "is_last": np.False_, "is_terminal": np.False_}
    return record | {"action": action, "reward": step.reward[index], **flags}


def batch_of(episodes: list[Rows], steps: int, device: torch.device) -> SequenceBatch:
    """The episodes that last long enough, cut to one length: that of the longest, at most `steps`."""
    length = min(steps, max(map(len, episodes)))
    chosen = [rows[:length] for rows in episodes if len(rows) >= length]
    stacked = {
        name: torch.from_numpy(np.stack([np.stack([row[name] for row in rows]) for rows in chosen])).to(device)
        for name in chosen[0][0]
    }
    start = len("observation.")
    return SequenceBatch(
        observation={name[start:]: value for name, value in stacked.items() if name.startswith("observation.")},
        action=stacked["action"],
        reward=stacked["reward"],
        is_first=stacked["is_first"],
        is_last=stacked["is_last"],
        is_terminal=stacked["is_terminal"],
    )
