"""The kernels of TD-MPC2's plans compute what the plain layers do: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.triton_anywhere import DEVICE, use_triton

from rl_lab.kernels.copies import WorkingCopies
from rl_lab.nn.distributions import TwoHot
from rl_lab.nn.tdmpc_layers import TDMPCMLP, EnsembleMLP, SimNorm, hidden_layers

pytest.importorskip("triton")
from rl_lab.kernels.triton import tdmpc as kernels  # after the check

# Rows and columns: a power of two, uneven ones, one row, more columns than a tile has numbers.
SIZES = {"even": (8, 64), "uneven": (13, 24), "one row": (1, 8), "wide": (3, 2056)}


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize("sizes", SIZES)
def test_norm_and_mish(sizes: str) -> None:
    """Of several networks, all or some of them, each with its own bias, scale and shift; far out on both sides too."""
    rows, units = SIZES[sizes]
    x, (bias, scale, shift) = 30.0 * normal(2, rows, units), (3.0 * normal(5, 1, units) for _ in range(3))
    chosen = torch.tensor([4, 1], device=DEVICE)
    normed = F.layer_norm(x + bias[chosen], (units,)) * scale[chosen] + shift[chosen]
    got = kernels.norm_mish(x, scale, shift, eps=1e-5, bias=bias, members=chosen)
    torch.testing.assert_close(got, F.mish(normed), rtol=1e-4, atol=1e-5)
    alone = kernels.norm_mish(x[:1], scale[0, 0], shift[0, 0], eps=1e-5)
    expected = F.mish(F.layer_norm(x[:1], (units,), scale[0, 0], shift[0, 0]))
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
def test_norm_and_simplices(sizes: str) -> None:
    """Of rows that are the beginnings of wider ones."""
    rows, units = SIZES[sizes]
    x, scale, shift = normal(rows, units + 8)[:, :units], 3.0 * normal(units), normal(units)
    expected = SimNorm(8)(F.layer_norm(x, (units,), scale, shift))
    got = kernels.norm_simplex(x, scale, shift, eps=1e-5, group=8)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spacing", ["linear", "symexp"])
@pytest.mark.parametrize("lead", [(5,), (2, 33)])
def test_mean_of_two_hot(spacing: str, lead: tuple[int, ...]) -> None:
    """Of rows that are the beginnings of wider ones, as padded products leave them."""
    scalar = TwoHot(101, 10.0, spacing).to(DEVICE)
    logits = 4.0 * normal(*lead, 104)[..., :101]
    plain, expected = copy.deepcopy(scalar), scalar.mean(logits)
    assert use_triton(scalar) == 1
    torch.testing.assert_close(scalar.mean(logits), expected, rtol=1e-3, atol=1e-3)
    turned = logits.flip(0).transpose(0, -2) if len(lead) > 1 else logits[0]
    torch.testing.assert_close(scalar.mean(turned), plain.mean(turned), rtol=1e-3, atol=1e-3)
    zero = scalar.mean(torch.zeros_like(logits))
    torch.testing.assert_close(zero, torch.zeros_like(zero), atol=1e-2, rtol=0.0)


def test_what_is_not_a_number_stays_so() -> None:
    """A planner must see that a model has broken."""
    x, ones = torch.full((1, 2, 8), float("nan"), device=DEVICE), torch.ones(8, device=DEVICE)
    assert kernels.norm_mish(x, ones, ones, eps=1e-5).isnan().all()
    assert kernels.norm_simplex(x[0], ones, ones, eps=1e-5, group=8).isnan().all()
    scalar = TwoHot(101, 10.0, "linear").to(DEVICE)
    assert kernels.two_hot_mean(scalar, torch.full((3, 101), float("nan"), device=DEVICE)).isnan().all()


@pytest.mark.parametrize("units", [24, 20], ids=["aligned", "padded"])
def test_networks(units: int) -> None:
    """Padded copies with kernels compute what the networks do, for some members too; without gradients alone."""
    ensemble = EnsembleMLP(3, 13, hidden_layers("tdmpc2", units, 2), 7, style="tdmpc2").to(DEVICE)
    alone = TDMPCMLP(13, hidden_layers("tdmpc2", units, 2), 16, style="tdmpc2", simplex=8).to(DEVICE)
    for value in (*ensemble.parameters(), *alone.parameters()):
        value += 0.3 * torch.randn_like(value)
    copies = WorkingCopies(torch.float32, multiple=8)
    fast, fast_alone = copies.add(ensemble), copies.add(alone)
    assert use_triton(fast) == use_triton(fast_alone) == 3
    x, chosen = normal(4, 13), torch.tensor([2, 0], device=DEVICE)
    torch.testing.assert_close(fast(x), ensemble(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast(x, members=chosen), ensemble(x, members=chosen), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast_alone(x), alone(x), rtol=1e-4, atol=1e-4)
    with torch.enable_grad():
        assert fast(x.requires_grad_()).requires_grad


def test_layers_of_other_kinds_have_no_kernel() -> None:
    """TD-MPC's have no norm; groups of six are no power of two; a swapped activation is another layer."""
    assert use_triton(TDMPCMLP(4, hidden_layers("tdmpc", 8, 1), 6, style="tdmpc")) == 0
    assert use_triton(TDMPCMLP(4, hidden_layers("tdmpc2", 8, 1), 12, style="tdmpc2", simplex=6)) == 1
    network = EnsembleMLP(2, 4, hidden_layers("tdmpc2", 8, 2), style="tdmpc2")
    network.layers[1].activation = torch.nn.GELU()
    assert use_triton(network) == 1
