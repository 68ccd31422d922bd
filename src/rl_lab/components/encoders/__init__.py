"""Observations to feature vectors."""

from rl_lab.components.encoders.cnn import DreamerCNN
from rl_lab.components.encoders.images import QuantizedImages
from rl_lab.components.encoders.impala import ImpalaCNN
from rl_lab.components.encoders.multi_key import MLPEncoder, MultiKeyEncoder
from rl_lab.components.encoders.nature import NatureCNN
from rl_lab.components.encoders.planet_cnn import PlanetCNN
from rl_lab.components.encoders.resnet import ResNetEncoder
from rl_lab.components.encoders.transformer import VisionTransformer

__all__ = [
    "DreamerCNN",
    "ImpalaCNN",
    "MLPEncoder",
    "MultiKeyEncoder",
    "NatureCNN",
    "PlanetCNN",
    "QuantizedImages",
    "ResNetEncoder",
    "VisionTransformer",
]
