"""One decoder for a dict of observations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.decoders.base import ObservationModel
from rl_lab.components.decoders.cnn import SHRINKS_BY, DreamerCNNDecoder
from rl_lab.components.decoders.planet_cnn import PlanetCNNDecoder
from rl_lab.components.spaces import SpecLike, observation_specs, split_keys, stacked_image_shape
from rl_lab.components.world_models.base import LatentState
from rl_lab.errors import ConfigError, nearest
from rl_lab.nn.distributions import at_least_float32, symexp, symlog
from rl_lab.nn.layers import MLP, Linear
from rl_lab.nn.styles import StyleLike, layer_style
from rl_lab.specs import ObservationSpec

IMAGE_DECODERS = ("dreamer", "planet")


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


class MultiKeyDecoder(ObservationModel):
    """All images from one image decoder, all other keys from one MLP. The features are concat(deter, flat stoch).

    Predictions by key: images 0..1 (image_decoder=planet: -0.5..0.5) [*lead, height, width, channels]; vectors in
    symlog space [*lead, size]; logits of discrete keys [*lead, summed classes].
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
        unit_normal: bool = False,
        vector_std: float = 1.0,
        image_decoder: str = "dreamer",
        style: StyleLike = None,
        image_style: StyleLike = None,  # where it is not that of the other layers; only image_decoder=planet has styles
        half_images: bool = False,  # convolutions in bfloat16, whatever the precision of the rest
    ) -> None:
        super().__init__()
        self.half_images = half_images
        self.specs = observation_specs(observation)
        self.images, vectors = split_keys(self.specs)
        self.vector: MLPDecoder | None = None
        self.image: DreamerCNNDecoder | PlanetCNNDecoder | None = None
        if vectors:
            self.vector = MLPDecoder(
                observation=vectors, feature_size=deter + stoch_size, units=units, layers=layers,
                outscale=outscale, use_symlog=use_symlog, unit_normal=unit_normal, std=vector_std,
                style=style,
            )  # fmt: skip
        if self.images:
            self.image = _image_decoder(
                self.images, image_decoder, deter=deter, stoch_size=stoch_size, depth=depth, units=units,
                blocks=blocks, style=style if image_style is None else image_style,
            )  # fmt: skip

    def forward(
        self, deter: Float[Tensor, "*lead deter"], stoch: Float[Tensor, "*lead stoch"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        predictions: dict[str, Tensor] = {}
        if self.vector is not None:
            predictions.update(self.vector(torch.cat([deter, stoch], -1)))
        if self.image is not None:
            channels = [spec.shape[2] for spec in self.images.values()]
            predictions.update(zip(self.images, self._to_image(deter, stoch).split(channels, -1), strict=True))
        return predictions

    def _to_image(self, deter: Tensor, stoch: Tensor) -> Tensor:
        assert self.image is not None
        if not self.half_images:
            return self.image(deter, stoch)
        with torch.autocast(deter.device.type, torch.bfloat16):
            return self.image(deter, stoch)  # in float32

    def losses(
        self, states: LatentState, embed: Float[Tensor, "*lead embed"], observation: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "*lead"]]:
        """-ln p(observation | state) of each key, without constants. The encoder's own output is not looked at."""
        if not (isinstance(self.image, DreamerCNNDecoder) and len(self.images) == 1) or self.half_images:
            return self.loss(self(states.deter, states.stoch), observation)
        losses = {} if self.vector is None else self.vector.loss(self.vector(states.features), observation)
        (key,) = self.images
        return losses | {key: self.image.image_loss(states.deter, states.stoch, observation[key])}

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
            assert self.image is not None
            observation[key] = self.image.decode(predictions[key])
        return observation

    def wiring(self) -> dict[str, str]:
        """For people: what predicts each key, and with which loss."""
        losses = {
            "image": f"{type(self.image).__name__}: squared error of pixels",
            "vector": "MLPDecoder: squared error in symlog space",
            "discrete": "MLPDecoder: cross-entropy",
        }
        if self.vector is not None and not self.vector.use_symlog:
            losses["vector"] = "MLPDecoder: squared error"
        return {key: losses[spec.kind] for key, spec in self.specs.items()}


def _image_decoder(
    images: Mapping[str, ObservationSpec], name: str, *, deter: int, stoch_size: int, depth: int, units: int,
    blocks: int, style: StyleLike,
) -> DreamerCNNDecoder | PlanetCNNDecoder:  # fmt: skip
    if name not in IMAGE_DECODERS:
        raise ConfigError(f"image_decoder='{name}' does not exist.{nearest(name, IMAGE_DECODERS)}")
    height, width, channels = stacked_image_shape(images, multiple=SHRINKS_BY)
    if name == "planet":
        return PlanetCNNDecoder(
            deter=deter, stoch_size=stoch_size, height=height, width=width, channels=channels, depth=depth, style=style
        )
    return DreamerCNNDecoder(
        deter=deter, stoch_size=stoch_size, height=height, width=width, channels=channels, depth=depth, units=units,
        blocks=blocks,
    )  # fmt: skip
