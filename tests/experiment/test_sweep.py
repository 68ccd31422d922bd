"""Sweeps: every trial of a study is one run, gone on with where it was cut off; engines run the same commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from tests.overrides import QUIET

from rl_lab.experiment import studies, sweep, train

optuna = pytest.importorskip("optuna")
Command = Callable[..., tuple[int, str, str]]
SWEEP = [
    *("train", "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "+experiment=random", *QUIET),
    *("environment.id=CartPole-v1", "training.total_timesteps=40", "evaluation.every=20", "evaluation.episodes=1"),
    "workflow.batch_size=int(interval(2,9))",
]
STORAGE = "sqlite:///experiments/optuna.db"


def finished(folder: Path) -> list[int]:
    """Numbers of the trials whose runs are completed, by run."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("experiments/random/*/run.json"))]
    return sorted(run["sweep"]["number"] for run in runs if run["status"] == "completed")


def test_a_study_that_was_cut_off_goes_on_with_its_trial(
    rl_lab: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second trial: its run is gone on with, no trial is repeated, and the proposals are the same."""

    def killed(self: studies.PruneByStudy, metrics: object, env_steps: int) -> str | None:
        if self._trial.number == 1 and env_steps == 20:
            raise KeyboardInterrupt
        return None

    pruner = "hydra.sweeper.pruner={_target_: optuna.pruners.NopPruner}"
    with monkeypatch.context() as patch:
        patch.setattr(studies.PruneByStudy, "__call__", killed)
        patch.setattr(studies.psutil.Process, "create_time", lambda self: 0.0)  # as of a process that is gone
        assert rl_lab(*SWEEP, pruner)[0] == 130
    assert finished(tmp_path) == [0]
    trained: list[bool] = []
    monkeypatch.setattr(train, "_go", lambda *call, old=train._go: (trained.append(call[2] is not None), old(*call))[1])
    code, output, errors = rl_lab(*SWEEP, pruner)
    assert code == 0, errors
    assert "of 3 completed trials" in output
    assert trained == [True, False]  # the second one is resumed, the third is new
    assert finished(tmp_path) == [0, 1, 2]
    proposed = studies.summarise(STORAGE, "random").trials
    for number, trial in enumerate(proposed):  # those of an uninterrupted sweep: the sampler is seeded by the trial
        alone = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=number))
        name, space = "workflow.batch_size", optuna.distributions.IntDistribution(2, 9)
        assert alone.ask(fixed_distributions={name: space}).params == trial["settings"]

    code, output, _ = rl_lab("sweep", "random")
    assert code == 0
    assert "3 complete" in output
    assert "Best: trial" in output
    assert json.loads(rl_lab("sweep", "random", "--json")[1])["trials"][2]["state"] == "complete"


def test_a_plain_sweep_ends_with_a_line_for_each_run(rl_lab: Command) -> None:
    """By the setting that is its own, wherever it ran."""
    words = [*QUIET, "environment.id=CartPole-v1", "training.total_timesteps=20", "evaluation.episodes=1"]
    code, output, errors = rl_lab("train", "-m", "+experiment=random", *words, "experiment.seed=0,1")
    assert code == 0, errors
    last = output.splitlines()[-2:]
    assert [line.split()[:2] for line in last] == [[f"experiment.seed={n}:", "eval/return_mean"] for n in (0, 1)]


def test_a_pruned_run_ends_early_and_is_not_gone_on_with(
    rl_lab: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pruner is asked after each evaluation; what it ends is told as pruned."""
    monkeypatch.setattr(
        studies.PruneByStudy, "__call__", lambda self, metrics, env_steps: "pruned" if env_steps == 20 else None
    )
    code, _, errors = rl_lab(
        *SWEEP, "hydra.sweeper.n_trials=1", "hydra.sweeper.pruner={_target_: optuna.pruners.NopPruner}"
    )
    assert code == 0, errors
    assert [trial["state"] for trial in studies.summarise(STORAGE, "random").trials] == ["pruned"]
    run = json.loads(next(tmp_path.glob("experiments/random/*/run.json")).read_text())
    assert (run["status"], run["pruned"]) == ("interrupted", True)


