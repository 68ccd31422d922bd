"""Denoising networks: published sizes, and which input reaches which output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rl_lab.components.diffusion import DiffusionTransformer, TemporalUNet
from rl_lab.components.diffusion.unet import ConditionalResidualBlock


def trainable(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        ({"dim": 2, "horizon": 16, "condition": 40}, 65_783_298),  # Diffusion Policy, Push-T from key points
        (
            {"dim": 14, "horizon": 32, "widths": (32, 64, 128, 256), "level_embedding": 32, "scale": False},
            3_956_302,  # Diffuser, Hopper
        ),
    ],
)
def test_unets_of_the_papers_have_their_size(settings: dict[str, Any], parameters: int) -> None:
    with torch.device("meta"):
        assert trainable(TemporalUNet(**settings)) == parameters


def test_transformer_of_the_paper_has_its_size() -> None:
    assert trainable(DiffusionTransformer(dim=2, horizon=16, condition=40, condition_tokens=2)) == 8_965_122


def test_the_scale_of_film_is_not_one_plus_it() -> None:
    """With FiLM's weights and biases at 0 the first convolution has no effect, only the skip and constants remain."""
    block = ConditionalResidualBlock(4, 4, 3, kernel=3, groups=2)
    nn.init.zeros_(block.film.weight)
    nn.init.zeros_(block.film.bias)
    x, y, condition = torch.randn(2, 4, 8), torch.randn(2, 4, 8), torch.randn(2, 3)
    torch.testing.assert_close(block(x, condition) - x, block(y, condition) - y)


def test_every_step_of_the_unet_sees_level_and_condition() -> None:
    network = TemporalUNet(dim=2, horizon=8, condition=3, widths=(8, 16), level_embedding=8, groups=4)
    noisy, level, condition = torch.randn(2, 8, 2), torch.tensor([1, 7]), torch.randn(2, 3)
    out = network(noisy, level, condition)
    assert out.shape == noisy.shape
    assert not torch.isclose(out, network(noisy, level, condition + 1.0)).all(-1).any()
    assert not torch.isclose(out, network(noisy, level + 1, condition)).all(-1).any()


def test_the_transformer_is_causal_in_steps_and_observations() -> None:
    network = DiffusionTransformer(
        dim=2, horizon=6, condition=6, condition_tokens=2, width=16, layers=2, heads=2, attention_dropout=0.0
    ).double()
    noisy, condition = torch.randn(2, 6, 2).double(), torch.randn(2, 6).double()
    level = torch.tensor([1, 7])
    out = network(noisy, level, condition)
    later = noisy.clone()
    later[:, 3] += 1.0
    changed = (out - network(later, level, condition)).abs().amax(-1) > 1e-9
    assert changed.tolist() == [[False] * 3 + [True] * 3] * 2
    second = condition.clone()
    second[:, 3:] += 1.0  # step 0 is the time of the first observation: it does not see the second one
    changed = (out - network(noisy, level, second)).abs().amax(-1) > 1e-9
    assert changed.tolist() == [[False] + [True] * 5] * 2
