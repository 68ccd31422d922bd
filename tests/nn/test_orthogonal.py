"""Heads with orthogonal weights."""

from __future__ import annotations

import math

import pytest
import torch

from rl_lab.errors import ConfigError
from rl_lab.nn.orthogonal import OrthogonalHead


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
