"""World models without a decoder: the state must match the encoder's own output, and tell observations apart.

The default is the loss of R2-Dreamer (2026): Barlow twins between a linear image of the state's features and the
embedding, which is a constant here; the encoder learns through the posterior. InfoNCE is the other choice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.decoders.base import ObservationModel
from rl_lab.components.world_models.base import LatentState
from rl_lab.errors import ConfigError, nearest
from rl_lab.nn.distributions import at_least_float32
from rl_lab.nn.layers import Linear

SCALES = {"barlow_twins": 0.05, "info_nce": 1.0}  # by objective, where none is given


class ContrastiveModel(ObservationModel):
    """No gradient comes from observations as such. `probe` is a decoder that learns on the side, from detached states:
    it shows what the states hold and changes nothing."""

    metric_group = "contrast"
    has_probe = True

    def __init__(
        self,
        *,
        embed_size: int,
        feature_size: int,
        probe: ObservationModel,
        objective: str = "barlow_twins",
        scale: float | None = None,
        redundancy: float = 5e-4,
        temperature: float = 0.1,
    ) -> None:
        super().__init__()
        if objective not in SCALES:
            raise ConfigError(f"objective='{objective}' does not exist.{nearest(objective, SCALES)}")
        self.objective, self.scale = objective, SCALES[objective] if scale is None else scale
        self.redundancy, self.temperature = redundancy, temperature
        self.projection = Linear(feature_size, embed_size, bias=False)
        self.probe = probe

    def losses(
        self, states: LatentState, embed: Float[Tensor, "*lead embed"], observation: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Over all records of the batch; the observations themselves are not looked at."""
        projected = at_least_float32(self.projection(states.features)).flatten(0, -2)
        target = at_least_float32(embed.detach()).flatten(0, -2)
        with torch.autocast(target.device.type, enabled=False):
            if self.objective == "barlow_twins":
                loss = barlow_twins(projected, target, redundancy=self.redundancy)
            else:
                loss = info_nce(projected, target, temperature=self.temperature).mean()
        return {self.objective: self.scale * loss}

    def probe_losses(self, states: LatentState, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.probe.losses(states.detach(), states.deter.detach(), observation)

    def reconstruct(self, states: LatentState) -> dict[str, Tensor]:
        """The probe's reconstruction."""
        return self.probe.reconstruct(states)

    def wiring(self) -> dict[str, str]:
        name = {"barlow_twins": "Barlow twins", "info_nce": "InfoNCE"}[self.objective]
        told = f"no decoder: {name} with the encoder's output. To look at, a probe that trains nothing else:"
        return {key: f"{told} {text}" for key, text in self.probe.wiring().items()}


def barlow_twins(
    prediction: Float[Tensor, "n size"], target: Float[Tensor, "n size"], *, redundancy: float
) -> Float[Tensor, ""]:
    """Σ (C_ii - 1)² + redundancy · Σ_{i≠j} C_ij², where C are the correlations of predicted and target dimensions."""
    correlation = _standardised(prediction).t() @ _standardised(target) / len(target)
    diagonal = correlation.diagonal()
    others = correlation.square().sum() - diagonal.square().sum()
    return (diagonal - 1.0).square().sum() + redundancy * others


def info_nce(
    prediction: Float[Tensor, "n size"], target: Float[Tensor, "n size"], *, temperature: float
) -> Float[Tensor, " n"]:
    """-log of the share that a row's own target has among all targets, by cosine similarity."""
    logits = F.normalize(prediction, dim=-1) @ F.normalize(target, dim=-1).t() / temperature
    return torch.logsumexp(logits, -1) - logits.diagonal()


def _standardised(x: Float[Tensor, "n size"]) -> Float[Tensor, "n size"]:
    """Each dimension with mean 0 and deviation 1 over the rows."""
    centred = x - x.mean(0)
    return centred / (centred.square().mean(0) + 1e-8).sqrt()
