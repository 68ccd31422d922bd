"""Hydra's door to Optuna: each trial is a run, and a study that was cut off goes on with the trials it had begun."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep, Transformer
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


class OptunaSweeper(Sweeper):
    """Asks Optuna for settings, has the launcher run them, and tells Optuna what came of it."""

    def __init__(self, *, n_trials: int, n_jobs: int, trial: int | None, **study: Any) -> None:
        self.n_trials, self.n_jobs, self.study_settings = n_trials, n_jobs, study

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._launch = (
            Plugins.instance()
            .instantiate_launcher(hydra_context=hydra_context, task_function=task_function, config=config)
            .launch
        )

    def sweep(self, arguments: list[str]) -> None:
        """Go on until the study has `n_trials` finished trials, or other processes are at the rest."""
        from rl_lab.experiment.studies import StudyRunner

        parsed = OverridesParser.create().parse_overrides(arguments)
        searched = {override.key_or_group: override for override in parsed if override.is_sweep_override()}
        fixed = [override.input_line or "" for override in parsed if not override.is_sweep_override()]
        space = {name: distribution(override) for name, override in searched.items()}
        name = self.study_settings["study_name"] or experiment_name(fixed)
        study = StudyRunner(space=space, arguments=arguments, **{**self.study_settings, "study_name": name})
        while trials := study.next_trials(self.n_trials, self.n_jobs):
            lines = [
                [
                    *fixed,
                    *_lines(searched, trial.params),
                    f"hydra.sweeper.study_name='{name}'",
                    f"hydra.sweeper.trial={trial.number}",
                ]
                for trial in trials
            ]
            study.take(trials, self._launch(lines, initial_job_idx=trials[0].number))
        sys.stdout.write(study.closing_line() + "\n")


def experiment_name(lines: Sequence[str]) -> str:
    """The experiment that all trials have in common, for a study without a name."""
    return next((line.partition("=")[2] for line in lines if line.startswith("+experiment=")), "sweep")


def _lines(searched: Mapping[str, Override], values: Mapping[str, Any]) -> Sequence[str]:
    return [f"{searched[name].get_key_element()}={value}" for name, value in values.items()]


def distribution(override: Override) -> BaseDistribution:
    """The Optuna distribution of a swept setting: `a,b`, `choice(…)`, `range(…)`, `interval(…)`, `tag(log, …)`."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, ChoiceSweep) or (isinstance(value, RangeSweep) and value.shuffle):
        return CategoricalDistribution([str(x) for x in override.sweep_iterator(transformer=Transformer.encode)])
    if isinstance(value, RangeSweep):
        assert value.start is not None
        assert value.stop is not None
        whole = all(isinstance(number, int) for number in (value.start, value.stop, value.step))
        # Like Python's range, Hydra's leaves out its end; Optuna's distributions hold theirs.
        last = [x for x in override.sweep_iterator(transformer=Transformer.identity)][-1]
        kind = IntDistribution if whole else FloatDistribution
        return kind(value.start, last, step=value.step)  # type: ignore[arg-type]
    assert isinstance(value, IntervalSweep)
    assert value.start is not None
    assert value.end is not None
    whole = isinstance(value.start, int) and isinstance(value.end, int)
    kind = IntDistribution if whole else FloatDistribution
    return kind(value.start, value.end, log="log" in value.tags)  # type: ignore[arg-type]
