"""The perceptron with its own backward pass: the same function and gradients as autograd's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_lab.nn.relu_mlp import ReluMLP


def twin(network: ReluMLP) -> nn.Sequential:
    layers: list[nn.Module] = []
    for layer in network.layers:
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("hidden", [[], [8], [8, 6, 5]])
def test_same_as_a_sequential(hidden: list[int]) -> None:
    """Outputs and every gradient, with and without memory for gradients from before."""
    torch.manual_seed(0)
    network = ReluMLP(4, hidden, 3)
    x, slope = torch.randn(7, 4), torch.randn(7, 3)
    expected = twin(network)(x)
    gradients = torch.autograd.grad(expected, list(network.parameters()), slope)
    torch.testing.assert_close(network(x), expected)
    for _ in range(2):  # the second time into the gradients of the first
        values, backward = network.with_backward(x)
        assert not values.requires_grad
        torch.testing.assert_close(values, expected.detach())
        backward(slope)
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def test_autograd_still_works() -> None:
    """A part of a larger network is trained as any other, inputs included."""
    torch.manual_seed(0)
    network, x = ReluMLP(4, [8], 3), torch.randn(2, 5, 4, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    network(x).square().sum().backward()
    twin(network)(other).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
