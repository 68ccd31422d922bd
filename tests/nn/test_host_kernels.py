"""The kernels for small networks on the CPU against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.representation_learners.posterior_scan import gated_update
from rl_lab.nn import host_kernels as kernels
from rl_lab.nn.distributions import UnimixCategorical
from rl_lab.nn.layers import MLP, Head

njit = pytest.importorskip("numba").njit
EPS = 1e-4


@njit  # compiled anew in every run
def _apply(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.shape[1]):
        out[0, i] = kernels.exp(x[0, i])
        out[1, i] = kernels.sigmoid(x[0, i])
        out[2, i] = kernels.tanh(x[0, i])


def test_functions_of_a_number_are_right_to_the_last_digits() -> None:
    """exp relatively over its whole range, sigmoid and tanh to 2e-7; what is not a number stays so."""
    x = np.linspace(-86.0, 86.0, 100_001, dtype=np.float32)[None]
    out = np.empty((3, x.shape[1]), np.float32)
    _apply(x, out)
    exact = torch.from_numpy(x[0]).double()
    np.testing.assert_allclose(out[0], exact.exp(), rtol=3e-7)
    np.testing.assert_allclose(out[1], exact.sigmoid(), rtol=0, atol=2e-7)
    np.testing.assert_allclose(out[2], exact.tanh(), rtol=0, atol=2e-7)
    _apply(np.array([[np.nan, 1e9, -1e9]], np.float32), out[:, :3])
    assert np.isnan(out[:, 0]).all()
    np.testing.assert_allclose(out[1:, 1:3], [[1, 0], [1, -1]], atol=1e-6)


@pytest.mark.parametrize("size", [7, 16, 65])
def test_norm_and_activation_in_all_forms(size: int) -> None:
    """In place, to another place, with what is kept; and their derivatives by inputs, biases and scales."""
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 10, size, generator=generator)
    biases, scales = torch.randn(2, 2, size, generator=generator)
    exact = [part.double().requires_grad_() for part in (x, biases, scales)]
    pre = exact[0] + exact[1].repeat(5, 1)
    normed = pre * torch.rsqrt(pre.square().mean(-1, keepdim=True) + EPS)
    expected = F.silu(normed * exact[2].repeat(5, 1))
    by_x, _, by_scales = torch.autograd.grad((expected * grad).sum(), exact)
    biased = pre.detach().float()
    place, out = x.clone().numpy(), np.empty((10, size), np.float32)
    kernels.norm_silu(place, biases.numpy(), scales.numpy(), EPS)
    kernels.norm_silu_to(biased.numpy(), scales.numpy(), EPS, out)
    for result in (place, out):
        np.testing.assert_allclose(result, expected.detach(), rtol=1e-5, atol=1e-6)
    result, sums = np.empty_like(out), np.empty((2, size), np.float32)
    kernels.norm_silu_to_backward(grad.numpy(), biased.numpy(), scales.numpy(), EPS, result)
    kernels.norm_silu_scale_backward(grad.numpy(), biased.numpy(), scales.numpy(), EPS, sums)
    np.testing.assert_allclose(result, by_x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sums, by_scales, rtol=1e-4, atol=1e-5)


def test_networks_have_the_outputs_and_gradients_of_the_plain_layers() -> None:
    """Hidden layers and the one after them, in float32 by kernels, in float64 by autograd."""
    torch.manual_seed(0)
    head = Head(6, 5, units=16, layers=2)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 0.5)
    x, target, results = torch.randn(3, 4, 6), torch.randn(3, 4, 5), []
    for dtype in (torch.float32, torch.float64):
        head.to(dtype)
        rows = x.to(dtype).requires_grad_()
        out = head(rows)
        results.append((out, *torch.autograd.grad((out * target).sum(), [rows, *head.parameters()])))
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast.double(), plain, rtol=1e-4, atol=1e-5)


def test_layers_without_gradients_equal_those_with() -> None:
    """They keep nothing for a derivative."""
    layers, x = MLP(6, 16, 2), torch.randn(3, 70, 6)
    with torch.no_grad():
        torch.testing.assert_close(layers(x), layers(x.requires_grad_()).detach())


@pytest.mark.parametrize("classes", [2, 8, 33])
def test_samples_are_those_of_the_plain_form(classes: int) -> None:
    """For the same noise; one-hot, in the shape of the logits."""
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(5, 50, classes, generator=generator)
    noise = torch.empty_like(logits).exponential_(generator=generator)
    plain = UnimixCategorical(logits.double()).sample(noise.double())
    with torch.no_grad():
        torch.testing.assert_close(UnimixCategorical(logits).sample(noise), plain.float())


def test_gates_and_their_derivative() -> None:
    """Of a block GRU."""
    generator = torch.Generator().manual_seed(0)
    gates, (before, grad) = torch.randn(3, 4, 3, 8, generator=generator), torch.randn(2, 3, 32, generator=generator)
    exact = [part.double().requires_grad_() for part in (gates.flatten(1), before)]
    expected = gated_update(*exact, 4)
    by_gates, by_before = torch.autograd.grad((expected * grad).sum(), exact)
    after, own_gates, own_before = (
        np.empty((3, 32), np.float32),
        np.empty((3, 4, 3, 8), np.float32),
        np.empty_like(before),
    )
    kernels.gated_update(gates.numpy(), before.numpy(), after)
    kernels.gated_update_backward(grad.numpy(), gates.numpy(), before.numpy(), own_gates, own_before)
    for result, wanted in ((after, expected), (own_gates.reshape(3, -1), by_gates), (own_before, by_before)):
        np.testing.assert_allclose(result, wanted.detach(), rtol=1e-5, atol=1e-6)


def test_gradient_through_a_sample() -> None:
    """That of the probabilities, added to what is there."""
    generator = torch.Generator().manual_seed(0)
    logits, grad, before = torch.randn(3, 6, 5, generator=generator)
    exact = logits.double().requires_grad_()
    (expected,) = torch.autograd.grad((UnimixCategorical(exact, unimix=0.1).probs * grad).sum(), exact)
    result = before.clone().numpy()
    kernels.straight_through_backward(grad.numpy(), logits.numpy(), 0.1, result)
    np.testing.assert_allclose(result, before + expected, rtol=1e-5, atol=1e-6)
