"""Plan and dream in V and M of World Models: latents of single frames, and an LSTM that predicts the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.dynamics.mdn_rnn import MDNRNN, MemoryState
from rl_lab.components.representations.base import Representation
from rl_lab.simulation.simulator import ModelState, SimulatedStep, Simulator


class DreamState(NamedTuple):
    """The latent of now, and the memory before it takes that latent in."""

    latent: Float[Tensor, "batch latent"]
    hidden: Float[Tensor, "batch units"]
    cell: Float[Tensor, "batch units"]

    @property
    def memory(self) -> MemoryState:
        return MemoryState(self.hidden, self.cell)


class MDNSimulator(Simulator):
    """`temperature` makes the dream more certain (below 1) or less. Without a reward head each step is worth 1, as in a
    game of staying alive; without a terminal head no episode ends."""

    has_observation = True
    has_temperature = True

    def __init__(
        self, *, representation: Representation, dynamics: MDNRNN, temperature: float = 1.0, samples: bool = False
    ) -> None:
        self.representation, self.dynamics = representation, dynamics
        self.temperature, self.samples = temperature, samples

    def encode(self, observation: Mapping[str, Tensor]) -> Float[Tensor, "batch latent"]:
        """The latent of what is seen: its mean, or a draw (`samples`)."""
        encoding = self.representation.encode(observation)
        return encoding.sample() if self.samples else encoding.mean

    def observe(
        self,
        observation: Mapping[str, Tensor],
        *,
        previous: ModelState | None = None,
        action: Tensor | None = None,
        is_first: Tensor | None = None,
    ) -> DreamState:
        latent = self.encode(observation)
        if previous is None or action is None:
            return DreamState(latent, *self.dynamics.initial(len(latent)))
        hidden, cell = self.dynamics.step(previous.latent, action, previous.memory)
        if is_first is not None:
            keep = (~is_first[:, None]).to(hidden.dtype)
            hidden, cell = hidden * keep, cell * keep
        return DreamState(latent, hidden, cell)

    def step(self, state: DreamState, action: Float[Tensor, "batch action"]) -> SimulatedStep:
        memory = self.dynamics.step(state.latent, action, state.memory)
        prediction = self.dynamics.predict(memory.hidden)
        latent = prediction.latent.sample(self.temperature)
        ones = torch.ones_like(latent[:, 0])
        reward = ones if prediction.reward is None else prediction.reward
        goes_on = ones if prediction.terminal_logit is None else torch.sigmoid(-prediction.terminal_logit)
        return SimulatedStep(DreamState(latent, *memory), reward, goes_on)

    def observation(self, state: DreamState) -> dict[str, Tensor]:
        return self.representation.decode(state.latent)
