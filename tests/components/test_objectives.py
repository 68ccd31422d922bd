"""Objectives and their written-out derivatives, on arrays and tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_lab.components.objectives import clipped_surrogate, squared_error


@pytest.mark.parametrize("clip", [None, 0.3])
def test_squared_error(clip):
    """The derivative is autograd's; with clipping it is the worse of both errors, and a value held back is constant."""
    generator = torch.Generator().manual_seed(0)
    value, target, old = torch.randn(3, 200, generator=generator)
    free = value.clone().requires_grad_()
    error = (free - target).square()
    if clip is not None:
        near = old + (free - old).clamp(-clip, clip)
        error = torch.maximum(error, (near - target).square())
    (expected,) = torch.autograd.grad(error.mean(), free)
    for form in (lambda x: x, lambda x: x.numpy()):
        loss, slope = squared_error(form(value), form(target), form(old), clip)
        assert float(loss) == pytest.approx(float(error.mean().detach()), rel=1e-5)
        torch.testing.assert_close(torch.as_tensor(slope), expected)


def test_clipped_surrogate():
    """min(A·ratio, A·clip(ratio)), negated; the derivative by log π is autograd's."""
    generator = torch.Generator().manual_seed(0)
    log_ratio, advantage = torch.randn(2, 200, generator=generator) * 0.3
    free = log_ratio.clone().requires_grad_()
    literal = -torch.minimum(free.exp() * advantage, free.exp().clamp(0.8, 1.2) * advantage).mean()
    (expected,) = torch.autograd.grad(literal, free)
    for form in (lambda x: x, lambda x: x.numpy()):
        loss, slope, ratio = clipped_surrogate(form(log_ratio), form(advantage), 0.2)
        assert float(loss) == pytest.approx(float(literal.detach()), rel=1e-5)
        torch.testing.assert_close(torch.as_tensor(slope), expected)
        np.testing.assert_allclose(np.asarray(ratio), log_ratio.exp().numpy(), rtol=1e-5)
