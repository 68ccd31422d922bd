"""Reward and continue predictors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tests.overrides import QUIET, TINY_DREAMER

from rl_lab.components.predictors import ContinuePredictor, RewardEnsemble, RewardPredictor
from rl_lab.experiment.train import run_training


def test_fresh_reward_is_zero_with_loss_ln_255() -> None:
    """Zero output weights: the first prediction is exactly 0 and the first loss exactly that of a uniform guess."""
    reward = RewardPredictor(feature_size=10, units=16)
    logits = reward(torch.randn(4, 6, 10))
    assert torch.equal(reward.mean(logits), torch.zeros(4, 6))
    torch.testing.assert_close(reward.loss(logits, torch.randn(4, 6)), torch.full((4, 6), math.log(255.0)))


def test_reward_gradient_reaches_the_features() -> None:
    """Once the output layer has moved off zero, the representation learns from rewards."""
    reward = RewardPredictor(feature_size=10, units=16, outscale=1.0, bins=15, limit=5.0)
    features = torch.randn(3, 10, requires_grad=True)
    reward.loss(reward(features), torch.ones(3)).sum().backward()
    assert features.grad.abs().sum() > 0


def test_continue_label_is_soft() -> None:
    """The loss is least where the prediction is (1 - terminal)·discount: the discount is inside."""
    predictor = ContinuePredictor(feature_size=10, units=16, discount=0.9)
    terminal = torch.tensor([False, True])
    best = torch.tensor([0.9, 1e-6]).logit()
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert predictor.loss(best, terminal).tolist() == pytest.approx([entropy, 0.0], abs=1e-5)
    assert predictor.mean(best)[0].item() == pytest.approx(0.9)
    assert (predictor.loss(best + 0.5, terminal) > predictor.loss(best, terminal)).all()


def test_continue_output_has_no_extra_axis() -> None:
    predictor = ContinuePredictor(feature_size=10, units=16)
    assert predictor(torch.randn(4, 6, 10)).shape == (4, 6)


def test_squashed_rewards_are_learned_and_paid_as_such() -> None:
    """The target is tanh of the reward; the prediction is not turned back."""
    predictor = RewardPredictor(feature_size=10, units=8, distribution="unit_normal", squash="tanh", outscale=1.0)
    output = predictor(torch.randn(5, 10))
    reward = 3.0 * torch.randn(5)
    torch.testing.assert_close(predictor.loss(output, reward), 0.5 * (predictor.mean(output) - reward.tanh()) ** 2)
    torch.testing.assert_close(predictor.mean(output), output[..., 0])


def test_an_ensemble_averages_its_members_and_may_doubt_them() -> None:
    """The mean of single predictors, their mean loss, and less reward where they disagree."""
    ensemble = RewardEnsemble(feature_size=10, units=8, members=3, bins=15, limit=5.0, pessimism=2.0)
    features, reward = torch.randn(4, 6, 10), torch.randn(4, 6)
    output = ensemble(features)
    heads = [ensemble.head, *ensemble.others]
    means = torch.stack([ensemble.distribution.mean(head(features)) for head in heads], -1)
    losses = torch.stack([ensemble.distribution.loss(head(features), reward) for head in heads], -1)
    assert means.std(-1).min() > 0  # members begin apart
    torch.testing.assert_close(ensemble.mean(output), means.mean(-1) - 2.0 * means.std(-1, correction=0))
    torch.testing.assert_close(ensemble.loss(output, reward), losses.mean(-1))


def test_a_dreamer_takes_an_ensemble_of_rewards_and_a_transformer(tmp_path: Path) -> None:
    """By name, in the places of the single predictor and of the convolutions."""
    overrides = (
        "environment.observation=pixels", "components/encoders@components.encoder=multi_key_transformer",
        "components/predictors@components.reward=reward_ensemble", "training.total_timesteps=80",
        "evaluation.imagination=false",
    )  # fmt: skip
    outcome = run_training([*TINY_DREAMER, *QUIET, *overrides, f"run_root={tmp_path}"])
    assert outcome.code == 0
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("train/loss/reward", 0.0) > 0.0 for row in rows)
