"""MuZero's three networks together, and what EfficientZero adds to train them."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.critics.dreamer import SlowTarget
from rl_lab.components.muzero.dynamics import Dynamics, MuZeroState, MuZeroStep
from rl_lab.components.muzero.layers import MLP
from rl_lab.components.muzero.prediction import PolicyValueNetwork, PredictionOutput
from rl_lab.components.muzero.representation import Representation


class MuZeroModel(nn.Module):
    """h, g and f (Schrittwieser et al., 2020)."""

    def __init__(self, *, representation: Representation, dynamics: Dynamics, prediction: PolicyValueNetwork) -> None:
        super().__init__()
        self.representation, self.dynamics, self.prediction = representation, dynamics, prediction

    def initial(self, observation: Mapping[str, Tensor]) -> MuZeroState:
        """The state of an observation, at the start of a path."""
        latent = self.representation(observation)
        return MuZeroState(latent, self.dynamics.initial_memory(latent))

    def step(self, state: MuZeroState, action: Float[Tensor, "rows action"]) -> MuZeroStep:
        return self.dynamics(state, action)

    def predict(self, state: MuZeroState) -> PredictionOutput:
        return self.prediction(state.latent)

    def value(self, observation: Mapping[str, Tensor]) -> Float[Tensor, " rows"]:
        """The value of observations, without search."""
        return self.prediction.support.mean(self.predict(self.initial(observation)).value)


def make_slow_model(
    *,
    representation: Representation,
    dynamics: Dynamics,
    prediction: PolicyValueNetwork,
    rate: float = 1.0,
    every: int = 100,  # updates
) -> SlowTarget:
    """A copy of the three networks that follows them: with rate 1 a hard copy after every so many updates."""
    model = MuZeroModel(representation=representation, dynamics=dynamics, prediction=prediction)
    return SlowTarget(model, rate=rate, every=every)


class Projection(nn.Module):
    """EfficientZero's consistency loss: the projected prediction of a latent must point where the projection of the
    true latent points (SimSiam; Chen & He, 2021)."""

    def __init__(self, *, latent_size: int, units: int = 256, hidden: int = 64) -> None:
        super().__init__()
        self.project = nn.Sequential(MLP([latent_size, units, units, units]), nn.LayerNorm(units))
        self.predict = MLP([units, hidden, units])

    def loss(
        self, latent: Float[Tensor, rows * latent], target: Float[Tensor, rows * latent]
    ) -> Float[Tensor, " rows"]:
        """Negative cosine similarity; no gradient reaches the target."""
        predicted = self.predict(self.project(latent.flatten(1)))
        return -F.cosine_similarity(predicted, self.project(target.flatten(1)).detach(), -1)
