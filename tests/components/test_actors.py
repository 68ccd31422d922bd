"""Actors and the action codec."""

from __future__ import annotations

import math

import pytest
import torch

from rl_lab.components.actions import ActionCodec
from rl_lab.components.actors.dreamer import (
    BoundedNormalActor,
    CategoricalActor,
    TanhNormalActor,
    TruncatedNormalActor,
    make_actor,
)
from rl_lab.errors import ConfigError
from rl_lab.specs import ActionSpec

DISCRETE = ActionSpec("discrete", (1,), (5,))
MULTI = ActionSpec("discrete", (3,), (2, 3, 4))
CONTINUOUS = ActionSpec("continuous", (2, 3))


@pytest.mark.parametrize("spec", [DISCRETE, MULTI, CONTINUOUS], ids=["discrete", "multi", "continuous"])
def test_codec_round_trip(spec: ActionSpec) -> None:
    """Stored → encoded → stored, with any leading axes; dtypes as stored."""
    codec = ActionCodec(spec)
    if spec.kind == "discrete":
        stored = torch.stack([torch.randint(0, n, (4, 6)) for n in spec.classes], -1).int()
    else:
        stored = torch.rand(4, 6, *spec.shape) * 2 - 1
    encoded = codec.encode(stored)
    assert encoded.shape == (4, 6, spec.encoded_size)
    assert encoded.dtype == torch.float32
    decoded = codec.decode(encoded)
    assert torch.equal(decoded, stored)
    assert decoded.dtype == stored.dtype


def test_codec_concatenates_one_hots() -> None:
    encoded = ActionCodec(MULTI).encode(torch.tensor([[1, 0, 3]], dtype=torch.int32))
    assert encoded.tolist() == [[0, 1, 1, 0, 0, 0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("name", "spec"),
    [("categorical", DISCRETE), ("categorical", MULTI), ("bounded_normal", CONTINUOUS),
     ("tanh_normal", CONTINUOUS), ("truncated_normal", CONTINUOUS)],
)  # fmt: skip
def test_every_actor_has_the_same_interface(name: str, spec: ActionSpec) -> None:
    """Parameters → distribution; samples from given noise are encoded actions, with log-probs and entropies."""
    actor = make_actor(action=spec, actor=name, feature_size=8, units=16)
    params = actor(torch.randn(3, 4, 8))
    assert params.dtype == torch.float32
    dist = actor.distribution(params)
    noise = actor.draw_noise((3, 4), "cpu")
    assert noise.shape == (3, 4, *actor.noise_shape)
    action = dist.sample(noise)
    assert action.shape == (3, 4, spec.encoded_size)
    assert torch.equal(action, dist.sample(noise))
    assert dist.log_prob(action.detach()).shape == (3, 4)
    assert dist.entropy().shape == (3, 4)
    assert dist.mode().shape == action.shape
    assert actor.codec.decode(action).shape == (3, 4, *spec.shape)
    assert dist.log_prob(action.detach()).requires_grad


def test_auto_picks_by_the_kind_of_action() -> None:
    plain = {"kind": "discrete", "shape": [1], "classes": [4]}
    assert isinstance(make_actor(action=plain, feature_size=8), CategoricalActor)
    assert isinstance(make_actor(action=CONTINUOUS, feature_size=8), BoundedNormalActor)


def test_fresh_policy_is_close_to_maximum_entropy() -> None:
    """outscale 0.01: nearly uniform classes, means near 0 and deviations near 0.1 + 0.9·sigmoid(2)."""
    features = torch.randn(100, 8)
    discrete = make_actor(action=DISCRETE, feature_size=8, units=32)
    entropy = discrete.distribution(discrete(features)).entropy()
    assert entropy.min().item() > math.log(5.0) - 1e-3
    continuous = make_actor(action=CONTINUOUS, feature_size=8, units=32)
    dist = continuous.distribution(continuous(features))
    assert dist.mode().abs().max() < 0.1
    torch.testing.assert_close(dist.std, torch.full((100, 6), 0.1 + 0.9 / (1 + math.exp(-2.0))), atol=0.02, rtol=0.0)


def test_wrong_kind_and_unknown_name_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"BoundedNormalActor is for continuous actions.*actor=auto"):
        make_actor(action=DISCRETE, actor="bounded_normal", feature_size=8)
    with pytest.raises(ConfigError, match="Did you mean 'tanh_normal'"):
        make_actor(action=CONTINUOUS, actor="tanh_norml", feature_size=8)
    with pytest.raises(ConfigError, match=r"action.kind is 'box'"):
        make_actor(action={"kind": "box", "shape": [1]}, feature_size=8)


def test_settings_reach_the_distribution() -> None:
    features = torch.randn(2, 8)
    tanh = TanhNormalActor(action=CONTINUOUS, feature_size=8, init_std=0.5, outscale=0.0)
    torch.testing.assert_close(tanh.distribution(tanh(features)).std, torch.full((2, 6), 0.5001))
    cut = TruncatedNormalActor(action=CONTINUOUS, feature_size=8, min_std=0.2, outscale=0.0)
    torch.testing.assert_close(cut.distribution(cut(features)).std, torch.full((2, 6), 1.2))
