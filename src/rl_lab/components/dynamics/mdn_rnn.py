"""The memory of World Models (Ha & Schmidhuber, 2018): an LSTM that predicts the next latent as mixtures, M."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rl_lab.errors import ConfigError
from rl_lab.nn.mixtures import GaussianMixtures

Part = Literal["latent", "hidden", "cell"]


class MemoryState(NamedTuple):
    """The LSTM's state; zeros at the start of an episode."""

    hidden: Float[Tensor, "batch units"]
    cell: Float[Tensor, "batch units"]


class Prediction(NamedTuple):
    """The predicted distribution of the next latent, with reward and end where there are heads."""

    latent: GaussianMixtures
    reward: Float[Tensor, "*lead"] | None  # None: the model has no such head
    terminal_logit: Float[Tensor, "*lead"] | None


class MDNRNN(nn.Module):
    """h_{t+1} = LSTM(h_t, [z_t, a_t]);  p(z_{t+1} | h_{t+1}): `mixtures` Gaussians for each latent dimension.

    422,368 parameters with the published sizes, and 1,024 of the second bias that PyTorch's LSTM has. A controller
    sees `sees`: the latent of now, and the memory before it takes in that latent.
    """

    def __init__(
        self, *, latent_size: int, action_size: int, units: int = 256, mixtures: int = 5,
        reward: bool = False,  # a head for the reward of the next step
        terminal: bool = False,  # a head for whether the episode ends with the next step
        log_std_limits: tuple[float, float] = (-7.0, 2.0),
        sees: Sequence[Part] = ("latent", "hidden"),
    ) -> None:  # fmt: skip
        super().__init__()
        if not sees or set(sees) - {"latent", "hidden", "cell"}:
            raise ConfigError(f"sees={list(sees)}: expected some of latent, hidden and cell.")
        self.latent_size, self.action_size, self.units, self.mixtures = latent_size, action_size, units, mixtures
        self.log_std_limits, self.sees = log_std_limits, tuple(sees)
        self.lstm = nn.LSTM(latent_size + action_size, units, batch_first=True)
        with torch.no_grad():  # remember by default
            biases = dict(self.lstm.named_parameters())
            biases["bias_ih_l0"][units : 2 * units] = 1.0
            biases["bias_hh_l0"][units : 2 * units] = 0.0
        self.head = nn.Linear(units, 3 * latent_size * mixtures)
        self.reward = nn.Linear(units, 1) if reward else None
        self.terminal = nn.Linear(units, 1) if terminal else None
        sizes = {"latent": latent_size, "hidden": units, "cell": units}
        self.feature_size = sum(sizes[part] for part in self.sees)

    def initial(self, batch: int) -> MemoryState:
        zeros = self.head.weight.new_zeros(batch, self.units)
        return MemoryState(zeros, zeros)

    def features(self, latent: Float[Tensor, "batch latent"], state: MemoryState) -> Float[Tensor, "batch features"]:
        """The controller's input: the parts of latent and LSTM state that `sees` names."""
        parts = {"latent": latent, "hidden": state.hidden, "cell": state.cell}
        return torch.cat([parts[part] for part in self.sees], -1)

    def step(
        self, latent: Float[Tensor, "batch latent"], action: Float[Tensor, "batch action"], state: MemoryState
    ) -> MemoryState:
        """The memory after one latent and the action that was chosen there."""
        _, (hidden, cell) = self.lstm(torch.cat([latent, action], -1)[:, None], (state.hidden[None], state.cell[None]))
        return MemoryState(hidden[0], cell[0])

    def forward(
        self,
        latent: Float[Tensor, "batch time latent"],
        action: Float[Tensor, "batch time action"],
        is_first: Bool[Tensor, "batch time"],
    ) -> Float[Tensor, "batch time units"]:
        """The memory after each step of a sequence. It is cleared where an episode begins.

        Each piece of an episode becomes a row of its own, as long as the longest, so that the LSTM runs once over all
        of them: cutting time wherever an episode begins in any sequence would leave it dozens of short runs.
        """
        inputs = torch.cat([latent, action], -1)
        begins = is_first.clone()
        begins[:, 0] = True
        piece = begins.flatten().cumsum(0).reshape(begins.shape) - 1  # row of each step …
        time = torch.arange(inputs.shape[1], device=inputs.device)
        place = time - torch.where(begins, time, 0).cummax(1).values  # … and its place there
        rows = inputs.new_zeros(int(begins.sum()), int(place.max()) + 1, inputs.shape[-1])
        outputs, _ = self.lstm(rows.index_put((piece, place), inputs))
        return outputs[piece, place]

    def predict(self, hidden: Float[Tensor, "*lead units"]) -> Prediction:
        """The prediction from a memory that has taken in the present latent and action."""
        raw = self.head(hidden).unflatten(-1, (self.latent_size, 3 * self.mixtures))
        logits, mean, log_std = raw.chunk(3, -1)
        mixtures = GaussianMixtures(logits, mean, log_std.clamp(*self.log_std_limits))
        reward = None if self.reward is None else self.reward(hidden).squeeze(-1)
        terminal = None if self.terminal is None else self.terminal(hidden).squeeze(-1)
        return Prediction(mixtures, reward, terminal)
