"""Decoders: losses, units, and the image path."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_lab.components.decoders import DreamerCNNDecoder, MLPDecoder, MultiKeyDecoder
from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import symlog
from rl_lab.specs import ObservationSpec

SPECS = {
    "camera": ObservationSpec("image", (32, 16, 3), "uint8"),
    "depth": ObservationSpec("image", (32, 16, 1), "uint8"),
    "joints": ObservationSpec("vector", (2, 3), "float32"),
    "mode": ObservationSpec("discrete", (2,), "int64", (3, 4)),
}


def decoder(specs: dict = SPECS) -> MultiKeyDecoder:
    return MultiKeyDecoder(observation=specs, deter=32, stoch_size=12, units=8, depth=2, blocks=8)


def observation(*lead: int) -> dict[str, torch.Tensor]:
    return {
        "camera": torch.randint(0, 256, (*lead, 32, 16, 3), dtype=torch.uint8),
        "depth": torch.randint(0, 256, (*lead, 32, 16, 1), dtype=torch.uint8),
        "joints": torch.randn(*lead, 2, 3) * 10,
        "mode": torch.stack([torch.randint(0, 3, lead), torch.randint(0, 4, lead)], -1),
    }


def test_losses_are_summed_inside_an_observation_only() -> None:
    """Per key and per step: sums of squares without 1/2, and cross-entropies; batch and time are left."""
    module, obs = decoder(), observation(2, 3)
    predictions = module(torch.randn(2, 3, 32), torch.randn(2, 3, 12))
    losses = module.loss(predictions, obs)
    assert {key: loss.shape for key, loss in losses.items()} == dict.fromkeys(SPECS, (2, 3))
    image = (predictions["camera"] - obs["camera"].float() / 255).square().flatten(2).sum(-1)
    torch.testing.assert_close(losses["camera"], image)
    vector = (predictions["joints"] - symlog(obs["joints"].flatten(2))).square().sum(-1)
    torch.testing.assert_close(losses["joints"], vector)
    first, second = predictions["mode"].split([3, 4], -1)
    entropy = nn.functional.cross_entropy(first.flatten(0, 1), obs["mode"][..., 0].flatten(), reduction="none")
    entropy += nn.functional.cross_entropy(second.flatten(0, 1), obs["mode"][..., 1].flatten(), reduction="none")
    torch.testing.assert_close(losses["mode"].flatten(), entropy)


def test_decode_returns_to_the_units_of_the_observation() -> None:
    """A perfect prediction decodes to the observation itself."""
    module, obs = decoder(), observation(4)
    perfect = {
        "camera": obs["camera"].float() / 255,
        "depth": obs["depth"].float() / 255,
        "joints": symlog(obs["joints"].flatten(1)),
        "mode": torch.cat([torch.eye(3)[obs["mode"][:, 0]], torch.eye(4)[obs["mode"][:, 1]]], -1),
    }
    decoded = module.decode(perfect)
    for key in ("camera", "depth", "mode"):
        assert torch.equal(decoded[key], obs[key])
    torch.testing.assert_close(decoded["joints"], obs["joints"], rtol=1e-4, atol=1e-5)
    assert decoded["camera"].dtype == torch.uint8


def literal_image(module: DreamerCNNDecoder, deter: torch.Tensor, stoch: torch.Tensor) -> torch.Tensor:
    """The sheet's formulas, channels first, with explicit loops over the blocks."""
    height, width, channels = module.map_shape
    rows, blocks = deter.shape[0], module.blocks
    weight, bias = module.from_deter.weight, module.from_deter.bias.view(blocks, -1)
    parts = []
    for g, h in enumerate(deter.chunk(blocks, -1)):
        parts.append((h @ weight[g] + bias[g]).view(rows, height, width, channels // blocks))
    first, last = module.from_stoch
    hidden = nn.functional.silu(first.norm(first.linear(stoch)))
    x = torch.cat(parts, -1) + last(hidden).view(rows, height, width, channels)
    x = nn.functional.silu(module.map_norm(x))
    for k, conv in enumerate(module.convs):
        x = x.repeat_interleave(2, 1).repeat_interleave(2, 2)
        x = nn.functional.conv2d(x.permute(0, 3, 1, 2), conv.weight, conv.bias, padding=2).permute(0, 2, 3, 1)
        if k < 3:
            x = nn.functional.silu(module.norms[k](x))
    return torch.sigmoid(x)


def test_image_decoder_equals_its_definition() -> None:
    module = DreamerCNNDecoder(deter=32, stoch_size=12, height=32, width=48, channels=3, depth=4, units=8)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    deter, stoch = torch.randn(3, 32), torch.randn(3, 12)
    torch.testing.assert_close(module(deter, stoch), literal_image(module, deter, stoch), rtol=1e-4, atol=1e-5)
    assert [conv.out_channels for conv in module.convs] == [16, 12, 8, 3]


def test_gradients_reach_both_parts_of_the_state() -> None:
    module, obs = decoder(), observation(2)
    deter, stoch = torch.randn(2, 32, requires_grad=True), torch.randn(2, 12, requires_grad=True)
    losses = module.loss(module(deter, stoch), obs)
    for key, loss in losses.items():
        for grad in torch.autograd.grad(loss.sum(), [deter, stoch], retain_graph=True):
            assert grad.abs().sum() > 0, key


def test_keys_with_dots_are_fine() -> None:
    specs = {"robot.arm": ObservationSpec("vector", (3,), "float32")}
    module = MLPDecoder(observation=specs, feature_size=4, units=8)
    assert module(torch.randn(2, 4))["robot.arm"].shape == (2, 3)


def test_wiring_names_the_loss_of_each_key() -> None:
    wiring = decoder().wiring()
    assert set(wiring) == set(SPECS)
    assert "DreamerCNNDecoder" in wiring["camera"]
    assert "symlog" in wiring["joints"]
    assert "cross-entropy" in wiring["mode"]


@pytest.mark.parametrize(
    ("shape", "depth", "message"),
    [((84, 84, 3), 4, r"84×84.*environment.image_size=64"), ((64, 64, 3), 3, r"depth=3.*multiple of 8")],
)
def test_images_that_cannot_be_decoded_are_explained(shape: tuple[int, ...], depth: int, message: str) -> None:
    specs = {"camera": ObservationSpec("image", shape, "uint8")}
    with pytest.raises(ConfigError, match=message):
        MultiKeyDecoder(observation=specs, deter=32, stoch_size=12, units=8, depth=depth)
