"""Learners of a code for single observations: encode, decode and a loss of their own."""

from rl_lab.components.representations.autoencoder import Autoencoder
from rl_lab.components.representations.base import Encoding, Representation
from rl_lab.components.representations.contrastive import Contrastive
from rl_lab.components.representations.conv_vae import ConvVAE
from rl_lab.components.representations.identity import Identity

__all__ = ["Autoencoder", "Contrastive", "ConvVAE", "Encoding", "Identity", "Representation"]
