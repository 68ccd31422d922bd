"""Latent states back to observations."""

from rl_lab.components.decoders.cnn import DreamerCNNDecoder
from rl_lab.components.decoders.mlp import MLPDecoder
from rl_lab.components.decoders.multi_key import MultiKeyDecoder

__all__ = ["DreamerCNNDecoder", "MLPDecoder", "MultiKeyDecoder"]
