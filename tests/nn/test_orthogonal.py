"""Plain heads: their weights, and the fused form against autograd's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rl_lab.errors import ConfigError
from rl_lab.nn.adam import ClippedAdam
from rl_lab.nn.orthogonal import OrthogonalHead, run_heads


def heads(layers: int = 2) -> list[OrthogonalHead]:
    torch.manual_seed(0)
    return [OrthogonalHead(5, size, units=16, layers=layers, activation="tanh", gain=1.0) for size in (3, 1)]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_fused_heads_equal_plain_ones(layers):
    """Outputs and all gradients, those of the input included, for any leading axes."""
    both, x = heads(layers), torch.randn(4, 6, 5, requires_grad=True)
    fused, plain = run_heads(x, *both), [nn.Sequential.forward(head, x) for head in both]
    torch.testing.assert_close(fused, plain)
    variables = [x, *both[0].parameters(), *both[1].parameters()]
    weights = [torch.randn_like(out) for out in plain]
    left, right = (torch.autograd.grad(outs, variables, weights) for outs in (fused, plain))
    torch.testing.assert_close(left, right)
    with torch.no_grad():
        torch.testing.assert_close(run_heads(x, *both), plain)


def test_weights_are_orthogonal():
    """Gain √2 inside, the given one outside, biases 0; without a gain torch's own."""
    head = OrthogonalHead(16, 4, units=16, layers=2, activation="relu", gain=0.01)
    for layer, gain in ((head[0], math.sqrt(2.0)), (head[2], math.sqrt(2.0)), (head[4], 0.01)):
        product = layer.weight @ layer.weight.t()
        torch.testing.assert_close(product, gain**2 * torch.eye(len(product)), rtol=1e-4, atol=1e-6)
        assert not layer.bias.any()
    assert OrthogonalHead(16, 4, units=16, layers=2, activation="relu", gain=None)[0].bias.any()


def test_unknown_activation():
    """The message has the nearest name."""
    with pytest.raises(ConfigError, match="tanh"):
        OrthogonalHead(2, 2, units=2, layers=1, activation="tahn", gain=1.0)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_clipped_adam_is_adam_behind_a_norm_clip(clip):
    """Step by step the parameters of torch's own."""
    torch.manual_seed(0)
    mine, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(mine.state_dict())
    fused, plain = (
        ClippedAdam(mine.parameters(), lr=0.1, clip=clip),
        torch.optim.Adam(theirs.parameters(), 0.1, eps=1e-5),
    )
    for step in range(5):
        x = torch.randn(4, 3) * (step + 1)
        for model, optimizer in ((mine, fused), (theirs, plain)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip)
            fused.step()
            torch.testing.assert_close(fused.last_grad_norm, norm)
        else:
            fused.step()
        plain.step()
        torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-4, atol=1e-5)


def test_bad_updates_leave_no_trace():
    """A gradient or loss that is NaN changes neither parameters nor moments; the state goes through a checkpoint."""
    model = nn.Linear(2, 1)
    optimizer = ClippedAdam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = [p.clone() for p in (*model.parameters(), *optimizer.first_moments, *optimizer.second_moments)]
    optimizer.step(loss=torch.tensor(float("nan")))
    model.weight.grad[0, 0] = float("inf")
    optimizer.step()
    after = [*model.parameters(), *optimizer.first_moments, *optimizer.second_moments]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    assert float(optimizer.updates) == 1.0
    assert float(optimizer.metrics()["nonfinite"]) == 1.0
    other = ClippedAdam(nn.Linear(2, 1).parameters())
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.second_moments[0], optimizer.second_moments[0])
