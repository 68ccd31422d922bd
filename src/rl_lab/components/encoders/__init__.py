"""Observations to feature vectors."""

from rl_lab.components.encoders.cnn import DreamerCNN
from rl_lab.components.encoders.images import QuantizedImages
from rl_lab.components.encoders.impala import ImpalaCNN
from rl_lab.components.encoders.mlp import MLPEncoder
from rl_lab.components.encoders.multi_key import MultiKeyEncoder, handed_on
from rl_lab.components.encoders.nature import NatureCNN
from rl_lab.components.encoders.planet_cnn import PlanetCNN
from rl_lab.components.encoders.resnet import ResNetEncoder

__all__ = [
    "DreamerCNN",
    "ImpalaCNN",
    "MLPEncoder",
    "MultiKeyEncoder",
    "NatureCNN",
    "PlanetCNN",
    "QuantizedImages",
    "ResNetEncoder",
    "handed_on",
]
