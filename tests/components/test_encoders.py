"""Encoders, one key and many."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rl_lab.components.encoders import (
    DreamerCNN,
    ImpalaCNN,
    MLPEncoder,
    MultiKeyEncoder,
    ResNetEncoder,
    VisionTransformer,
)
from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import symlog
from rl_lab.specs import ObservationSpec

IMAGE = ObservationSpec("image", (32, 32, 3), "uint8")
VECTOR = ObservationSpec("vector", (2, 3), "float64")
SCALAR = ObservationSpec("vector", (), "float32")
DISCRETE = ObservationSpec("discrete", (2,), "int64", (3, 4))
SPECS = {"camera": IMAGE, "zoom": SCALAR, "joints": VECTOR, "mode": DISCRETE}


def observation(*lead: int) -> dict[str, torch.Tensor]:
    return {
        "camera": torch.randint(0, 256, (*lead, 32, 32, 3), dtype=torch.uint8),
        "zoom": torch.randn(lead),
        "joints": torch.randn(*lead, 2, 3, dtype=torch.float64) * 100,
        "mode": torch.stack([torch.randint(0, 3, lead), torch.randint(0, 4, lead)], -1),
    }


@pytest.mark.parametrize("lead", [(5,), (2, 3), ()])
def test_dict_of_image_vectors_and_discrete(lead: tuple[int, ...]) -> None:
    """Any leading axes; the token is vector features, then image features."""
    encoder = MultiKeyEncoder(observation=SPECS, units=16, depth=2)
    assert encoder(observation(*lead)).shape == (*lead, encoder.output_size)
    assert encoder.output_size == 16 + 2 * 2 * 8


def test_vector_input_is_sorted_symlog_and_one_hot() -> None:
    """joints, mode, zoom: symlog of vectors, plain one-hots of classes."""
    encoder = MultiKeyEncoder(observation={k: v for k, v in SPECS.items() if k != "camera"}, units=8)
    obs = observation(4)
    one_hots = torch.cat([torch.eye(3)[obs["mode"][:, 0]], torch.eye(4)[obs["mode"][:, 1]]], -1)
    flat = torch.cat([symlog(obs["joints"].flatten(1).float()), one_hots, symlog(obs["zoom"][:, None])], -1)
    torch.testing.assert_close(encoder(obs), encoder.vector.mlp(flat))


def test_plain_mappings_serve_as_specs() -> None:
    """As a configuration holds them."""
    plain = {"state": {"kind": "vector", "shape": [4], "dtype": "float32", "classes": []}}
    encoder = MultiKeyEncoder(observation=plain, units=8)
    assert encoder({"state": torch.randn(2, 4)}).shape == (2, 8)


def test_images_are_joined_on_channels() -> None:
    specs = {"left": IMAGE, "right": ObservationSpec("image", (32, 32, 1), "uint8")}
    encoder = MultiKeyEncoder(observation=specs, depth=2)
    assert encoder.image.convs[0].in_channels == 4
    images = {key: torch.zeros(2, *spec.shape, dtype=torch.uint8) for key, spec in specs.items()}
    assert encoder(images).shape == (2, encoder.output_size)
    assert "joined" in encoder.wiring()["left"]


def test_dreamer_cnn_equals_its_definition() -> None:
    """x/255 - 0.5, then 5×5 convolution, 2×2 max-pool, RMSNorm over channels, SiLU; flattened place by place."""
    network = DreamerCNN(height=16, width=32, channels=3, depth=2)
    for norm in network.norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    image = torch.randint(0, 256, (2, 16, 32, 3), dtype=torch.uint8)
    x = image.permute(0, 3, 1, 2).float() / 255 - 0.5
    for conv, norm in zip(network.convs, network.norms, strict=True):
        x = nn.functional.max_pool2d(nn.functional.conv2d(x, conv.weight, conv.bias, padding=2), 2)
        x = x / (x.square().mean(1, keepdim=True) + 1e-4).sqrt() * norm.weight[:, None, None]
        x = nn.functional.silu(x)
    torch.testing.assert_close(network(image), x.permute(0, 2, 3, 1).flatten(1), rtol=1e-4, atol=1e-5)
    assert [conv.out_channels for conv in network.convs] == [4, 6, 8, 8]


@pytest.mark.parametrize("network", [DreamerCNN, ImpalaCNN, ResNetEncoder])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (96, 32)])
def test_image_networks_take_any_fitting_size(network: type[nn.Module], height: int, width: int) -> None:
    encoder = network(height=height, width=width, channels=1, depth=2)
    output = encoder(torch.randint(0, 256, (2, height, width, 1), dtype=torch.uint8))
    assert output.shape == (2, encoder.output_size)
    assert torch.isfinite(output).all()


def test_strided_cnn_has_the_same_shape() -> None:
    pooled = DreamerCNN(height=32, width=32, channels=3, depth=2)
    strided = DreamerCNN(height=32, width=32, channels=3, depth=2, strided=True)
    image = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    assert strided(image).shape == pooled(image).shape


@pytest.mark.parametrize("name", ["dreamer", "impala", "resnet", "transformer"])
def test_image_encoder_is_chosen_by_name(name: str) -> None:
    encoder = MultiKeyEncoder(observation={"camera": IMAGE}, depth=2, image_encoder=name)
    output = encoder({"camera": torch.zeros(3, 32, 32, 3, dtype=torch.uint8)})
    assert output.shape == (3, encoder.output_size)


def test_mlp_encoder_applies_symlog() -> None:
    encoder = MLPEncoder(input_size=3, units=8, layers=2)
    x = torch.tensor([[math.e - 1.0, 0.0, -1e6]])
    torch.testing.assert_close(encoder(x), encoder.mlp(symlog(x)))


def test_wiring_names_the_encoder_of_each_key() -> None:
    wiring = MultiKeyEncoder(observation=SPECS, units=8, depth=2).wiring()
    assert set(wiring) == set(SPECS)
    assert wiring["camera"].startswith("DreamerCNN: 32×32×3 uint8 is an image")
    assert "one-hot (7)" in wiring["mode"]
    assert "symlog → MLPEncoder" in wiring["joints"]


@pytest.mark.parametrize(
    ("specs", "settings", "message"),
    [
        ({"camera": ObservationSpec("image", (84, 84, 3), "uint8")}, {}, r"camera.*84×84.*environment.image_size=64"),
        ({"a": IMAGE, "b": ObservationSpec("image", (64, 64, 3), "uint8")}, {}, "different sizes"),
        ({"camera": IMAGE}, {"image_encoder": "dremer"}, "Did you mean 'dreamer'"),
        ({"camera": IMAGE}, {"image_encoder": "impala", "strided": True}, "strided=true belongs to"),
        ({"camera": ObservationSpec("image", (32, 32), "uint8")}, {}, r"\(height, width, channels\)"),
        ({"x": {"kind": "vectr", "shape": [1], "dtype": "float32"}}, {}, "observation.x.kind is 'vectr'"),
        ({}, {}, "no keys"),
    ],
)
def test_observations_that_do_not_fit_are_explained(specs: dict, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MultiKeyEncoder(observation=specs, **settings)


def test_autocast_runs_in_half_precision() -> None:
    encoder = MultiKeyEncoder(observation=SPECS, units=16, depth=2)
    obs = observation(2)
    with torch.autocast("cpu", torch.bfloat16):
        token = encoder(obs)
    assert token.dtype == torch.bfloat16
    torch.testing.assert_close(token.float(), encoder(obs), atol=0.1, rtol=0.1)


def test_a_transformer_looks_at_all_patches_and_knows_their_places() -> None:
    """Every token depends on every patch, and two patches that change places give another output."""
    encoder = VisionTransformer(height=32, width=32, channels=3, depth=2)
    assert encoder.output_size == 16 * 2
    image = torch.randint(0, 256, (1, 32, 32, 3), dtype=torch.uint8)
    other = image.clone()
    other[:, :8, :8] = 255 - other[:, :8, :8]
    change = (encoder(other) - encoder(image)).reshape(16, 2).abs().sum(-1)
    assert (change > 0).all()
    swapped = image.clone()
    swapped[:, :8, :8], swapped[:, 8:16, :8] = image[:, 8:16, :8], image[:, :8, :8]
    assert not torch.allclose(encoder(swapped), encoder(image))
