"""Initialisation, block layers and norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rl_lab.errors import ConfigError
from rl_lab.nn.convolutions import Conv, PooledConv, UpsampleConv
from rl_lab.nn.distributions import one_hot, symexp, symlog
from rl_lab.nn.layers import MLP, BlockLinear, Head, Linear, RMSNorm


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [(Linear(400, 300), 400), (Conv(16, 64, 5), 16 * 25), (BlockLinear(512, 512, 8), 512)],
    ids=["linear", "conv", "block"],
)
def test_weights_are_normal_cut_at_two_sigma(layer: nn.Module, fan_in: int) -> None:
    """σ = 1.1368·sqrt(1/fan_in); nothing lies beyond 2σ, and what is left has deviation sqrt(1/fan_in)."""
    sigma = 1.1368 * math.sqrt(1.0 / fan_in)
    weight = layer.weight.detach()
    assert weight.abs().max() <= 2.0 * sigma * 1.0001
    assert weight.abs().max() > 1.9 * sigma  # the cut is at 2σ, not far inside
    assert weight.std().item() == pytest.approx(math.sqrt(1.0 / fan_in), rel=0.02)
    assert torch.count_nonzero(layer.bias) == 0


def test_upsample_conv_equals_upsampling_then_convolving() -> None:
    """The rewritten form is exact, at the edges too, in value and in gradient."""
    layer = UpsampleConv(3, 4).double()
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 5, 6, 3, dtype=torch.float64, requires_grad=True)
    large = x.permute(0, 3, 1, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    expected = nn.functional.conv2d(large, layer.weight, layer.bias, padding=2).permute(0, 2, 3, 1)
    got = layer(x)
    torch.testing.assert_close(got, expected)
    weight = torch.randn_like(expected)
    inputs = [x, layer.weight, layer.bias]
    for left, right in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(left, right)


def test_pooled_conv_by_phases_equals_convolving_then_pooling() -> None:
    """The rewritten form is exact, at the edges too, in value and in gradient; of equal values the first learns."""
    layer = PooledConv(3, 4).double()
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 6, 8, 3, dtype=torch.float64)
    x[1] = 0.5  # flat: away from the edges all four outputs of a pool are equal
    x.requires_grad_()
    expected, got = layer(x), layer.by_phases(x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    inputs = [x, layer.weight, layer.bias]
    weight = torch.randn_like(expected)
    for left, right in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_pooled_conv_by_phases_passes_nan_on() -> None:
    """A NaN must not be lost in pooling: the check of the loss has to see it."""
    layer, x = PooledConv(1, 2), torch.zeros(1, 8, 8, 1)
    x[0, 5, 5] = float("nan")
    assert torch.equal(layer.by_phases(x).isnan(), layer(x).isnan())


def test_block_weights_use_the_whole_input_as_fan_in() -> None:
    """A block's weights are sqrt(blocks) smaller than those of a layer with only that block's inputs."""
    block, alone = BlockLinear(1024, 1024, 8), Linear(128, 1024)
    ratio = alone.weight.std() / block.weight.std()
    assert ratio.item() == pytest.approx(math.sqrt(8.0), rel=0.03)


def test_outscale_scales_and_zero_gives_zeros() -> None:
    """`outscale=0` starts at exactly 0; other values scale the deviation."""
    assert torch.count_nonzero(Linear(32, 8, outscale=0.0).weight) == 0
    assert Linear(400, 300, outscale=0.01).weight.std().item() == pytest.approx(0.01 / 20.0, rel=0.05)


def test_initialisation_follows_the_global_seed() -> None:
    """The run's seed decides the weights."""
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(BlockLinear(16, 16, 4).weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_block_linear_is_a_block_diagonal_matrix() -> None:
    """The layer equals separate dense layers on separate slices."""
    layer = BlockLinear(12, 8, 4)
    nn.init.normal_(layer.bias)
    x = torch.randn(3, 5, 12)
    expected = torch.block_diag(*layer.weight.detach())
    torch.testing.assert_close(layer(x), x @ expected + layer.bias)


def test_block_linear_refuses_sizes_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="input of 10 cannot be cut into 4 equal blocks"):
        BlockLinear(10, 8, 4)


def test_rms_norm_formula_and_dtype() -> None:
    """x / sqrt(mean(x²) + 1e-4) · scale, in float32 inside and in the input's dtype outside."""
    norm = RMSNorm(16)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = torch.randn(4, 16) * 0.01  # small enough for eps to matter
    expected = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-4) * norm.weight
    torch.testing.assert_close(norm(x), expected)
    half = norm(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.01, rtol=0.02)


def test_mlp_layers_and_identity() -> None:
    """Each layer is Linear → RMSNorm → SiLU; without layers the input passes unchanged."""
    mlp = MLP(6, 8, 2)
    x = torch.randn(3, 6)
    expected = x
    for layer in mlp:
        expected = nn.functional.silu(layer.norm(layer.linear(expected)))
    torch.testing.assert_close(mlp(x), expected)
    empty = MLP(6, 8, 0)
    assert empty.output_size == 6
    assert torch.equal(empty(x), x)


def test_head_leaves_half_precision() -> None:
    """Under autocast the outputs are float32 all the same; separate outputs are concatenated."""
    head = Head(8, (3, 4), units=16, layers=1)
    with torch.autocast("cpu", torch.bfloat16):
        output = head(torch.randn(2, 8))
    assert output.dtype == torch.float32
    assert output.shape == (2, 7)


def test_symlog_and_symexp_are_inverse() -> None:
    x = torch.tensor([-1e4, -1.0, -1e-3, 0.0, 1e-3, 1.0, 1e4])
    torch.testing.assert_close(symexp(symlog(x)), x, rtol=1e-5, atol=1e-7)
    assert symlog(torch.tensor(math.e - 1.0)).item() == pytest.approx(1.0)


def test_one_hot_of_any_lead_shape() -> None:
    index = torch.tensor([[0, 2], [1, 1]], dtype=torch.int32)
    assert torch.equal(one_hot(index, 3), torch.eye(3)[index.long()])


@pytest.mark.parametrize("layers", [1, 3])
def test_the_written_out_derivative_is_autograds(layers: int) -> None:
    """On the CPU an MLP runs with a backward pass of its own: values and gradients are those of the plain layers."""
    torch.manual_seed(0)
    network, x = MLP(6, 8, layers), torch.randn(2, 5, 6, requires_grad=True)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)
    wanted = [x, *network.parameters()]
    plain = torch.nn.Sequential.forward(network, x)
    target = torch.randn_like(plain)
    expected = torch.autograd.grad((plain * target).sum(), wanted)
    result = network(x)
    torch.testing.assert_close(result, plain)
    torch.testing.assert_close(torch.autograd.grad((result * target).sum(), wanted), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(network(x), plain)
    network(x.detach()).sum().backward()  # an input without gradient
    assert all(parameter.grad is not None for parameter in network.parameters())
    network.requires_grad_(False)
    (frozen,) = torch.autograd.grad((network(x) * target).sum(), [x])
    torch.testing.assert_close(frozen, expected[0], rtol=1e-4, atol=1e-5)
