"""The decoder of vectors and discrete keys."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.spaces import SpecLike, observation_specs
from rl_lab.nn.layers import MLP, Linear
from rl_lab.nn.math import at_least_float32, symexp, symlog
from rl_lab.nn.styles import StyleLike, layer_style
from rl_lab.specs import ObservationSpec


class MLPDecoder(nn.Module):
    """`layers` times Linear → norm → activation, then one Linear per key.

    Vector keys predict symlog values, with the squared error summed over the entries (no 1/2); discrete keys predict
    logits, with the cross-entropies summed over the components. With `unit_normal` the squared error is halved: it then
    is -log N(x | prediction, 1) without its constant, as PlaNet, Dreamer v1 and v2 have it; `std` is the deviation of
    that normal where it is not 1.
    """

    def __init__(
        self, *, observation: Mapping[str, SpecLike], feature_size: int, units: int = 256, layers: int = 3,
        outscale: float = 1.0, use_symlog: bool = True, unit_normal: bool = False, std: float = 1.0,
        style: StyleLike = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.specs = observation_specs(observation)
        self.use_symlog, self.factor = use_symlog, (0.5 if unit_normal else 1.0) / std**2
        look = layer_style(style)
        self.mlp = MLP(feature_size, units, layers, style=look)
        sizes = {key: spec.encoded_size for key, spec in self.specs.items()}
        # A list, not a dict of modules: observation keys may hold dots and other characters that module names may not.
        self.outputs = nn.ModuleList(
            Linear(self.mlp.output_size, size, outscale=outscale, init=look.output_init) for size in sizes.values()
        )

    def forward(self, features: Float[Tensor, "*lead features"]) -> dict[str, Float[Tensor, "*lead size"]]:
        x = self.mlp(features)
        return {key: at_least_float32(output(x)) for key, output in zip(self.specs, self.outputs, strict=True)}

    def loss(self, predictions: Mapping[str, Tensor], observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Per key, [*lead]."""
        return {key: self._loss(predictions[key], observation[key], spec) for key, spec in self.specs.items()}

    def decode(self, predictions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the units and shapes of the observation."""
        return {key: self._decode(predictions[key], spec) for key, spec in self.specs.items()}

    def _loss(self, prediction: Tensor, target: Tensor, spec: ObservationSpec) -> Tensor:
        lead = prediction.shape[:-1]
        if spec.kind == "vector":
            wanted = target.reshape(prediction.shape).to(prediction.dtype)
            wanted = symlog(wanted) if self.use_symlog else wanted
            return self.factor * (prediction - wanted).square().sum(-1)
        indices = target.reshape(*lead, len(spec.classes)).long().unbind(-1)
        terms = [
            torch.logsumexp(logits, -1) - logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            for logits, index in zip(prediction.split(list(spec.classes), -1), indices, strict=True)
        ]
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)

    def _decode(self, prediction: Tensor, spec: ObservationSpec) -> Tensor:
        if spec.kind == "vector":
            values = symexp(prediction) if self.use_symlog else prediction
        else:
            values = torch.stack([part.argmax(-1) for part in prediction.split(list(spec.classes), -1)], -1)
        return values.reshape(*prediction.shape[:-1], *spec.shape)
