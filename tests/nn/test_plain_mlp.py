"""Plain networks run by NumPy: the same function and gradients as torch's, on the same memory."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rl_lab.nn import host_mlp
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.nn.plain_mlp import PlainMLP, run_heads


def make(hidden: list[int] | None = None, activation: str = "tanh", outputs: int = 3) -> PlainMLP:
    torch.manual_seed(0)
    return PlainMLP(4, [8, 6] if hidden is None else hidden, outputs, activation=activation)


def plain(network: PlainMLP, x: Tensor) -> Tensor:
    return nn.Sequential.forward(network, x)


@pytest.mark.parametrize("hidden", [[], [8], [8, 6, 5]])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("wide", [0, 1 << 12], ids=["wide", "narrow"])
@pytest.mark.parametrize("limit", [0, 1 << 18], ids=["by torch", "by NumPy"])
def test_same_as_autograd(hidden, activation, limit, wide, monkeypatch):
    """Outputs and every gradient, whichever library multiplies; gradients are set, not added to."""
    monkeypatch.setattr(host_mlp, "ONE_THREAD", limit)
    monkeypatch.setattr(host_mlp, "WIDE", wide)
    network, x, slope = make(hidden, activation), torch.randn(7, 4), torch.randn(7, 3)
    expected = plain(network, x)
    gradients = torch.autograd.grad(expected, list(network.parameters()), slope)
    for _ in range(2):
        (values,), backward = run_heads(x.numpy(), network)
        torch.testing.assert_close(torch.from_numpy(values), expected.detach())
        backward(slope.numpy())
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    with torch.no_grad():
        torch.testing.assert_close(network(x), expected)


def test_several_heads_on_one_input():
    """Arrays and tensors give the same outputs and gradients; the latter reach what lies below."""
    heads, x = [make(outputs=3), make(outputs=1)], torch.randn(5, 4)
    slopes = [torch.randn(5, 3), torch.randn(5, 1)]
    found = []
    for form in (x.numpy(), x.requires_grad_()):
        for head in heads:
            head.zero_grad()
        outputs, backward = run_heads(form, *heads)
        backward(*(slope.numpy() if isinstance(form, np.ndarray) else slope for slope in slopes))
        found.append([torch.as_tensor(out) for out in outputs] + [p.grad for head in heads for p in head.parameters()])
    torch.testing.assert_close(*found)
    assert x.grad is not None
    assert x.grad.any()


def test_autograd_still_works():
    """A part of a larger network is trained as any other, whatever the leading axes."""
    network, x = make(), torch.randn(2, 5, 4, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    network(x).square().sum().backward()
    plain(network, other).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


def test_the_weights_are_the_networks_own():
    """What an optimiser, a loaded state or a copy changes is what NumPy computes with."""
    network, x = make(), np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    network.forward(x)  # takes its views
    twin = copy.deepcopy(network)
    optimizer = FlatAdam(network.parameters(), lr=0.1)  # gives the parameters other memory
    before = network.forward(x)
    (values,), backward = run_heads(x, network)
    optimizer.zero_grad()
    backward(np.ones_like(values))
    optimizer.step()
    after = network.forward(x)
    assert not np.allclose(before, after)
    torch.testing.assert_close(torch.from_numpy(after), plain(network, torch.from_numpy(x)).detach())
    np.testing.assert_array_equal(twin.forward(x), before)
    twin.load_state_dict(network.state_dict())
    np.testing.assert_array_equal(twin.forward(x), after)


def test_other_activations_are_left_to_torch():
    """NumPy has none of them; a call with an array says so."""
    network = make(activation="gelu")
    with torch.no_grad():
        torch.testing.assert_close(network(torch.ones(2, 4)), plain(network, torch.ones(2, 4)))
    with pytest.raises(TypeError, match="tanh"):
        network.forward(np.ones((2, 4), np.float32))
