"""`rl-lab imagine`: the imagination of a run that was trained before."""

from __future__ import annotations

from pathlib import Path

from rl_lab.errors import ConfigError
from rl_lab.experiment.agent import load_run
from rl_lab.experiment.imagination import can_imagine, write_run_imagination
from rl_lab.metrics.report import write_report


def imagine_run(
    run: str | Path, *, run_root: str | Path = "experiments", context: int, horizon: int, seed: int | None = None
) -> list[Path]:
    """Draw into the run's folder imagination/ and write its report anew; the files."""
    loaded = load_run(run, run_root=run_root)
    if not can_imagine(loaded.workflow):
        raise ConfigError(f"{loaded.run.path}: the workflow '{loaded.workflow.name}' has no model to imagine with.")
    folder = loaded.run.path
    paths = write_run_imagination(loaded.workflow, loaded.settings, folder, context=context, horizon=horizon, seed=seed)
    return [*paths, write_report(folder)]
