"""The kernel of a linear recurrence computes what a loop does: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.return_computers.functions import lambda_returns, recursive_returns

pytest.importorskip("triton")
from rl_lab.nn.recurrence_kernel import Recurrence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(1, 1), (15, 40), (63, 16)])
def test_recurrence_equals_the_loop(shape: tuple[int, int]) -> None:
    """Whatever the number of steps and columns, and however they lie; with its gradients."""
    inputs = [torch.randn(*shape[::-1]).t(), torch.rand(shape), torch.randn(shape[1])]
    factor, results = torch.randn(shape), []
    for device in ("cpu", DEVICE):
        base, slope, last = parts = [part.detach().to(device).requires_grad_() for part in inputs]
        if device == "cpu" and not results:
            found = recursive_returns(base, slope, torch.zeros(shape), 1.0, last, dim=0)  # the loop
        else:
            found = Recurrence.apply(base, slope, last)
        gradients = torch.autograd.grad((found * factor.to(device)).sum(), parts)
        results.append([part.cpu() for part in (found, *gradients)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dim", [0, 1])
def test_returns_on_a_gpu_equal_those_on_the_cpu(dim: int) -> None:
    """With a λ for each record, and with gradients."""
    reward, live, value, mix = (torch.rand(5, 6) for _ in range(4))
    expected = lambda_returns(reward, live, value, mix, dim=dim)
    inputs = [part.cuda() for part in (reward, live, value, mix)]
    torch.testing.assert_close(lambda_returns(*inputs, dim=dim).cpu(), expected)
    single = [part[0] for part in inputs]
    torch.testing.assert_close(lambda_returns(*single, dim=0).cpu(), lambda_returns(*(p.cpu() for p in single), dim=0))
    inputs[2].requires_grad_()
    assert lambda_returns(*inputs, dim=dim).requires_grad
