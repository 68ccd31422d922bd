"""MuZero's dynamics g: the latent that follows an action, and the reward of getting there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rl_lab.components.muzero.layers import MLP, ResidualBlock, convolution, scale_latent
from rl_lab.errors import ConfigError
from rl_lab.nn.support import Support


class PrefixMemory(NamedTuple):
    """Memory of the value prefix along a path: the LSTM's state, the prefix so far, and the depth."""

    hidden: Float[Tensor, "rows units"]
    cell: Float[Tensor, "rows units"]
    total: Float[Tensor, " rows"]
    depth: Int[Tensor, " rows"]


class MuZeroState(NamedTuple):
    """A point of the latent space, and what the value prefix remembers of the way to it."""

    latent: Float[Tensor, rows * latent]
    memory: PrefixMemory | None = None


class MuZeroStep(NamedTuple):
    """Result of one step of the dynamics. `reward` is a scalar in raw units; `output` are the raw outputs that it was
    read from: of the reward, or with a value prefix of the sum of rewards since the last reset."""

    state: MuZeroState
    reward: Float[Tensor, " rows"]
    output: Float[Tensor, "rows bins"]


def scale_gradient(x: Float[Tensor, "*shape"], scale: float) -> Float[Tensor, "*shape"]:
    """The same value, whose gradient is multiplied by `scale`."""
    return x if scale == 1.0 else x * scale + (x * (1.0 - scale)).detach()


class Dynamics(nn.Module):
    """s' = scale(trunk(s, a) + s). The reward is read off s'; with `value_prefix` an LSTM reads the sum of rewards
    since the last multiple of `prefix_length` steps (Ye et al., 2021), which is easier to predict than when each
    comes.

    A latent of one axis goes through an MLP, one of three axes through residual blocks with the action as planes.
    """

    def __init__(
        self,
        *,
        latent_shape: Sequence[int],
        action_size: int,  # encoded
        units: int = 128,
        layers: int = 1,  # hidden ones
        norm: bool = True,
        blocks: int = 1,
        head_units: int = 32,
        bins: int,
        limit: float,  # of the transformed reward
        value_prefix: bool = False,
        prefix_length: int = 5,
        prefix_units: int = 64,
    ) -> None:
        super().__init__()
        if prefix_length < 1:
            raise ConfigError(f"prefix_length={prefix_length}: expected at least 1.")
        self.support = Support(bins=bins, limit=limit)
        self.action_size, self.planes = action_size, len(latent_shape) == 3
        size = latent_shape[0]
        self.reduce: nn.Module = nn.Identity()
        if self.planes:
            self.trunk: nn.Module = convolution(size + action_size, size)
            self.after: nn.Module = nn.Sequential(nn.ReLU(), *(ResidualBlock(size) for _ in range(blocks)))
            self.reduce = nn.Sequential(convolution(size, 16, kernel=1), nn.ReLU(), nn.Flatten())
            size = 16 * latent_shape[1] * latent_shape[2]
        else:
            self.trunk = MLP([size + action_size, *[units] * layers, size], norm=norm)
            self.after = nn.Identity()
        self.prefix_length = prefix_length
        self.lstm = nn.LSTMCell(size, prefix_units) if value_prefix else None
        self.head = MLP([prefix_units if value_prefix else size, head_units, bins], norm=norm, zero_output=True)

    def initial_memory(self, latent: Float[Tensor, rows * latent]) -> PrefixMemory | None:
        if self.lstm is None:
            return None
        zeros = latent.new_zeros(len(latent), self.lstm.hidden_size)
        total = latent.new_zeros(len(latent))
        return PrefixMemory(zeros, zeros, total, total.int())

    def forward(self, state: MuZeroState, action: Float[Tensor, "rows action"]) -> MuZeroStep:
        latent = self.following(state.latent, action)
        output, memory = self._reward(latent, state.memory)
        total = self.support.mean(output)
        if memory is None or state.memory is None:
            return MuZeroStep(MuZeroState(latent), total, output)
        keep = (memory.depth % self.prefix_length != 0).to(total.dtype)
        memory = PrefixMemory(memory.hidden * keep[:, None], memory.cell * keep[:, None], total * keep, memory.depth)
        return MuZeroStep(MuZeroState(latent, memory), total - state.memory.total, output)

    def unroll(
        self,
        latent: Float[Tensor, batch * latent],
        action: Float[Tensor, "batch steps action"],
        *,
        gradient_scale: float = 1.0,
    ) -> tuple[Float[Tensor, "steps batch *latent"], Float[Tensor, "steps batch bins"]]:
        """Latents after each action, and the raw outputs of reward or value prefix. The gradient that flows back
        through a latent is multiplied by `gradient_scale` at every step."""
        latents, outputs, memory = [], list[Tensor](), self.initial_memory(latent)
        for step, own in enumerate(action.unbind(1), 1):
            latent = scale_gradient(self.following(latent, own), gradient_scale)
            latents.append(latent)
            if memory is not None:
                output, memory = self._reward(latent, memory)
                outputs.append(output)
                if step % self.prefix_length == 0:
                    memory = self.initial_memory(latent)
        stacked = torch.stack(latents)
        if memory is not None:
            return stacked, torch.stack(outputs)
        # Without a memory nothing waits for the rewards: they are read off all latents at once.
        output, _ = self._reward(stacked.flatten(0, 1), None)
        return stacked, output.view(*stacked.shape[:2], -1)

    def _reward(
        self, latent: Float[Tensor, rows * latent], memory: PrefixMemory | None
    ) -> tuple[Float[Tensor, "rows bins"], PrefixMemory | None]:
        """Raw outputs of the reward head and, with a value prefix, what it remembers then."""
        features = self.reduce(latent)
        if self.lstm is None or memory is None:
            return self.head(features).float(), None
        hidden, cell = self.lstm(features, (memory.hidden, memory.cell))
        return self.head(torch.relu(hidden)).float(), memory._replace(hidden=hidden, cell=cell, depth=memory.depth + 1)

    def following(
        self, latent: Float[Tensor, rows * latent], action: Float[Tensor, "rows action"]
    ) -> Float[Tensor, rows * latent]:
        if self.planes:
            action = action[:, :, None, None].expand(-1, -1, *latent.shape[2:])
        return scale_latent(self.after(self.trunk(torch.cat([latent, action], 1)) + latent).float())

    def reward_targets(
        self, reward: Float[Tensor, "steps batch"], valid: Float[Tensor, "steps batch"]
    ) -> Float[Tensor, "steps batch"]:
        """Targets of `output` for each step of an unroll: the rewards, or their sums since the last reset."""
        reward = reward * valid
        if self.lstm is None:
            return reward
        parts = reward.split(self.prefix_length)
        return torch.cat([part.cumsum(0) for part in parts])