def test_a_trial_is_reported_and_pruned_by_its_study(tmp_path: Path) -> None:
    """The median of earlier trials at the same step decides."""
    storage = f"sqlite:///{tmp_path}/s.db"
    study = optuna.create_study(study_name="s", storage=storage, direction="maximize")
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1)
    for number, value in enumerate((10.0, 20.0, 1.0)):
        study.ask()
        rule = studies.PruneByStudy(storage=storage, study_name="s", number=number, pruner=pruner)
        reason = rule({studies.OBJECTIVE: value}, 100)
        assert (reason is not None) == (number == 2)
        if reason is None:
            study.tell(number, value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=tag(log,interval(1e-4,1e-1))", optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True)),
        ("a=int(interval(1,5))", optuna.distributions.IntDistribution(1, 5)),
        ("a=range(2,9,2)", optuna.distributions.IntDistribution(2, 8, step=2)),
        ("a=relu,silu", optuna.distributions.CategoricalDistribution(["relu", "silu"])),
    ],
)
def test_overrides_become_distributions(text: str, expected: object) -> None:
    """Hydra's words for sweeps, and what Optuna draws from."""
    from hydra_plugins.rl_lab_engines.optuna_sweeper import distribution

    assert distribution(OverridesParser.create().parse_override(text)) == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*SWEEP[:-1]], "nothing to search"),
        ([*SWEEP, "hydra.sweeper.direction=up"], "direction=up"),
        ([*SWEEP, "hydra.sweeper.storage=nosuch://x"], "hydra.sweeper.storage"),
        ([*SWEEP, "workflw.x=1"], "workflw"),
        (["sweep", "random"], "there is no such file"),
    ],
)
def test_a_wrong_study_is_one_clear_line(rl_lab: Command, arguments: list[str], named: str) -> None:
    """It names the setting."""
    code, _, errors = rl_lab(*arguments)
    assert code == 2
    assert named in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_study_keeps_its_settings_and_its_name(rl_lab: Command) -> None:
    """Trials of other settings do not belong to it; a name that is not there is told with the nearest one."""
    assert rl_lab(*SWEEP, "hydra.sweeper.n_trials=1")[0] == 0
    code, _, errors = rl_lab(*SWEEP, "experiment.seed=7")
    assert code == 2
    assert "experiment.seed=7" in errors
    assert "study_name" in errors
    code, _, errors = rl_lab("sweep", "randm")
    assert code == 2
    assert "Did you mean 'random'?" in errors


def test_an_engine_that_is_not_installed_is_named_with_its_extra(
    rl_lab: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is composed."""
    monkeypatch.setattr(sweep, "find_spec", lambda name: None)
    for word, extra in {"hydra/launcher=ray": "ray", "hydra/launcher=submitit_slurm": "slurm"}.items():
        code, _, errors = rl_lab("train", "-m", "+experiment=random", word)
        assert code == 2
        assert f"pip install 'rl-lab[{extra}]'" in errors


def test_seeds_are_reproduced_through_submitit(tmp_path: Path) -> None:
    """The debug executor runs the very jobs in the process that asks, whose signals and output it takes over: in one of
    its own. The results are those of the plain command."""
    pytest.importorskip("submitit")
    words = ["reproduce", "random", "--seeds", "0", "--episodes", "1", "environment.id=CartPole-v1", *QUIET]
    short = ["training.total_timesteps=40", "evaluation.episodes=1", "--launcher", "submitit", "--option"]

    def command(option: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "rl_lab", *words, *short, option]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = command("cluster=debug")
    assert done.returncode == 0, done.stderr
    assert "seed 0 done" in done.stdout
    assert len(json.loads((tmp_path / "results" / "random.json").read_text())["rows"]) == 1
    refused = command("queue=long")
    assert refused.returncode == 2
    assert "queue" in refused.stderr
