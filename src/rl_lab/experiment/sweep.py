"""`rl-lab train -m`: several runs through Hydra's sweepers and launchers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.utils import instantiate
from hydra.version import setbase
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from rl_lab.errors import ConfigError, RLLabError
from rl_lab.experiment import registry, resolvers
from rl_lab.experiment.config import CONFIG_MODULE, compose, normalise, one_line, parse_overrides
from rl_lab.experiment.studies import OBJECTIVE, PruneByStudy, TrialResult
from rl_lab.experiment.train import run_training

_ENGINES = {  # group and name: what must be installed, and the extra that brings it
    ("hydra/launcher", "joblib"): ("hydra_plugins.hydra_joblib_launcher", "sweep"),
    ("hydra/launcher", "submitit_local"): ("hydra_plugins.hydra_submitit_launcher", "slurm"),
    ("hydra/launcher", "submitit_slurm"): ("hydra_plugins.hydra_submitit_launcher", "slurm"),
    ("hydra/launcher", "ray"): ("ray", "ray"),
    ("hydra/sweeper", "optuna"): ("optuna", "sweep"),
}


def sweep(overrides: Sequence[str], *, config_dirs: Sequence[Path] = ()) -> int:
    """Train one run for each combination; 0 where all of them came to their end."""
    folders = registry.config_folders(config_dirs)
    parsed = parse_overrides(overrides)
    for override in parsed:
        _require_engine(override.key_or_group, str(override.value()))
    lines = normalise(parsed, folders)
    resolvers.register()
    setbase("1.3")
    GlobalHydra.instance().clear()
    hydra = Hydra.create_main_hydra2("rl_lab", create_config_search_path(f"pkg://{CONFIG_MODULE}"))
    try:
        batches = hydra.multirun("config", _Task(tuple(config_dirs)), list(lines), with_log_configuration=False)
    except RLLabError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__
        while cause is not None:  # what a plugin raised while Hydra made it
            if isinstance(cause, RLLabError):
                raise cause from error
            cause = cause.__cause__
        raise ConfigError(one_line(error)) from error
    finally:
        GlobalHydra.instance().clear()
    sys.stdout.writelines(f"{line}\n" for line in _closing_lines(batches or ()))
    return 0


def _closing_lines(batches: Iterable[Sequence[JobReturn]]) -> list[str]:
    """How each run ended, by the settings that are its own: runs on other machines say nothing here."""
    jobs = [job for batch in batches for job in batch]
    shared = set.intersection(*(set(job.overrides or ()) for job in jobs)) if len(jobs) > 1 else set[str]()
    own = [[word.lstrip("+") for word in job.overrides or () if word not in shared] for job in jobs]
    return [f"{' '.join(words)}: {OBJECTIVE} {job.return_value:g}" for words, job in zip(own, jobs, strict=True)]


def _require_engine(group: str, name: str) -> None:
    module, extra = _ENGINES.get((group, name), (None, None))
    try:
        missing = module is not None and find_spec(module) is None
    except ModuleNotFoundError:  # the package above it
        missing = True
    if missing:
        raise ConfigError(f"{group}={name} is not installed: pip install 'rl-lab[{extra}]'")


class _Task:
    """One run of a sweep. A class, so that launchers can send it to other processes.

    The run carries the sweep's folder (or the study) and its number. Where that one exists already, from a sweep that
    was cut off or a job that was requeued, it is gone on with; a completed one is not trained again.
    """

    def __init__(self, config_dirs: tuple[Path, ...]) -> None:
        self.config_dirs = config_dirs
        self.__name__ = "train"

    def __call__(self, config: DictConfig) -> Any:
        hydra = HydraConfig.get()
        lines = [line for line in hydra.overrides.task if not line.startswith("hydra.")]
        compose(lines, config_dirs=self.config_dirs)  # a wrong combination shows before its run starts
        trial, stop_rule = hydra.sweeper.get("trial"), None
        if trial is None:
            mark: dict[str, Any] = {"folder": str(hydra.sweep.dir), "number": hydra.job.num}
        else:
            sweeper = hydra.sweeper
            mark = {"study": sweeper.study_name, "number": trial}
            if sweeper.pruner is not None:
                stop_rule = PruneByStudy(
                    storage=sweeper.storage,
                    study_name=sweeper.study_name,
                    number=trial,
                    pruner=instantiate(sweeper.pruner),
                )
        outcome = run_training(lines, config_dirs=self.config_dirs, mark=mark, stop_rule=stop_rule)
        if outcome.code:
            raise KeyboardInterrupt  # a signal stopped the run: the sweep ends with it
        summary = outcome.folder / "summary.json"
        value = None if outcome.pruned else json.loads(summary.read_text())[OBJECTIVE]
        return value if trial is None else TrialResult(str(outcome.folder), value)
