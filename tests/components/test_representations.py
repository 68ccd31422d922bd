"""V and what may stand in its place: sizes, losses, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.representations import Autoencoder, Contrastive, ConvVAE, Identity, Representation
from rl_lab.components.representations.base import Encoding
from rl_lab.components.representations.conv_vae import gaussian_kl
from rl_lab.errors import ConfigError
from rl_lab.losses.contrastive import nt_xent
from rl_lab.specs import ObservationSpec

IMAGE = {"image": ObservationSpec("image", (64, 64, 3), "uint8")}
VECTORS = {"b": ObservationSpec("vector", (2, 2), "float32"), "a": ObservationSpec("vector", (3,), "float32")}


def pictures(*lead: int) -> dict[str, torch.Tensor]:
    return {"image": torch.randint(0, 256, (*lead, 64, 64, 3), dtype=torch.uint8)}


def test_the_vae_has_the_published_size_and_shapes() -> None:
    """4,348,547 parameters; 64 → 31 → 14 → 6 → 2 pixels, and back over 5, 13 and 30."""
    vae = ConvVAE(observation=IMAGE)
    assert sum(p.numel() for p in vae.parameters()) == 4_348_547
    x, sizes = torch.zeros(1, 3, 64, 64), []
    for layer in vae.encoder:
        x = layer(x)
        if isinstance(layer, torch.nn.Conv2d):
            sizes.append(x.shape[-1])
    x = vae.decoder.dense(torch.zeros(1, 32))[:, :, None, None]
    for layer in [*vae.decoder.convs, vae.decoder.last]:
        x = layer(x)
        if isinstance(layer, torch.nn.ConvTranspose2d):
            sizes.append(x.shape[-1])
    assert sizes == [31, 14, 6, 2, 5, 13, 30, 64]


def test_a_decoder_begins_with_the_mean_colour_of_the_first_images() -> None:
    """Once: what was learned since, or loaded, stays."""
    model = Autoencoder(observation=IMAGE, depth=2, latent_size=5)
    white = {"image": torch.full((4, 64, 64, 3), 250, dtype=torch.uint8)}
    assert model.losses(white)["reconstruction"] < 64 * 64 * 3 * 0.02**2
    bias = model.decoder.last.bias.clone()
    model.losses(pictures(4))
    torch.testing.assert_close(model.decoder.last.bias, bias)
    loaded = Autoencoder(observation=IMAGE, depth=2, latent_size=5)
    loaded.load_state_dict(model.state_dict())
    loaded.losses(pictures(4))
    torch.testing.assert_close(loaded.decoder.last.bias, bias)


def test_the_loss_of_the_vae_is_a_sum_over_pixels_and_a_hinge_on_the_whole_kl() -> None:
    """Against the formula written out; below the tolerance the KL has no gradient."""
    vae = ConvVAE(observation=IMAGE, depth=2, latent_size=4, kl_tolerance=1e6)
    seen = pictures(3)
    torch.manual_seed(0)
    losses = vae.losses(seen)
    torch.manual_seed(0)
    encoding = vae.encode(seen)
    shown = vae.decode(encoding.mean + (0.5 * encoding.log_variance).exp() * torch.randn(3, 4))["image"]
    truth = seen["image"].float() / 255
    torch.testing.assert_close(losses["reconstruction"], ((truth - shown) ** 2).sum((1, 2, 3)).mean())
    torch.testing.assert_close(losses["total"], losses["reconstruction"] + 4e6)
    (losses["total"] - losses["reconstruction"]).backward()
    assert all(p.grad is None or not p.grad.any() for p in vae.parameters())
    kl = gaussian_kl(Encoding(torch.tensor([2.0]), torch.tensor([0.0])))
    torch.testing.assert_close(kl, torch.tensor([2.0]))  # μ² / 2


@pytest.mark.parametrize("learner", [ConvVAE, Autoencoder, Contrastive])
def test_image_learners_share_one_interface(learner: type[Representation]) -> None:
    """Any leading dimensions; images come back from 0 to 1; the loss reaches every parameter."""
    model = learner(observation=IMAGE, depth=2, latent_size=5)
    encoding = model.encode(pictures(2, 3))
    assert encoding.mean.shape == encoding.log_variance.shape == (2, 3, 5)
    shown = model.decode(encoding.mean)["image"]
    assert shown.shape == (2, 3, 64, 64, 3)
    assert 0.0 <= shown.min() <= shown.max() <= 1.0
    model.losses(pictures(6))["total"].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_contrastive_code_is_not_shaped_by_its_decoder() -> None:
    """The decoder only looks: its error does not reach the encoder."""
    model = Contrastive(observation=IMAGE, depth=2, latent_size=5)
    model.losses(pictures(4))["reconstruction"].backward()
    assert all(p.grad is None for p in [*model.encoder.parameters(), *model.code.parameters()])
    assert all(p.grad is not None for p in model.decoder.parameters())


def test_nt_xent_against_a_loop() -> None:
    """Each vector against its partner among all others, by cosine."""
    first, second = torch.randn(2, 3, 4)
    vectors = [*first, *second]
    expected = []
    for i, anchor in enumerate(vectors):
        scores = [torch.cosine_similarity(anchor, other, dim=0) / 0.5 for j, other in enumerate(vectors) if j != i]
        partner = torch.cosine_similarity(anchor, vectors[(i + 3) % 6], dim=0) / 0.5
        expected.append(torch.logsumexp(torch.stack(scores), 0) - partner)
    torch.testing.assert_close(nt_xent(first, second, 0.5), torch.stack(expected).mean())


def test_identity_gives_vectors_back() -> None:
    """In sorted order of the keys, and without noise to speak of."""
    model = Identity(observation=VECTORS)
    seen = {"a": torch.randn(4, 3), "b": torch.randn(4, 2, 2)}
    encoding = model.encode(seen)
    assert model.latent_size == 7
    torch.testing.assert_close(encoding.sample(), torch.cat([seen["a"], seen["b"].flatten(1)], 1), atol=1e-3, rtol=0)
    for key, value in model.decode(encoding.mean).items():
        torch.testing.assert_close(value, seen[key])


def test_learners_say_which_one_fits_instead() -> None:
    """Vectors for a VAE, images for identity, images of another size."""
    with pytest.raises(ConfigError, match="representation=identity"):
        ConvVAE(observation=VECTORS)
    with pytest.raises(ConfigError, match="representation=conv_vae"):
        Identity(observation=IMAGE)
    with pytest.raises(ConfigError, match=r"84×84.*environment.image_size=64"):
        Autoencoder(observation={"image": ObservationSpec("image", (84, 84, 3), "uint8")})
