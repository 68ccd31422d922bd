"""Products by NumPy's BLAS are torch's products."""

from __future__ import annotations

import pytest
import torch

from rl_lab.nn.host_products import MANY_ROWS, affine, array_product, multiply
from rl_lab.nn.layers import Linear


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [7, MANY_ROWS, 2 * MANY_ROWS + 5])
@pytest.mark.parametrize("sizes", [(64, 63), (128, 64), (600, 500)])
def test_products_equal_torchs(
    rows: int, sizes: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, whole parts, a rest, and a matrix that is too large; also where rows lie apart, on both sides."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    wide, weight, bias = torch.randn(rows, sizes[0] + 3), torch.randn(*sizes[::-1]).t(), torch.randn(sizes[1])
    x, out = wide[:, 3:], torch.zeros(rows, 2, sizes[1])
    expected = x.double() @ weight.double()
    multiply(x.numpy(), weight.numpy(), out[:, 1].numpy())
    results = torch.from_numpy(array_product(x.numpy(), weight.numpy())), affine(x, weight.t(), bias) - bias, out[:, 1]
    for result in results:
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
    assert not out[:, 0].any()


def test_a_layer_is_the_same_with_and_without_gradients() -> None:
    """Without, its product may be NumPy's."""
    layer, x = Linear(6, 5), torch.randn(2, MANY_ROWS, 6)
    torch.nn.init.normal_(layer.bias)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), torch.nn.Linear.forward(layer, x))
    assert layer(x).requires_grad
