"""Going on with a run: its own configuration, and the few overrides that are safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_lab.errors import ConfigError, RunNotFoundError
from rl_lab.experiment.budgets import BUDGET_KEY
from rl_lab.experiment.config import parse_overrides
from rl_lab.experiment.prepare import Prepared, complete
from rl_lab.experiment.trust import open_config
from rl_lab.orchestration.run_directory import RunDirectory, find_run, list_runs

RESUME_KEY = "training.resume_path"
SAFE_KEYS = (
    BUDGET_KEY,
    "training.threads",
    "training.compile",
    "training.kernels",
    "training.devices",
    "training.nodes",
    "experiment.device",
    "evaluation.episodes",
    "evaluation.final_episodes",
    "evaluation.video",
    "evaluation.imagination",
    "environment.backend",
    "environment.workers",
    "environment.ray_address",
    "environment.worker_timeout",
    "environment.startup_timeout",
)
SAFE_SECTIONS = ("logging.", "checkpoint.")


@dataclass(frozen=True)
class Resumption:
    """A run to go on with, from its latest checkpoint or from one that was named."""

    run: RunDirectory
    prepared: Prepared
    checkpoint: Path | None
    accepted: dict[str, Any] = field(default_factory=dict)
    is_trusted: bool = True  # made here, or by the user's word: it may name any code

    def text(self) -> str:
        """The message to the user."""
        start = self.checkpoint.name if self.checkpoint is not None else "its latest checkpoint"
        changes = ", ".join(f"{key}={value}" for key, value in self.accepted.items())
        overrides = f" and these overrides: {changes}." if changes else "."
        return (
            f"Going on with {self.run.path} from {start}, with its own configuration{overrides}{self._nothing_left()}"
        )

    def _nothing_left(self) -> str:
        if self.checkpoint is not None or BUDGET_KEY in self.accepted or self.run.info().get("status") != "completed":
            return ""
        return (
            f" It is complete: its last evaluation and its report are made again. To train on: {BUDGET_KEY}=N, above"
            f" {self.prepared.settings.training.total_timesteps:,}."
        )


def prepare_resume(overrides: Sequence[str], *, trust: bool = False) -> Resumption:
    """Find the run that `training.resume_path` names and check the other overrides. `trust`: see `open_config`."""
    given = {override.key_or_group: override.value() for override in parse_overrides(overrides)}
    run_root = str(given.pop("run_root", "experiments"))
    run, checkpoint = find_checkpoint(str(given.pop(RESUME_KEY)), run_root)
    for key in given:
        if key not in SAFE_KEYS and not key.startswith(SAFE_SECTIONS):
            safe = ", ".join([*SAFE_KEYS, *(f"{section}*" for section in SAFE_SECTIONS)])
            raise ConfigError(
                f"{key} cannot be changed when a run goes on: it takes its own configuration ({run.config_yaml}). "
                f"These can: {safe}. Start a new run for anything else."
            )
    config, is_trusted = open_config(run, trust=trust, sends_metrics=True)
    _extend_phases(config, given)
    for key, value in given.items():
        OmegaConf.update(config, key, value)
    if "evaluation.episodes" in given and "evaluation.final_episodes" not in given:
        config.evaluation.final_episodes = None  # as many as were typed
    config.training.resume_path = None
    return Resumption(run, complete(config), checkpoint, given, is_trusted)


def runs_with(run_root: str | Path, **info: Any) -> list[RunDirectory]:
    """The runs whose run.json holds these values, the newest last: `overrides`, or the `sweep` that they belong to."""
    return [run for run in list_runs(run_root) if all(run.info().get(key, ...) == value for key, value in info.items())]


def is_over(run: RunDirectory) -> bool:
    """Whether a run came to its end, or was pruned: there is nothing to go on with."""
    info = run.info()
    return (info.get("status") == "completed" and run.summary_json.is_file()) or info.get("pruned") is not None


def find_checkpoint(reference: str, run_root: str | Path) -> tuple[RunDirectory, Path | None]:
    """A run, or a checkpoint inside one."""
    path = Path(reference).expanduser()
    if path.parent.name == "checkpoints" and path.parent.parent.is_dir():
        if not path.is_dir():
            raise RunNotFoundError(f"There is no checkpoint {path}. See what {path.parent} holds.")
        return RunDirectory(path.parent.parent), path.resolve()
    return find_run(reference, run_root), None


def _extend_phases(config: DictConfig, given: dict[str, Any]) -> None:
    """A phase that lasted for the whole old budget lasts for the whole new one."""
    phases = config.training.get("phases")
    if BUDGET_KEY in given and phases:
        for phase in phases:
            if phase.get("duration_steps") == config.training.total_timesteps:
                phase.duration_steps = given[BUDGET_KEY]
