"""The interface of observation models, which make latent states tell of observations: a decoder reconstructs them, a
contrastive model tells them apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.world_models.base import LatentState


class ObservationModel(nn.Module, ABC):
    """The part of a world model that says what a state means."""

    metric_group: ClassVar[str] = "reconstruction"  # the prefix of its losses among the metrics
    has_probe: ClassVar[bool] = False  # whether a decoder is trained on the side (`probe_losses`)

    @abstractmethod
    def losses(
        self, states: LatentState, embed: Float[Tensor, "*lead embed"], observation: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """-ln p(observation | state) without constants, by name: [*lead], or one number for the batch. `embed` is
        the encoder's output."""

    def probe_losses(self, states: LatentState, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Losses of a decoder that is trained on the side, for people to look at. Their gradient ends there: no
        state learns from it.

        Where `losses` already trains a decoder there is none.
        """
        return {}

    @abstractmethod
    def reconstruct(self, states: LatentState) -> dict[str, Tensor]:
        """The observations that the states stand for, in their own units."""

    @abstractmethod
    def wiring(self) -> dict[str, str]:
        """For people: what is done with each key."""
