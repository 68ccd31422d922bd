"""Contrastive losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def nt_xent(
    first: Float[Tensor, "batch size"], second: Float[Tensor, "batch size"], temperature: float
) -> Float[Tensor, ""]:
    """Normalised temperature-scaled cross-entropy: each vector must find its partner of the other view among all 2B - 1
    others of the batch, by cosine similarity. The mean over all 2B of them, in nats."""
    vectors = F.normalize(torch.cat([first, second]), dim=-1)
    logits = vectors @ vectors.T / temperature
    own = torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
    partner = torch.arange(len(vectors), device=vectors.device).roll(len(first))
    return F.cross_entropy(logits.masked_fill(own, -torch.inf), partner)
