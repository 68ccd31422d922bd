"""An encoder for vectors: sines and cosines of learned frequencies, then an MLP."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.spaces import SpecLike, observation_specs
from rl_lab.errors import ConfigError
from rl_lab.nn.layers import MLP


class FourierEncoder(nn.Module):
    """concat(cos(Wx), sin(Wx)) of all vector keys, in sorted order, through `layers` layers."""

    def __init__(
        self, *, observation: Mapping[str, SpecLike], frequencies: int = 64, scale: float = 1.0, units: int = 256,
        layers: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.specs = observation_specs(observation)
        others = [key for key, spec in self.specs.items() if spec.kind != "vector"]
        if others:
            raise ConfigError(f"FourierEncoder takes vectors only; {', '.join(others)} is none. Use multi_key.")
        size = sum(spec.encoded_size for spec in self.specs.values())
        self.weight = nn.Parameter(scale * torch.randn(size, frequencies))
        self.mlp = MLP(2 * frequencies, units, layers)
        self.output_size = self.mlp.output_size  # other parts read it as @components.encoder.output_size

    def forward(self, observation: Mapping[str, Tensor]) -> Float[Tensor, "*lead output_size"]:
        parts = [observation[key].float().flatten(-len(spec.shape)) for key, spec in self.specs.items()]
        phase = torch.cat(parts, -1) @ self.weight
        return self.mlp(torch.cat([phase.cos(), phase.sin()], -1))

    def wiring(self) -> dict[str, str]:
        """What the printed plan says of each key."""
        return {key: f"FourierEncoder: {self.weight.shape[1]} frequencies" for key in self.specs}
