"""A plain autoencoder with the networks of the VAE: no noise, no prior."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.representations.base import Encoding, Representation, exact
from rl_lab.components.representations.images import ConvDecoder, ConvEncoder, ImageKeys, squared_error
from rl_lab.components.spaces import SpecLike


class Autoencoder(Representation):
    """The code of an image is a point, and the only loss is the reconstruction."""

    def __init__(self, *, observation: Mapping[str, SpecLike], latent_size: int = 32, depth: int = 32) -> None:
        super().__init__()
        self.keys, self.latent_size = ImageKeys(observation, learner="autoencoder"), latent_size
        self.encoder = ConvEncoder(channels=self.keys.channels, depth=depth)
        self.code = nn.Linear(self.encoder.output_size, latent_size)
        self.decoder = ConvDecoder(latent_size=latent_size, channels=self.keys.channels, depth=depth)

    def encode(self, observation: Mapping[str, Tensor]) -> Encoding:
        image, lead = self.keys.join(observation)
        return exact(self.code(self.encoder(image)).reshape(*lead, self.latent_size))

    def decode(self, latent: Float[Tensor, "*lead latent"]) -> dict[str, Tensor]:
        image = self.decoder(latent.reshape(-1, self.latent_size))
        return self.keys.split(image, latent.shape[:-1])

    def losses(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        image, _ = self.keys.join(observation)
        self.decoder.begin_with(image)
        reconstruction = squared_error(image, self.decoder(self.code(self.encoder(image)))).mean()
        return {"total": reconstruction, "reconstruction": reconstruction}

    def wiring(self) -> dict[str, str]:
        return self.keys.wiring("Autoencoder")
