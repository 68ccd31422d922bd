"""Plain heads: their weights, and the fused form against autograd's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rl_lab.errors import ConfigError
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
