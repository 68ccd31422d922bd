"""Plain perceptrons: their layers and initial weights."""

from __future__ import annotations

import math

import pytest
import torch

from rl_lab.errors import ConfigError
from rl_lab.nn.plain_mlp import PlainMLP


def test_weights_are_orthogonal() -> None:
    """Gain √2 inside, the given one outside, biases 0; without a gain torch's own."""
    network = PlainMLP(16, 4, units=16, layers=2, output_gain=0.01)
    for layer, gain in ((network[0], math.sqrt(2.0)), (network[2], math.sqrt(2.0)), (network[4], 0.01)):
        product = layer.weight @ layer.weight.t()
        torch.testing.assert_close(product, gain**2 * torch.eye(len(product)), rtol=1e-4, atol=1e-6)
        assert not layer.bias.any()
    assert PlainMLP(16, 4, units=16, layers=2)[0].bias.any()


def test_no_hidden_layers_are_one_linear_layer() -> None:
    network = PlainMLP(3, 2, units=8, layers=0, activation="tanh", output_gain=1.0)
    assert len(network) == 1
    assert network(torch.ones(5, 3)).shape == (5, 2)


def test_unknown_activation() -> None:
    """The message has the nearest name."""
    with pytest.raises(ConfigError, match="tanh"):
        PlainMLP(2, 2, units=2, layers=1, activation="tahn")
