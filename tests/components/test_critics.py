"""Critics and their slow copies."""

from __future__ import annotations

import math

import pytest
import torch

from rl_lab.components.critics.dreamer import Critic, ScalarCritic, TwoHotCritic
from rl_lab.errors import ConfigError


def move(critic: Critic) -> None:
    """As an optimiser step would."""
    with torch.no_grad():
        for parameter in critic.head.parameters():
            parameter += torch.randn_like(parameter)


def test_fresh_value_is_zero_with_loss_ln_255() -> None:
    critic = TwoHotCritic(feature_size=10, units=16)
    output = critic(torch.randn(4, 10))
    assert torch.equal(critic.mean(output), torch.zeros(4))
    torch.testing.assert_close(critic.loss(output, torch.randn(4) * 50), torch.full((4,), math.log(255.0)))


@pytest.mark.parametrize("make", [TwoHotCritic, ScalarCritic])
def test_slow_copy_starts_equal_and_follows(make: type[Critic]) -> None:
    """slow ← 0.98·slow + 0.02·fast, for every parameter."""
    critic = make(feature_size=10, units=16)
    features = torch.randn(4, 10)
    assert torch.equal(critic.slow(features), critic(features))
    before = [p.clone() for p in critic.slow.parameters()]
    move(critic)
    critic.update_slow()
    for slow, old, fast in zip(critic.slow.parameters(), before, critic.head.parameters(), strict=True):
        torch.testing.assert_close(slow, 0.98 * old + 0.02 * fast.detach())


def test_hard_copy_every_third_update() -> None:
    critic = ScalarCritic(feature_size=10, units=16, slow_rate=1.0, slow_every=3)
    features = torch.randn(4, 10)
    start = critic.slow(features)
    move(critic)
    for number in (1, 2):
        critic.update_slow()
        assert torch.equal(critic.slow(features), start), number
    critic.update_slow()
    assert torch.equal(critic.slow(features), critic(features))


def test_slow_copy_is_saved_but_not_trained() -> None:
    """It is in the state, asks for no gradient and is not counted."""
    critic, other = TwoHotCritic(feature_size=10, units=16), TwoHotCritic(feature_size=10, units=16)
    move(critic)
    other.load_state_dict(critic.state_dict())
    features = torch.randn(4, 10)
    assert torch.equal(other.slow(features), critic.slow(features))
    assert not any(parameter.requires_grad for parameter in critic.slow.parameters())
    assert not critic.slow(features).requires_grad
    trainable = sum(p.numel() for p in critic.parameters() if p.requires_grad)
    assert trainable == sum(p.numel() for p in critic.head.parameters())


def test_scalar_loss_is_half_the_squared_error() -> None:
    critic = ScalarCritic(feature_size=10, units=16)
    output, target = torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 2.0])
    assert critic.mean(output).tolist() == [1.0, 2.0]
    assert critic.loss(output, target).tolist() == [2.0, 0.0]


@pytest.mark.parametrize("settings", [{"slow_rate": 0.0}, {"slow_rate": 1.5}, {"slow_every": 0}])
def test_bad_settings_are_explained(settings: dict) -> None:
    with pytest.raises(ConfigError, match="slow_rate"):
        ScalarCritic(feature_size=10, **settings)
