"""Diffusion Policy as a run: learning, pictures, exact resume in the middle of a chunk, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.overrides import QUIET
from tests.runs import assert_goes_on_exactly

from rl_lab.errors import RLLabError
from rl_lab.experiment.agent import load
from rl_lab.experiment.train import run_training
from rl_lab.workflows.diffusion_policy import DiffusionPolicyWorkflow

SMALL = [
    "+experiment=diffusion_policy_detour", "data_sources.demos.expert.episodes=20", "evaluation.num_envs=5",
    "evaluation.episodes=5", "evaluation.final_episodes=5", "controllers.policy.levels=5", "workflow.batch_size=32",
    *QUIET,
]  # fmt: skip


def test_a_run_learns_chunks_and_draws_how_they_come_about(tmp_path: Path) -> None:
    """The loss falls; the policy has the limits of its dataset; the report shows noise becoming actions."""
    overrides = [option for option in SMALL if option != "evaluation.imagination=false"]
    run = run_training([*overrides, "workflow.decay_updates=150", "logging.every=50", f"run_root={tmp_path}"])
    assert run.code == 0
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < 0.6 * losses[0]
    policy = load(run.folder).workflow.policy
    with np.load(run.folder / "data" / "demos" / "demonstrations.npz") as file:
        low = file["action"][~file["is_last"]].min(0)
    np.testing.assert_allclose(policy.action_limits.low.numpy(), low, rtol=1e-6)
    names = {path.name for path in (run.folder / "imagination").iterdir()}
    assert {"denoising.png", "denoising.mp4", "chunks.png", "illustrations.json"} <= names
    assert "A chunk of actions comes out of noise" in (run.folder / "report.html").read_text()


def test_a_run_that_died_goes_on_exactly(tmp_path: Path) -> None:
    """Weights, their average, the learning rate and the draws of windows, noise and levels go on where they were."""
    base = [
        *SMALL,
        "workflow.decay_updates=40",
        "logging.every=10",
        "checkpoint.every=15",
        "evaluation.imagination=false",
    ]
    assert_goes_on_exactly(base, DiffusionPolicyWorkflow, "update", killed_at=32, root=tmp_path)


def test_an_agent_goes_on_within_a_chunk(tmp_path: Path) -> None:
    """Its memory is all that an episode needs: carried to another copy, the actions are the same."""
    folder = run_training(
        [*SMALL, "workflow.decay_updates=5", "evaluation.imagination=false", f"run_root={tmp_path}"]
    ).folder
    first, second = load(folder), load(folder)
    observation = np.array([[-0.6, 0.0], [-0.6, 0.01]], np.float32)
    torch.manual_seed(0)
    _, state = first.act(observation, first.initial_state(num_envs=2))
    copied = copy.deepcopy(state)
    for _ in range(3):  # the rest of the chunk: nothing is drawn
        one, state = first.act(observation, state)
        other, copied = second.act(observation, copied)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["controllers.policy.action_horizon=9"], "at most prediction_horizon - observation_horizon"),
        (["controllers.policy.network=unett"], "network='unett' does not exist"),
        (["controllers.policy.prediction_horizon=7", "controllers.policy.network=unet"], "needs a multiple of 4"),
        (["data_sources.demos.path=missing.npz", "data_sources.demos.expert=null"], "missing.npz"),
        (
            ["controllers.policy.prediction_horizon=32", "data_sources.demos.pad_after=0"],
            "A batch needs windows of 32 records",
        ),
    ],
)
def test_what_cannot_be_learned_is_refused_before_the_first_update(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(RLLabError, match=message):
        run_training([*SMALL, *overrides, f"run_root={tmp_path}"])
