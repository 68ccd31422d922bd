"""A contrastive learner in the manner of SimCLR (Chen et al., 2020): two views of one image attract each other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.representations.base import Encoding, Representation, exact
from rl_lab.components.representations.images import SIZE, ConvDecoder, ConvEncoder, ImageKeys, squared_error
from rl_lab.components.spaces import SpecLike
from rl_lab.losses.contrastive import nt_xent


class Contrastive(Representation):
    """The code must tell an image from the others of its batch, whatever shift and light it is seen in.

    Nothing has to be drawn for that. A decoder learns beside it, from latents without gradient, so that people can look
    at what the code holds.
    """

    def __init__(
        self, *, observation: Mapping[str, SpecLike], latent_size: int = 32, depth: int = 32, projection: int = 64,
        temperature: float = 0.1, shift: int = 4,  # pixels
        light: float = 0.2,  # contrast and brightness vary by up to this share
    ) -> None:  # fmt: skip
        super().__init__()
        self.keys, self.latent_size = ImageKeys(observation, learner="contrastive"), latent_size
        self.temperature, self.shift, self.light = temperature, shift, light
        self.encoder = ConvEncoder(channels=self.keys.channels, depth=depth)
        self.code = nn.Linear(self.encoder.output_size, latent_size)
        self.projector = nn.Sequential(
            nn.Linear(latent_size, 4 * projection), nn.ReLU(), nn.Linear(4 * projection, projection)
        )
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
        first, second = (self.projector(self.code(self.encoder(self._view(image)))) for _ in range(2))
        contrast = nt_xent(first, second, self.temperature)
        with torch.no_grad():
            latent = self.code(self.encoder(image))
        reconstruction = squared_error(image, self.decoder(latent)).mean()
        return {"total": contrast + reconstruction, "contrast": contrast, "reconstruction": reconstruction}

    def _view(self, image: Float[Tensor, "rows channels 64 64"]) -> Float[Tensor, "rows channels 64 64"]:
        """The images shifted by up to `shift` pixels, their edges repeated, with other contrast and brightness."""
        rows, device = len(image), image.device
        padded = F.pad(image, [self.shift] * 4, mode="replicate")
        offset = torch.randint(2 * self.shift + 1, (2, rows, 1, 1), device=device)
        pixel = torch.arange(SIZE, device=device)
        lines, columns = offset[0] + pixel[:, None], offset[1] + pixel
        shifted = padded[torch.arange(rows, device=device)[:, None, None], :, lines, columns].permute(0, 3, 1, 2)
        contrast, brightness = self.light * (2.0 * torch.rand(2, rows, 1, 1, 1, device=device) - 1.0)
        return (shifted * (1.0 + contrast) + brightness).clamp(0.0, 1.0)

    def wiring(self) -> dict[str, str]:
        return self.keys.wiring("Contrastive")
