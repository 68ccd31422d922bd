"""One encoder for a dict of observations: each key gets what its space calls for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.encoders.cnn import DreamerCNN
from rl_lab.components.encoders.impala import ImpalaCNN
from rl_lab.components.encoders.nature import NatureCNN
from rl_lab.components.encoders.planet_cnn import PlanetCNN
from rl_lab.components.encoders.resnet import ResNetEncoder
from rl_lab.components.encoders.transformer import VisionTransformer
from rl_lab.components.observations import flat_observation
from rl_lab.components.spaces import SpecLike, observation_specs, split_keys, stacked_image_shape
from rl_lab.errors import ConfigError, nearest
from rl_lab.nn.distributions import symlog
from rl_lab.nn.layers import MLP
from rl_lab.nn.styles import StyleLike, layer_style
from rl_lab.specs import ObservationSpec

ImageEncoder = DreamerCNN | ImpalaCNN | NatureCNN | PlanetCNN | ResNetEncoder | VisionTransformer
IMAGE_ENCODERS: dict[str, type[ImageEncoder]] = {
    "dreamer": DreamerCNN,
    "impala": ImpalaCNN,
    "nature": NatureCNN,
    "planet": PlanetCNN,
    "resnet": ResNetEncoder,
    "transformer": VisionTransformer,
}


class MLPEncoder(nn.Module):
    """symlog, then `layers` times Linear → norm → activation."""

    def __init__(
        self, *, input_size: int, units: int = 256, layers: int = 3, use_symlog: bool = True, style: StyleLike = None
    ) -> None:
        super().__init__()
        self.use_symlog = use_symlog
        self.mlp = MLP(input_size, units, layers, style=layer_style(style))
        self.output_size = self.mlp.output_size

    def forward(self, vector: Float[Tensor, "*lead input_size"]) -> Float[Tensor, "*lead output_size"]:
        return self.mlp(symlog(vector.float()) if self.use_symlog else vector)


class MultiKeyEncoder(nn.Module):
    """All images, concatenated on channels, through one image network; all other keys, concatenated, through one MLP.

    Vectors pass through symlog first, discrete keys become one-hots; keys are taken in sorted order. The output is
    concat(vector features, image features).
    """

    def __init__(
        self,
        *,
        observation: Mapping[str, SpecLike],
        units: int = 256,
        layers: int = 3,
        depth: int = 16,
        image_encoder: str = "dreamer",
        strided: bool = False,
        use_symlog: bool = True,
        style: StyleLike = None,
        image_style: StyleLike = None,  # where it is not that of the other layers; only image_encoder=planet has styles
        half_images: bool = False,  # convolutions in bfloat16, whatever the precision of the rest
    ) -> None:
        super().__init__()
        self.specs = observation_specs(observation)
        self.images, self.vectors = split_keys(self.specs)
        self.use_symlog, self.half_images = use_symlog, half_images
        self.vector: MLPEncoder | None = None  # without layers, vectors are features as they are
        self.image: nn.Module | None = None
        self.output_size = 0
        if self.vectors:
            size = sum(spec.encoded_size for spec in self.vectors.values())
            if layers:
                self.vector = MLPEncoder(input_size=size, units=units, layers=layers, use_symlog=False, style=style)
            self.output_size += units if layers else size
        if self.images:
            self.image = image = _image_encoder(
                self.images, image_encoder, depth=depth, strided=strided,
                style=style if image_style is None else image_style,
            )  # fmt: skip
            self.output_size += image.output_size

    def forward(self, observation: Mapping[str, Tensor]) -> Float[Tensor, "*lead output_size"]:
        """`observation[key]` is [*lead, *shape], as stored: uint8 images, integer classes, numeric vectors."""
        features = []
        if self.vectors:
            parts = [self._flat(observation[key], spec) for key, spec in self.vectors.items()]
            vector = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            features.append(vector if self.vector is None else self.vector(vector))
        if self.image is not None:
            images = [observation[key] for key in self.images]
            features.append(self._of_image(images[0] if len(images) == 1 else torch.cat(images, -1)))
        return features[0] if len(features) == 1 else torch.cat(features, -1)

    def _of_image(self, image: Tensor) -> Tensor:
        assert self.image is not None
        if not self.half_images:
            return self.image(image)
        with torch.autocast(image.device.type, torch.bfloat16):
            return self.image(image).float()

    def _flat(self, value: Tensor, spec: ObservationSpec) -> Tensor:
        if spec.kind != "vector":
            return flat_observation(value, spec)
        flat = value.float().flatten(value.ndim - len(spec.shape)) if spec.shape else value.float().unsqueeze(-1)
        return symlog(flat) if self.use_symlog else flat

    def wiring(self) -> dict[str, str]:
        """For people: what each key goes through, and why."""
        text = {}
        network = "as it is" if self.vector is None else "MLPEncoder"
        for key, spec in self.specs.items():
            shape = "×".join(map(str, spec.shape)) or "scalar"
            if spec.kind == "image":
                joined = " (channels joined with the other images)" if len(self.images) > 1 else ""
                text[key] = f"{type(self.image).__name__}: {shape} {spec.dtype} is an image{joined}"
            elif spec.kind == "discrete":
                text[key] = f"one-hot ({spec.encoded_size}) → {network}: integers with {list(spec.classes)} classes"
            else:
                squash = "symlog → " if self.use_symlog else ""
                text[key] = f"{squash}{network}: {shape} {spec.dtype} is a vector"
        return text


def _image_encoder(
    images: Mapping[str, ObservationSpec], name: str, *, depth: int, strided: bool, style: StyleLike
) -> ImageEncoder:
    if name not in IMAGE_ENCODERS:
        raise ConfigError(f"image_encoder='{name}' does not exist.{nearest(name, IMAGE_ENCODERS)}")
    encoder = IMAGE_ENCODERS[name]
    height, width, channels = stacked_image_shape(images, multiple=encoder.shrinks_by)
    if encoder is DreamerCNN:
        return DreamerCNN(height=height, width=width, channels=channels, depth=depth, strided=strided)
    if strided:
        raise ConfigError(f"strided=true belongs to image_encoder=dreamer; '{name}' has its own down-sampling.")
    if encoder is PlanetCNN:
        return PlanetCNN(height=height, width=width, channels=channels, depth=depth, style=style)
    return encoder(height=height, width=width, channels=channels, depth=depth)
