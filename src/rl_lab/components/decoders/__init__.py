"""Latent states back to observations."""

from rl_lab.components.decoders.base import ObservationModel
from rl_lab.components.decoders.cnn import DreamerCNNDecoder
from rl_lab.components.decoders.contrastive import ContrastiveModel
from rl_lab.components.decoders.multi_key import MLPDecoder, MultiKeyDecoder
from rl_lab.components.decoders.planet_cnn import PlanetCNNDecoder

__all__ = [
    "ContrastiveModel",
    "DreamerCNNDecoder",
    "MLPDecoder",
    "MultiKeyDecoder",
    "ObservationModel",
    "PlanetCNNDecoder",
]
