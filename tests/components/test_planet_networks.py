"""The image networks of PlaNet, Dreamer v1 and v2, their unit normals and five-bit images."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.decoders import MLPDecoder, MultiKeyDecoder
from rl_lab.components.encoders import MultiKeyEncoder, QuantizedImages
from rl_lab.components.predictors import RewardPredictor
from rl_lab.errors import ConfigError
from rl_lab.specs import ObservationSpec

IMAGE = {"image": ObservationSpec("image", (64, 64, 3), "uint8")}


def image_encoder(**settings) -> MultiKeyEncoder:
    return MultiKeyEncoder(observation=IMAGE, image_encoder="planet", **{"depth": 32, "style": "planet", **settings})


def image_decoder(**settings) -> MultiKeyDecoder:
    sizes = {"deter": 200, "stoch_size": 30, "depth": 32, "style": "planet"}
    return MultiKeyDecoder(observation=IMAGE, image_decoder="planet", unit_normal=True, **(sizes | settings))


def pictures(*lead: int) -> torch.Tensor:
    return torch.randint(0, 256, (*lead, 64, 64, 3), dtype=torch.uint8)


@pytest.mark.parametrize(("depth", "style", "size"), [(32, "planet", 1024), (48, "dreamer_v2", 1536)])
def test_encoder_is_four_valid_convolutions(depth: int, style: str, size: int) -> None:
    """Kernel 4, stride 2, no padding, depth·(1, 2, 4, 8) channels, an activation after each: counted and computed."""
    encoder, image = image_encoder(depth=depth, style=style), pictures(2, 3)
    x = image.flatten(0, 1).permute(0, 3, 1, 2).float() / 255.0 - 0.5
    activation = F.relu if style == "planet" else F.elu
    for conv in encoder.image.convs:
        x = activation(F.conv2d(x, conv.weight, conv.bias, stride=2))
    features = encoder({"image": image})
    assert encoder.output_size == size
    torch.testing.assert_close(features, x.flatten(1).reshape(2, 3, size))
    widths = [3, depth, 2 * depth, 4 * depth, 8 * depth]
    count = sum(16 * i * o + o for i, o in itertools.pairwise(widths))
    assert sum(p.numel() for p in encoder.parameters()) == count


def test_decoder_grows_from_one_pixel() -> None:
    """A linear layer to 1×1×1024, kernels 5, 5, 6, 6 of stride 2, activations between: counted and computed."""
    decoder = image_decoder()
    deter, stoch = torch.randn(2, 200), torch.randn(2, 30)
    x = F.linear(torch.cat([deter, stoch], -1), decoder.image.dense.weight, decoder.image.dense.bias)[:, :, None, None]
    sizes = []
    for number, conv in enumerate(decoder.image.convs):
        x = F.conv_transpose2d(F.relu(x) if number else x, conv.weight, conv.bias, stride=2)
        sizes.append(x.shape[-1])
    assert sizes == [5, 13, 30, 64]
    torch.testing.assert_close(decoder(deter, stoch)["image"], x.permute(0, 2, 3, 1))
    shapes = [(1024, 128, 25), (128, 64, 25), (64, 32, 36), (32, 3, 36)]
    count = 231 * 1024 + sum(i * o * area + o for i, o, area in shapes)
    assert sum(p.numel() for p in decoder.parameters()) == count


def test_image_loss_is_a_unit_normals() -> None:
    """-log N(x | mean, 1) up to its constant: summed over pixels, with the 1/2, for images in -0.5..0.5."""
    decoder, image = image_decoder(), pictures(2, 3)
    predictions = decoder(torch.randn(2, 3, 200), torch.randn(2, 3, 30))
    normal = torch.distributions.Normal(predictions["image"], 1.0)
    constant = 64 * 64 * 3 * 0.5 * torch.log(torch.tensor(2.0 * torch.pi))
    expected = -normal.log_prob(image.float() / 255.0 - 0.5).sum((-3, -2, -1)) - constant
    torch.testing.assert_close(decoder.loss(predictions, {"image": image})["image"], expected, rtol=1e-4, atol=0.05)
    perfect = {"image": image.float() / 255.0 - 0.5}
    assert torch.equal(decoder.decode(perfect)["image"], image)


def test_vector_and_reward_losses_are_unit_normals() -> None:
    """Half the squared error, on values as they are."""
    spec = {"vector": ObservationSpec("vector", (3,), "float32")}
    decoder = MLPDecoder(observation=spec, feature_size=4, use_symlog=False, unit_normal=True, style="dreamer_v2")
    target = 10.0 * torch.randn(5, 3)
    prediction = decoder(torch.randn(5, 4))
    expected = 0.5 * (prediction["vector"] - target).square().sum(-1)
    torch.testing.assert_close(decoder.loss(prediction, {"vector": target})["vector"], expected)
    torch.testing.assert_close(decoder.decode({"vector": target})["vector"], target)
    reward = RewardPredictor(feature_size=4, units=8, distribution="unit_normal", outscale=1.0, style="planet")
    output, wanted = reward(torch.randn(5, 4)), torch.randn(5)
    torch.testing.assert_close(reward.loss(output, wanted), 0.5 * (output[:, 0] - wanted).square())
    torch.testing.assert_close(reward.mean(output), output[:, 0])


def test_five_bit_images() -> None:
    """floor(x / 8) / 32 + U(0, 1/32) - 0.5; what is no image is left alone."""
    observation = {"image": pictures(4), "vector": torch.randn(4, 2)}
    torch.manual_seed(3)
    found = QuantizedImages()(observation)
    rest = (found["image"] + 0.5) - torch.floor(observation["image"].float() / 8.0) / 32.0
    assert rest.min() >= -1e-6
    assert rest.max() <= 1.0 / 32.0 + 1e-6
    assert rest.std().item() == pytest.approx(1.0 / 32.0 / 12.0**0.5, rel=0.02)
    assert found["vector"] is observation["vector"]
    encoder, decoder = image_encoder(), image_decoder()
    assert encoder(found | {"vector": None}).shape == (4, 1024)
    assert decoder.loss({"image": found["image"]}, {"image": found["image"]})["image"].abs().max() == 0.0


def test_other_image_sizes_are_refused() -> None:
    """The kernels fit 64×64 only, and a norm has no place between them."""
    wide = {"image": ObservationSpec("image", (96, 96, 3), "uint8")}
    with pytest.raises(ConfigError, match="image_size=64"):
        MultiKeyEncoder(observation=wide, image_encoder="planet", style="planet")
    with pytest.raises(ConfigError, match="64×64"):
        MultiKeyDecoder(observation=wide, deter=8, stoch_size=2, image_decoder="planet", style="planet")
    with pytest.raises(ConfigError, match="norm=rms"):
        image_encoder(style="dreamer_v3")


def test_half_images_only_round() -> None:
    """Convolutions in bfloat16 inside a model in float32: its inputs, outputs and gradients stay float32."""
    results = []
    for half in (False, True):
        torch.manual_seed(0)
        encoder, decoder = image_encoder(depth=4, half_images=half), image_decoder(deter=128, depth=4, half_images=half)
        prediction = decoder(encoder({"image": pictures(3)}), torch.ones(3, 30))["image"]
        prediction.square().sum().backward()
        assert prediction.dtype == torch.float32
        results.append((prediction.detach(), encoder.image.convs[0].weight.grad))
    for plain, half in zip(*results, strict=True):
        assert half.dtype == torch.float32
        assert not torch.equal(half, plain)
        assert (half - plain).norm() < 0.1 * plain.norm()
