"""Adam on one flat vector: torch's Adam behind gradient clipping, and nothing happens on a bad update."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.nn.flat_adam import FlatAdam


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def learn(model: nn.Module, optimizer: FlatAdam, updates: int, *, seed: int = 0, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        optimizer.zero_grad()
        loss = (scale * model(torch.randn(6, 5, generator=generator))).square().mean()
        loss.backward()
        optimizer.step(loss=loss)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_equals_torch(clip: float | None) -> None:
    """The same weights as torch.optim.Adam after clip_grad_norm_, over many updates."""
    ours, theirs = network(), network()
    flat = FlatAdam(ours.parameters(), lr=3e-3, eps=1e-8, clip=clip)
    plain = torch.optim.Adam(theirs.parameters(), lr=3e-3)
    learn(ours, flat, 40)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        plain.zero_grad()
        theirs(torch.randn(6, 5, generator=generator)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip or 1e9)
        plain.step()
    torch.testing.assert_close(flat.last_grad_norm, norm)
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_a_bad_update_is_left_out() -> None:
    """NaN in the gradient, or only in the loss: weights, moments and count stay."""
    model = network()
    optimizer = FlatAdam(model.parameters(), lr=1e-2, eps=1e-8, clip=1.0)
    learn(model, optimizer, 3)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    learn(model, optimizer, 1, scale=float("nan"))
    optimizer.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step(loss=torch.tensor(float("inf")))
    for saved, now in zip(before, [model.state_dict(), optimizer.state_dict()], strict=True):
        for name in saved:
            torch.testing.assert_close(now[name], saved[name], rtol=0, atol=0)


def test_weight_decay_is_not_scaled_by_the_learning_rate() -> None:
    """p ← (1 - decay)·p, then Adam's step; an update that is left out does not shrink anything either."""
    plain, decayed = nn.Linear(3, 2), nn.Linear(3, 2)
    decayed.load_state_dict(plain.state_dict())
    start = plain.weight.detach().clone()
    plain_settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-8, "clip": None}
    one = FlatAdam(plain.parameters(), **plain_settings)
    two = FlatAdam(decayed.parameters(), **plain_settings, weight_decay=1e-3)
    for optimizer, model in ((one, plain), (two, decayed)):
        optimizer.zero_grad()
        (model.weight.sum() + model.bias.sum()).backward()
        optimizer.step()
    torch.testing.assert_close(decayed.weight - plain.weight, -1e-3 * start, rtol=1e-2, atol=1e-7)
    kept = decayed.weight.detach().clone()
    two.zero_grad()
    (decayed.weight.sum() * float("nan")).backward()
    two.step()
    torch.testing.assert_close(decayed.weight, kept, rtol=0.0, atol=0.0)


def test_a_restored_optimizer_goes_on_exactly() -> None:
    """Weights through the module, the rest through the optimiser's own state."""
    first, second = network(), network(1)
    one, two = (FlatAdam(model.parameters(), lr=1e-3, eps=1e-8, clip=1.0) for model in (first, second))
    learn(first, one, 5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    learn(first, one, 5, seed=1)
    learn(second, two, 5, seed=1)
    torch.testing.assert_close(one.weights, two.weights, rtol=0, atol=0)


def test_complaints() -> None:
    """Settings that cannot work, and the state of another model."""
    with pytest.raises(ConfigError, match="lr=0"):
        FlatAdam(network().parameters(), lr=0.0, eps=1e-8, clip=None)
    models = nn.Linear(50, 50), network()
    one, other = (FlatAdam(model.parameters(), lr=1e-3, eps=1e-8, clip=None) for model in models)
    with pytest.raises(CheckpointError, match="does not fit"):
        one.load_state_dict(other.state_dict())
