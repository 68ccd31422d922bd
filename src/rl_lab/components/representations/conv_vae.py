"""The variational autoencoder of World Models: V."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.representations.base import Encoding, Representation
from rl_lab.components.representations.images import ConvDecoder, ConvEncoder, ImageKeys, squared_error
from rl_lab.components.spaces import SpecLike

ACTIVE_KL = 0.05  # nats: a dimension of the code with less carries nothing


class ConvVAE(Representation):
    """q(z|x) = N(μ(x), σ²(x)), p(x|z) = decoder. 4,348,547 parameters with the published sizes."""

    def __init__(
        self, *, observation: Mapping[str, SpecLike], latent_size: int = 32, depth: int = 32,
        kl_tolerance: float = 0.5,  # nats for each latent dimension that cost nothing, counted on their sum
    ) -> None:  # fmt: skip
        super().__init__()
        self.keys, self.latent_size = ImageKeys(observation, learner="conv_vae"), latent_size
        self.free_nats = kl_tolerance * latent_size
        self.encoder = ConvEncoder(channels=self.keys.channels, depth=depth)
        self.mean = nn.Linear(self.encoder.output_size, latent_size)
        self.log_variance = nn.Linear(self.encoder.output_size, latent_size)
        self.decoder = ConvDecoder(latent_size=latent_size, channels=self.keys.channels, depth=depth)

    def encode(self, observation: Mapping[str, Tensor]) -> Encoding:
        image, lead = self.keys.join(observation)
        return Encoding(*(part.reshape(*lead, self.latent_size) for part in self._encode(image)))

    def _encode(self, image: Float[Tensor, "rows channels 64 64"]) -> Encoding:
        features = self.encoder(image)
        return Encoding(self.mean(features), self.log_variance(features))

    def decode(self, latent: Float[Tensor, "*lead latent"]) -> dict[str, Tensor]:
        image = self.decoder(latent.reshape(-1, self.latent_size))
        return self.keys.split(image, latent.shape[:-1])

    def losses(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """reconstruction = Σ (x - x')² over pixels; kl = max(KL[q || N(0, I)], free nats), a hinge on the sum over
        dimensions for each image: below it the KL has no gradient."""
        image, _ = self.keys.join(observation)
        self.decoder.begin_with(image)
        encoding = self._encode(image)
        reconstruction = squared_error(image, self.decoder(encoding.sample())).mean()
        divergence = gaussian_kl(encoding).sum(-1)
        kl = divergence.clamp(min=self.free_nats).mean()
        return {"total": reconstruction + kl, "reconstruction": reconstruction, "kl": divergence.mean()}

    def wiring(self) -> dict[str, str]:
        return self.keys.wiring("ConvVAE")


def gaussian_kl(encoding: Encoding) -> Float[Tensor, "*lead latent"]:
    """KL[N(μ, σ²) || N(0, 1)] of each dimension."""
    mean, log_variance = encoding
    return -0.5 * (1.0 + log_variance - mean.square() - torch.exp(log_variance))
