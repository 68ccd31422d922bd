"""Evaluation of a finished or running run, from its directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_lab.components.acting import ActingController, Acts
from rl_lab.errors import ConfigError, nearest
from rl_lab.experiment.agent import LoadedRun, load_run
from rl_lab.experiment.build import make_eval_envs
from rl_lab.experiment.device import set_threads
from rl_lab.experiment.results import chosen_actions
from rl_lab.metrics.video import write_video
from rl_lab.orchestration.evaluation import EvaluationResult, evaluate

AGENT = "agent"  # in a controller's place: the agent itself
AS_IN_TRAINING = "as in training"


@dataclass(frozen=True)
class RunEvaluation:
    """Held-out episodes of one run's agent, and how they were played."""

    run: Path
    checkpoint: str
    environment: str
    seed: int
    actions: str  # how they were chosen
    result: EvaluationResult
    video: Path | None
    planner: str | None = None  # another one than the run's own, with its settings

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "checkpoint": self.checkpoint,
            "environment": self.environment,
            "seed": self.seed,
            "mode": self.actions,
            **({"planner": self.planner} if self.planner else {}),
            **self.result.metrics(),
            "returns": list(self.result.returns),
            "lengths": list(self.result.lengths),
            "video": str(self.video) if self.video else None,
        }

    def text(self) -> str:
        result = self.result
        lines = [
            f"{self.run} ({self.checkpoint}) in {self.environment}, seed {self.seed}, {self.actions}"
            + (f", planner {self.planner}" if self.planner else ""),
            f"return {result.return_mean:.2f} ± {result.return_std:.2f} over {len(result.returns)} episodes "
            f"(from {min(result.returns):.2f} to {max(result.returns):.2f})",
        ]
        return "\n".join(lines + ([f"video: {self.video}"] if self.video else []))


def evaluate_run(
    run: str | Path,
    *,
    run_root: str | Path = "experiments",
    episodes: int | None = None,
    seed: int | None = None,
    video: bool = False,
    planner: str | None = None,
    planner_settings: Sequence[str] = (),
    controller: str | None = None,
    as_in_training: bool = False,
    trust: bool = False,
) -> RunEvaluation:
    """Play held-out episodes. Without a seed and a number they are those of the run's own final evaluation.

    With `planner`, another planner plans in the model of the run. With `controller`, the controller with that role
    plays, in place of the one that evaluation.controller names; `agent` is the agent itself. `as_in_training`: actions
    are chosen as while it collects, with whatever it explores by.
    """
    loaded = load_run(run, run_root=run_root, planner=planner, planner_settings=planner_settings, trust=trust)
    settings = loaded.settings
    set_threads(settings.training.threads, loaded.workflow.context.device)
    seed = settings.experiment.seed if seed is None else seed
    episodes = episodes or settings.evaluation.final_episodes or settings.evaluation.episodes
    envs = make_eval_envs(settings, "final", render=video, seed=seed, episodes=episodes)
    try:
        result = evaluate(
            _player(loaded, controller), envs, episodes, seed=seed, stream="final",
            mode="train" if as_in_training else "eval", record=video,
        )  # fmt: skip
    finally:
        envs.close()
    assert result is not None
    path = None
    if result.frames is not None:
        path = write_video(loaded.run.path / "videos" / f"eval-s{seed}.mp4", result.frames)
    return RunEvaluation(
        loaded.run.path, loaded.checkpoint.path.name, settings.environment.id, seed,
        AS_IN_TRAINING if as_in_training else chosen_actions(loaded.config), result, path,
        " ".join([planner, *planner_settings]) if planner else None,
    )  # fmt: skip


def _player(loaded: LoadedRun, controller: str | None) -> Acts:
    """Who plays the episodes."""
    role = loaded.settings.evaluation.controller if controller is None else controller
    if role is None or role == AGENT:
        return loaded.workflow
    controllers = loaded.workflow.context.controllers
    acting = controllers.acting(role)
    if acting is None:
        known = [name for name, part in controllers.items() if isinstance(part, ActingController)]
        raise ConfigError(f"--controller {role}: no controller with that role can act.{nearest(role, [AGENT, *known])}")
    return acting
