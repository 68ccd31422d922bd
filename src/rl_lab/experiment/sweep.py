"""`rl-lab train -m`: several runs through Hydra's sweepers and launchers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.version import setbase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_lab.errors import ConfigError, RLLabError
from rl_lab.experiment import registry, resolvers
from rl_lab.experiment.config import CONFIG_MODULE, compose, normalise, one_line, parse_overrides
from rl_lab.experiment.train import run_training

OBJECTIVE = "eval/return_mean"  # what an optimising sweeper is told of each run


def sweep(overrides: Sequence[str], *, config_dirs: Sequence[Path] = ()) -> int:
    """Train one run for each combination; 0 where all of them came to their end."""
    folders = registry.config_folders(config_dirs)
    lines = normalise(parse_overrides(overrides), folders)
    resolvers.register()
    setbase("1.3")
    GlobalHydra.instance().clear()
    hydra = Hydra.create_main_hydra2("rl_lab", create_config_search_path(f"pkg://{CONFIG_MODULE}"))
    task = _Task(tuple(config_dirs))
    try:
        hydra.multirun("config", task, list(lines), with_log_configuration=False)
        best = best_of(task.folder)
        if best is not None:
            sys.stdout.write(best + "\n")
    except RLLabError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error)) from error
    finally:
        GlobalHydra.instance().clear()
    return 0


def best_of(folder: Path | None) -> str | None:
    """One line with the best result of an optimising sweeper (Optuna); None where the sweep had none."""
    path = folder / "optimization_results.yaml" if folder is not None else None
    if path is None or not path.is_file():
        return None
    found = OmegaConf.load(path)
    assert isinstance(found, DictConfig)
    if "best_params" in found:
        settings = " ".join(f"{key}={value}" for key, value in found.best_params.items())
        return f"Best {OBJECTIVE} {found.best_value:g}: {settings}. All of it: {path}"
    return f"The best runs by several objectives: {path}"


class _Task:
    """One run of a sweep. A class, so that launchers can send it to other processes."""

    def __init__(self, config_dirs: tuple[Path, ...]) -> None:
        self.config_dirs = config_dirs
        self.folder: Path | None = None  # of the sweep, once a run of it has begun
        self.__name__ = "train"

    def __call__(self, config: DictConfig) -> Any:
        self.folder = Path(str(HydraConfig.get().sweep.dir))
        lines = [line for line in HydraConfig.get().overrides.task if not line.startswith("hydra.")]
        compose(lines, config_dirs=self.config_dirs)  # a wrong combination shows before its run starts
        outcome = run_training(lines, config_dirs=self.config_dirs)
        if outcome.code:
            raise KeyboardInterrupt  # a signal stopped the run: the sweep ends with it
        summary = outcome.folder / "summary.json"
        return json.loads(summary.read_text())[OBJECTIVE] if summary.is_file() else None
