"""No learner at all: vectors are their own latents."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.representations.base import Encoding, Representation, exact
from rl_lab.components.spaces import SpecLike, observation_specs
from rl_lab.errors import ConfigError


class Identity(Representation):
    """All vector keys, flat and end to end, as they are. With it M learns the dynamics of the observation itself."""

    trains = False

    def __init__(self, *, observation: Mapping[str, SpecLike]) -> None:
        super().__init__()
        self.specs = observation_specs(observation)
        others = [key for key, spec in self.specs.items() if spec.kind != "vector"]
        if others:
            raise ConfigError(
                f"identity takes vectors only; {', '.join(others)} is none. For images take "
                "components/representations@components.representation=conv_vae, or set environment.observation=state."
            )
        self.sizes = [spec.encoded_size for spec in self.specs.values()]
        self.latent_size = sum(self.sizes)

    def encode(self, observation: Mapping[str, Tensor]) -> Encoding:
        parts = [observation[key].float().flatten(-len(spec.shape)) for key, spec in self.specs.items()]
        return exact(torch.cat(parts, -1))

    def decode(self, latent: Float[Tensor, "*lead latent"]) -> dict[str, Tensor]:
        parts = zip(self.specs.items(), latent.split(self.sizes, -1), strict=True)
        return {key: part.reshape(*latent.shape[:-1], *spec.shape) for (key, spec), part in parts}

    def losses(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        raise ConfigError("identity has nothing to train: take the phase that trains V (options.model: V) out.")

    def wiring(self) -> dict[str, str]:
        return {key: f"as it is: {spec.encoded_size} numbers" for key, spec in self.specs.items()}
