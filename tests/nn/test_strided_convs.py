"""Convolutions of stride 2 by phases, as a GPU computes them, against torch's own."""

from __future__ import annotations

import pytest
import torch

from rl_lab.nn import convolutions
from rl_lab.nn.convolutions import StridedConv, StridedDeconv


@pytest.mark.parametrize("spare", [0, 4], ids=["", "padded"])
@pytest.mark.parametrize(
    ("layer", "size"),
    [(lambda: StridedConv(3, 5, 4), 8), (lambda: StridedConv(2, 5, 6), 10), (lambda: StridedDeconv(5, 3, 6), 4)],
    ids=["kernel_4", "kernel_6", "transposed"],
)
def test_by_phases_it_is_the_same_convolution(layer, size, spare, monkeypatch):
    """With all gradients, and with channels added that nothing is read from."""
    monkeypatch.setattr(convolutions, "spare_channels", lambda x, channels: spare)
    torch.manual_seed(0)
    conv = layer().double()
    x = torch.randn(2, conv.in_channels, size, size, dtype=torch.float64, requires_grad=True)
    results = [form(x) for form in (conv.forward, conv.by_phases)]
    torch.testing.assert_close(results[1], results[0])
    leaves = [x, *conv.parameters()]
    gradients = [torch.autograd.grad(result.sin().sum(), leaves) for result in results]
    torch.testing.assert_close(gradients[1], gradients[0])
