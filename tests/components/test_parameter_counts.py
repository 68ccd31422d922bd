"""Sizes of the parts as DreamerV3's presets give them (the recurrent model has its own test)."""

from __future__ import annotations

import pytest
from torch import nn

from rl_lab.components.actors.dreamer import make_actor
from rl_lab.components.critics.dreamer import TwoHotCritic
from rl_lab.components.decoders import MultiKeyDecoder
from rl_lab.components.encoders import MultiKeyEncoder
from rl_lab.components.predictors import ContinuePredictor, RewardPredictor
from rl_lab.specs import ActionSpec, ObservationSpec


def trainable(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def hidden(inputs: int, units: int) -> int:
    """Weight, bias, norm scale."""
    return inputs * units + 2 * units


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def conv(inputs: int, outputs: int, *, norm: bool) -> int:
    return 25 * inputs * outputs + outputs * (2 if norm else 1)


def test_size1m_on_a_24_dim_vector_and_6_continuous_actions() -> None:
    """The figures that are published for walker-walk."""
    units, features = 64, 512 + 32 * 4
    vector = {"vector": ObservationSpec("vector", (24,), "float32")}
    parts = {
        "encoder": MultiKeyEncoder(observation=vector, units=units, depth=4),
        "decoder": MultiKeyDecoder(observation=vector, deter=512, stoch_size=128, units=units, depth=4),
        "reward": RewardPredictor(feature_size=features, units=units),
        "continue": ContinuePredictor(feature_size=features, units=units),
        "actor": make_actor(action=ActionSpec("continuous", (6,)), feature_size=features, units=units),
        "critic": TwoHotCritic(feature_size=features, units=units),
    }
    trunk = hidden(features, units) + 2 * hidden(units, units)
    by_hand = {
        "encoder": hidden(24, units) + 2 * hidden(units, units),
        "decoder": trunk + linear(units, 24),
        "reward": hidden(features, units) + linear(units, 255),
        "continue": hidden(features, units) + linear(units, 1),
        "actor": trunk + 2 * linear(units, 6),
        "critic": trunk + linear(units, 255),
    }
    published = {
        "encoder": 10_112, "decoder": 51_096, "reward": 57_663,
        "continue": 41_153, "actor": 50_316, "critic": 66_111,
    }  # fmt: skip
    assert {name: trainable(part) for name, part in parts.items()} == by_hand == published


@pytest.mark.parametrize(("actions", "total"), [(6, 10_492_616), (18, 10_498_772)])
def test_size12m_on_images_and_discrete_actions(actions: int, total: int) -> None:
    """With the recurrent model's count by formula, the whole has the size of the reference."""
    units, deter, stoch, blocks, depth = 256, 2048, 32 * 16, 8, 16
    features = deter + stoch
    image = {"image": ObservationSpec("image", (64, 64, 3), "uint8")}
    encoder = MultiKeyEncoder(observation=image, units=units, depth=depth)
    decoder = MultiKeyDecoder(observation=image, deter=deter, stoch_size=stoch, units=units, depth=depth)
    size = 4 * 4 * 64
    convs = [(3, 32), (32, 48), (48, 64), (64, 64)]
    assert trainable(encoder) == sum(conv(i, o, norm=True) for i, o in convs)
    start = deter * size // blocks + size + hidden(stoch, 2 * units) + linear(2 * units, size) + 64
    ups = [(64, 64), (64, 48), (48, 32)]
    assert trainable(decoder) == start + sum(conv(i, o, norm=True) for i, o in ups) + conv(32, 3, norm=False)
    inputs = hidden(deter, 256) + hidden(stoch, 256) + hidden(actions, 256)
    core = (deter + 3 * 256 * blocks) * deter // blocks + 2 * deter + deter * 3 * deter // blocks + 3 * deter
    posterior = hidden(deter + encoder.output_size, 256) + linear(256, stoch)
    prior = hidden(deter, 256) + hidden(256, 256) + linear(256, stoch)
    heads = [
        RewardPredictor(feature_size=features, units=units),
        ContinuePredictor(feature_size=features, units=units),
        make_actor(action=ActionSpec("discrete", (1,), (actions,)), feature_size=features, units=units),
        TwoHotCritic(feature_size=features, units=units),
    ]
    model = inputs + core + posterior + prior
    assert model + sum(trainable(part) for part in [encoder, decoder, *heads]) == total
