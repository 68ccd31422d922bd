"""Optuna studies whose trials are runs: begun once, gone on with where they were cut off, pruned by evaluations.

The study's storage knows the trials, the run directories know how far each has come. A trial carries the process that
is at it; where that process is gone, the next one takes the trial over and its run goes on from its last checkpoint.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rl_lab.errors import ConfigError
from rl_lab.orchestration.run_lock import RunLockedError

if TYPE_CHECKING:
    import optuna
    from hydra.core.utils import JobReturn
    from optuna.distributions import BaseDistribution

OBJECTIVE = "eval/return_mean"  # what an optimising sweeper is told of each run
OWNER, ARGUMENTS, RUN, ERROR = "owner", "arguments", "run", "error"  # user attributes of trials and studies


@dataclass(frozen=True)
class TrialResult:
    """The run of a trial and its score."""

    run: str
    value: float | None  # None: pruned


def load_optuna() -> Any:
    """The module `optuna`, without its log lines."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ConfigError("hydra/sweeper=optuna: Optuna is not installed: pip install 'rl-lab[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def open_storage(url: str, *, place: str, create: bool = True) -> optuna.storages.RDBStorage:
    """The storage of studies at an address. `place`: the setting that it came from."""
    optuna = load_optuna()
    from sqlalchemy.exc import SQLAlchemyError

    file = Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
    if file is not None and not create and not file.is_file():
        raise ConfigError(
            f"{place}={url}: there is no such file. A study is made by: rl-lab train -m hydra/sweeper=optuna"
        )
    try:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        waiting = {"connect_args": {"timeout": 60}} if file is not None else {}  # seconds for another writer
        return optuna.storages.RDBStorage(url, engine_kwargs=waiting)
    except (SQLAlchemyError, ImportError, OSError, ValueError, optuna.exceptions.OptunaError) as error:
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{place}: the storage of the study cannot be opened: {cause[0][:300]}. Expected an address such as "
            "sqlite:///studies.db or postgresql://user@host/database."
        ) from error


class StudyRunner:
    """The trials that one process has run for a study."""

    def __init__(
        self,
        *,
        space: Mapping[str, BaseDistribution],
        arguments: Sequence[str],
        study_name: str,
        storage: str,
        direction: str,
        seed: int,
        sampler: Callable[..., Any],
        pruner: Any,
        take_over: bool,
    ) -> None:
        self._optuna = load_optuna()
        if not space:
            raise ConfigError(
                "hydra/sweeper=optuna has nothing to search: give a setting as 'key=int(interval(1,5))', "
                "'key=tag(log,interval(1e-5,1e-3))' or key=a,b."
            )
        if direction not in ("maximize", "minimize"):
            raise ConfigError(f"hydra.sweeper.direction={direction}: expected maximize or minimize.")
        self._space, self._take_over, self._name = dict(space), take_over, study_name
        self._storage = storage
        self._study = self._optuna.create_study(
            study_name=study_name,
            storage=open_storage(storage, place="hydra.sweeper.storage"),
            direction=direction,
            pruner=pruner,
            load_if_exists=True,
        )
        self._sampler, self._seed = sampler, seed
        self._require_same(sorted(arguments))

    def _require_same(self, arguments: list[str]) -> None:
        """A study holds trials of one experiment and one space."""
        before = self._study.user_attrs.get(ARGUMENTS)
        if before is None:
            self._study.set_user_attr(ARGUMENTS, arguments)
        elif before != arguments:
            changed = sorted(set(before) ^ set(arguments))
            raise ConfigError(
                f"The study '{self._name}' was made with other settings ({', '.join(changed)}). Give this one a name "
                "of its own with hydra.sweeper.study_name."
            )

    def next_trials(self, wanted: int, at_once: int) -> list[optuna.trial.FrozenTrial]:
        """The trials to run next, unfinished ones of processes that are gone first; none where the study is done."""
        state = self._optuna.trial.TrialState
        finished, running, orphans = 0, 0, []
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state in (state.COMPLETE, state.PRUNED) or ERROR in trial.user_attrs:
                finished += 1
            elif trial.state == state.RUNNING and set(trial.params) != set(self._space):
                self._study.tell(trial.number, state=state.FAIL)  # its process was killed before it had any settings
            elif trial.state == state.RUNNING and self._is_orphan(trial.user_attrs.get(OWNER)):
                orphans.append(trial)
            else:
                running += trial.state == state.RUNNING
        trials = orphans[: min(at_once, wanted - finished - running)]
        for trial in trials:
            self._own(trial._trial_id)
        while len(trials) < min(at_once, wanted - finished - running):
            # Seeded by the trial: a sweep that was cut off proposes what an uninterrupted one would have.
            self._study.sampler = self._sampler(seed=self._seed + len(self._study.get_trials(deepcopy=False)))
            asked = self._study.ask(fixed_distributions=self._space)
            self._own(asked._trial_id)
            trials.append(self._study._storage.get_trial(asked._trial_id))
        return trials

    def _own(self, trial_id: int) -> None:
        this = psutil.Process()
        owner = {"host": socket.gethostname(), "pid": this.pid, "started": this.create_time()}
        self._study._storage.set_trial_user_attr(trial_id, OWNER, owner)

    def _is_orphan(self, owner: Mapping[str, Any] | None) -> bool:
        """Whether nobody is at a trial any more. A process on another host cannot be looked at."""
        if owner is None:
            return True
        if owner["host"] != socket.gethostname():
            return self._take_over
        try:
            return psutil.Process(owner["pid"]).create_time() != owner["started"]
        except psutil.NoSuchProcess:
            return True

    def take(self, trials: Sequence[optuna.trial.FrozenTrial], returns: Sequence[JobReturn]) -> None:
        """Tell the study what came of its trials. A wrong setting ends the sweep; a run that failed is told as one."""
        state, failed = self._optuna.trial.TrialState, list[Exception]()
        for trial, done in zip(trials, returns, strict=True):
            result = done._return_value  # the public one writes a line of its own to stderr
            if isinstance(result, RunLockedError):  # a worker of a sweep that was killed is still at it
                raise result
            if isinstance(result, Exception):
                self._study._storage.set_trial_user_attr(trial._trial_id, ERROR, str(result)[:500])
                self._study.tell(trial.number, state=state.FAIL)
                failed.append(result)
                continue
            assert isinstance(result, TrialResult)
            self._study._storage.set_trial_user_attr(trial._trial_id, RUN, result.run)
            if result.value is None:
                self._study.tell(trial.number, state=state.PRUNED)
            else:
                self._study.tell(trial.number, result.value)
        wrong = [error for error in failed if isinstance(error, ConfigError)]
        if wrong or (failed and len(failed) == len(self._study.get_trials(deepcopy=False))):
            raise (wrong or failed)[0]

    def closing_line(self) -> str:
        """The best trial so far, and where to see the rest."""
        see = f"See: rl-lab sweep {self._name} --storage {self._storage}"
        trials = self._study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.COMPLETE,))
        if not trials:
            return f"The study '{self._name}' has no completed trial yet. {see}"
        best = self._study.best_trial
        settings = " ".join(f"{key}={value}" for key, value in best.params.items())
        return f"Best {OBJECTIVE} of {len(trials)} completed trials {best.value:g}: {settings}. {see}"


