"""Facts about an environment (its spaces, its speed, what is wrong with it), found by playing it for a moment."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from rl_lab.environments.adapter import ActionConverter
from rl_lab.environments.factory import build_environment
from rl_lab.environments.failures import described
from rl_lab.environments.families import family_of
from rl_lab.environments.runner import EpisodeRunner, SeedPlan
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import EnvironmentFailure, RLLabError
from rl_lab.specs import ActionSpec, ObservationSpec

_PROBE_SECONDS = 0.05
_PROBE_STEPS = 200
_MESSAGE_US = 150.0  # what waking the workers and copying their results costs per vector step
_WORTH_IT = 0.6  # workers must save this much, for they also cost memory and start-up time


@dataclass(frozen=True)
class EnvironmentFacts:
    """Facts about an environment that a run needs before anything is built."""

    observation_spec: dict[str, ObservationSpec]
    action_spec: ActionSpec
    max_episode_steps: int | None  # in decisions: the time limit divided by the action repeat
    step_cost_us: float  # of one decision in one environment, in this process
    notes: tuple[str, ...]
    action_repeat: int = 1
    actions: ActionConverter | None = None  # between the agent's actions and the environment's own


_known: dict[str, EnvironmentFacts] = {}


def inspect_environment(settings: EnvironmentSettings) -> EnvironmentFacts:
    """Build one environment, play some random steps, and report. The answer is kept for equal settings.

    A user's own environment, and any that is to be played in worker processes, is looked at in one: should it hang,
    crash or end its process, the run can still say so.
    """
    in_worker = settings.backend in ("process", "ray") or family_of(settings.id) is None
    # These change no fact.
    settings = replace(
        settings.resolved(), num_envs=1, backend="sync", workers="auto", ray_address=None, staleness=None
    )
    if settings.key not in _known:
        if in_worker:
            from rl_lab.environments.process import probe_in_worker

            _known[settings.key] = probe_in_worker(settings)
        else:
            _known[settings.key] = probe(settings)
    return _known[settings.key]


def probe(settings: EnvironmentSettings) -> EnvironmentFacts:
    """Build and play the environment in this process."""
    built = build_environment(settings)
    runner = EpisodeRunner(settings=settings, index=0, seeds=SeedPlan(0, "train", 1), built=built)
    adapter, repeat = built.adapter, settings.action_repeat
    assert repeat != "auto"
    try:
        warnings = _look_over(settings) if settings.check else ()
        cost = _step_cost(runner)
    except (Exception, SystemExit) as error:
        raise _explained(settings, error) from error
    finally:
        runner.close()
    frames = built.frame_limit or getattr(built.env.unwrapped, "max_steps", None)  # MiniGrid limits itself
    limit = ceil(frames / repeat) if isinstance(frames, int) else None
    return EnvironmentFacts(
        adapter.observation_spec,
        adapter.action_spec,
        limit,
        cost,
        (*adapter.notes, *warnings),
        action_repeat=repeat,
        actions=adapter.action_converter,
    )


def _look_over(settings: EnvironmentSettings) -> tuple[str, ...]:
    """`environment.check`: what is wrong with a user's environment ends the run, what may go wrong becomes a note."""
    from rl_lab.environments.checker import check_environment

    if family_of(settings.id) is not None:  # those of the known libraries were looked over long ago
        return ()
    findings = check_environment(settings, thorough=False)
    errors = [f"{item.what} {item.fix}".strip() for item in findings if item.severity == "error"]
    if errors:
        raise EnvironmentFailure(f"environment.id={settings.id} cannot be trained in: {' '.join(errors)}")
    warnings: dict[str, str] = {}
    for item in findings:
        if item.severity == "warning":
            warnings.setdefault(item.fix, f"{item.what} {item.fix}".strip())  # the same trouble is told once
    return tuple(warnings.values())


def _explained(settings: EnvironmentSettings, error: BaseException) -> RLLabError:
    """The checker knows the usual reasons for an environment that cannot be played."""
    from rl_lab.environments.checker import check_environment

    if isinstance(error, RLLabError):
        return error
    findings = [item for item in check_environment(settings, thorough=False) if item.severity == "error"]
    reasons = " ".join(f"{item.what} {item.fix}" for item in findings) or described(error)
    return EnvironmentFailure(f"environment.id={settings.id} cannot be played: {reasons}")


def _step_cost(runner: EpisodeRunner) -> float:
    adapter = runner.adapter
    out = {key: np.empty((1, *spec.shape), spec.dtype) for key, spec in adapter.observation_spec.items()}
    rng = np.random.default_rng(0)
    runner.start(0, out, 0)
    costs: list[float] = []
    spent = 0.0
    while len(costs) < _PROBE_STEPS and (spent < _PROBE_SECONDS or len(costs) < 3):
        action = adapter.action(random_action(adapter.action_spec, rng))
        began = time.perf_counter()
        _, ending = runner.step(action, out, 0)
        costs.append(time.perf_counter() - began)
        spent += costs[-1]
        if ending is not None:
            runner.start(runner.episode + 1, out, 0)
    return float(np.median(costs)) * 1e6


def random_action(spec: ActionSpec, rng: np.random.Generator) -> Any:
    """One uniform action of the agent."""
    if spec.kind == "continuous":
        return rng.uniform(-1.0, 1.0, spec.shape).astype(np.float32)
    return rng.integers(0, spec.classes, len(spec.classes), dtype=np.int32)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(settings: EnvironmentSettings, num_envs: int) -> int:
    """Worker processes for so many environments."""
    return min(num_envs, available_cores() if settings.workers == "auto" else settings.workers)


def choose_backend(settings: EnvironmentSettings, num_envs: int, *, overlap: bool = False) -> str:
    """`environment.backend`, with `auto` decided by what a step costs. The results do not depend on it.

    With `overlap` the workers' time is hidden behind something else, so that only the messages count.
    """
    if settings.backend in ("sync", "process"):
        return settings.backend
    workers = worker_count(settings, num_envs)
    if workers < 2 and not overlap:
        return "sync"
    cost = inspect_environment(settings).step_cost_us
    in_process = num_envs * cost
    if overlap:
        return "process" if _WORTH_IT * in_process > _MESSAGE_US else "sync"
    in_workers = _MESSAGE_US + ceil(num_envs / workers) * cost
    return "process" if in_workers < _WORTH_IT * in_process else "sync"
