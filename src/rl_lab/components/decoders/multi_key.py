"""One decoder for a dict of observations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.decoders.cnn import SHRINKS_BY, DreamerCNNDecoder
from rl_lab.components.decoders.mlp import MLPDecoder
from rl_lab.components.representation_learners.base import LatentState
from rl_lab.components.spaces import SpecLike, observation_specs, split_keys, stacked_image_shape


class MultiKeyDecoder(nn.Module):
    """All images from one image decoder, all other keys from one MLP. The features are concat(deter, flat stoch).

    Predictions by key: images 0..1 [*lead, height, width, channels]; vectors in symlog space [*lead, size]; logits of
    discrete keys [*lead, summed classes].
    """

    def __init__(
        self,
        *,
        observation: Mapping[str, SpecLike],
        deter: int,
        stoch_size: int,
        units: int = 256,
        layers: int = 3,
        depth: int = 16,
        blocks: int = 8,
        outscale: float = 1.0,
        use_symlog: bool = True,
    ) -> None:
        super().__init__()
        self.specs = observation_specs(observation)
        self.images, vectors = split_keys(self.specs)
        self.vector: MLPDecoder | None = None
        self.image: DreamerCNNDecoder | None = None
        if vectors:
            self.vector = MLPDecoder(
                observation=vectors, feature_size=deter + stoch_size, units=units, layers=layers,
                outscale=outscale, use_symlog=use_symlog,
            )  # fmt: skip
        if self.images:
            height, width, channels = stacked_image_shape(self.images, multiple=SHRINKS_BY)
            self.image = DreamerCNNDecoder(
                deter=deter, stoch_size=stoch_size, height=height, width=width, channels=channels,
                depth=depth, units=units, blocks=blocks,
            )  # fmt: skip

    def forward(
        self, deter: Float[Tensor, "*lead deter"], stoch: Float[Tensor, "*lead stoch"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        predictions: dict[str, Tensor] = {}
        if self.vector is not None:
            predictions.update(self.vector(torch.cat([deter, stoch], -1)))
        if self.image is not None:
            channels = [spec.shape[2] for spec in self.images.values()]
            predictions.update(zip(self.images, self.image(deter, stoch).split(channels, -1), strict=True))
        return predictions

    def losses(
        self, states: LatentState, embed: Float[Tensor, "*lead embed"], observation: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "*lead"]]:
        """What the states fail to explain of each key. The encoder's own output is not looked at."""
        return self.loss(self(states.deter, states.stoch), observation)

    def reconstruct(self, states: LatentState) -> dict[str, Tensor]:
        """The observations that the states stand for, in their own units."""
        return self.decode(self(states.deter, states.stoch))

    def loss(self, predictions: Mapping[str, Tensor], observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Per key [*lead]: summed inside an observation, not averaged over batch and time."""
        losses: dict[str, Tensor] = {}
        if self.vector is not None:
            losses.update(self.vector.loss(predictions, observation))
        if self.image is not None:
            losses.update({key: self.image.loss(predictions[key], observation[key]) for key in self.images})
        return losses

    def decode(self, predictions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the units of the observation: images uint8 0..255, vectors without symlog, class numbers."""
        observation: dict[str, Tensor] = {}
        if self.vector is not None:
            observation.update(self.vector.decode(predictions))
        for key in self.images:
            observation[key] = (predictions[key] * 255.0).round().clamp(0.0, 255.0).to(torch.uint8)
        return observation

    def wiring(self) -> dict[str, str]:
        """For people: what predicts each key, and with which loss."""
        losses = {
            "image": "DreamerCNNDecoder: squared error of pixels in 0..1",
            "vector": "MLPDecoder: squared error in symlog space",
            "discrete": "MLPDecoder: cross-entropy",
        }
        if self.vector is not None and not self.vector.use_symlog:
            losses["vector"] = "MLPDecoder: squared error"
        return {key: losses[spec.kind] for key, spec in self.specs.items()}