class PruneByStudy:
    """Reports each evaluation of a run to its trial, and asks the study's pruner whether to go on."""

    def __init__(self, *, storage: str, study_name: str, number: int, pruner: Any) -> None:
        optuna = load_optuna()
        study = optuna.load_study(
            study_name=study_name, storage=open_storage(storage, place="hydra.sweeper.storage"), pruner=pruner
        )
        frozen = study.get_trials(deepcopy=False)[number]
        self._trial, self._name = optuna.trial.Trial(study, frozen._trial_id), study_name
        self._reported = set(frozen.intermediate_values)  # by the process that the trial was taken over from

    def __call__(self, metrics: Mapping[str, float], env_steps: int) -> str | None:
        """Why the run should stop here; None: it goes on."""
        if env_steps not in self._reported:
            self._trial.report(metrics[OBJECTIVE], env_steps)
        if not self._trial.should_prune():
            return None
        return (
            f"pruned at step {env_steps} by the study '{self._name}': its evaluations are behind those of other trials"
        )


@dataclass(frozen=True)
class StudySummary:
    """A study as `rl-lab sweep` shows it: its trials, the importance of each setting, and the best trial."""

    name: str
    direction: str
    trials: list[dict[str, Any]]
    importance: dict[str, float]  # share of each setting in the variance of the result; empty for fewer than 4 trials
    best: dict[str, Any] | None


def study_names(url: str) -> list[str]:
    """The studies in a storage."""
    storage = open_storage(url, place="--storage", create=False)
    return sorted(load_optuna().study.get_all_study_names(storage))


def summarise(url: str, name: str) -> StudySummary:
    """A study's trials, the importance of its settings (PED-ANOVA) and the best trial."""
    optuna = load_optuna()
    study = optuna.load_study(study_name=name, storage=open_storage(url, place="--storage", create=False))
    trials = [_row(trial) for trial in study.get_trials(deepcopy=False)]
    complete = [row for row in trials if row["state"] == "complete"]
    importance: dict[str, float] = {}
    if len(complete) >= 4 and len({row["value"] for row in complete}) > 1:
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        importance = dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    best = _row(study.best_trial) if complete else None
    return StudySummary(name, study.direction.name.lower(), trials, importance, best)


def _row(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "value": trial.value,
        "evaluations": len(trial.intermediate_values),
        "settings": trial.params,
        "run": trial.user_attrs.get(RUN),
        "error": trial.user_attrs.get(ERROR),
    }
