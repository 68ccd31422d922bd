"""A controller that learns beside a workflow without updates of its own, and plays the evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.overrides import QUIET

from rl_lab.errors import ConfigError
from rl_lab.experiment.agent import load_run
from rl_lab.experiment.evaluate import evaluate_run
from rl_lab.experiment.train import run_training

PLAN = "training.phases.0.duration_steps=80"
SMALL = [
    "+experiment=distill_mpc_pendulum", "training.total_timesteps=80", "controllers.planner.samples=8",
    "controllers.planner.horizon=3", "controllers.planner.elites=2",
    "controllers.distill_target.units=8", "controllers.distill_target.batch_size=16",
    "evaluation.final_episodes=2", "evaluation.episodes=1", "training.phases.1.duration_updates=30", *QUIET,
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_training([*SMALL, f"run_root={tmp_path_factory.mktemp('runs')}"]).folder


def test_the_policy_plays_the_evaluations(run: Path) -> None:
    """The score of the run is the distilled policy's; the planner's is asked for by name."""
    score = json.loads((run / "summary.json").read_text())["eval/return_mean"]
    assert evaluate_run(run).result.return_mean == score
    planner = evaluate_run(run, controller="agent").result.return_mean
    assert planner != score
    with pytest.raises(ConfigError, match=r"--controller planner: no controller with that role can act"):
        evaluate_run(run, controller="planner")


def test_the_policy_learned_and_the_planner_has_nothing_to(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("controller/loss" in row for row in rows)
    target = load_run(run).workflow.context.controllers.get("distill_target")
    assert float(target.normalizer.statistics[0].count) == 30 * 16  # running statistics of its own batches
    assert not bool(target.fitted)


def test_a_controller_without_its_optimizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizers.distill_target is missing"):
        run_training([*SMALL, "~optimizers.distill_target", f"run_root={tmp_path}"])


def test_an_expert_acts_in_a_phase(tmp_path: Path) -> None:
    """A scripted controller collects; its records are the replay's."""
    phases = (
        "training.phases=[{type: warmup, duration_steps: 400, controller: expert, data_source: replay,"
        " workflow_hooks: [collect]}]"
    )
    expert = "+controllers.expert={_target_: rl_lab.experts.classic_control.PendulumExpert}"
    folder = run_training([*SMALL, phases, expert, "training.total_timesteps=400", f"run_root={tmp_path}"]).folder
    from rl_lab.datasets.files import open_dataset

    for episode in open_dataset(folder).episodes():
        vector = torch.from_numpy(episode.observation["vector"][:-1]).double()
        cosine, sine, velocity = vector.unbind(1)
        near = torch.atan2(sine, cosine).abs() < 0.5
        torque = -(20 * torch.atan2(sine, cosine) + 2 * velocity)
        torch.testing.assert_close(
            torch.from_numpy(episode.action[:, 0])[near], (torque[near].clamp(-2, 2) / 2).float(), atol=1e-5, rtol=0
        )


def test_a_prior_learns_beside_a_model_and_the_planner_steers_it(tmp_path: Path) -> None:
    """By YAML alone: the hook `distill` teaches the role `prior`, the planner names it, and both are saved once."""
    small = [
        "+experiment=diffusion_planner_pendulum", "data_sources.demos.expert.episodes=1", "controllers.prior.horizon=4",
        "workflow.sequence_length=5", "training.phases.0.duration_updates=4", "controllers.planner.samples=4",
        "evaluation.final_episodes=1", "evaluation.episodes=1", *QUIET,
    ]  # fmt: skip
    folder = run_training([*small, f"run_root={tmp_path}"]).folder
    loaded = load_run(folder)
    prior = loaded.workflow.context.controllers.get("prior")
    assert bool(prior.fitted)
    assert int(prior.average.updates) == 2  # of four updates, every other one is the model's
    assert float(prior.normalizer.statistics[0].count) == 201
    assert not loaded.workflow.context.controllers.get("planner").state_dict()
    by_its_weight = evaluate_run(folder, episodes=1).result.return_mean
    settings = ["prior=@controllers.prior", "horizon=4", "samples=4", "beta=0"]
    assert evaluate_run(folder, episodes=1, planner="diffusion", planner_settings=settings).result.return_mean != 0.0
    assert evaluate_run(folder, episodes=1, controller="prior").result.return_mean != by_its_weight
