"""A recurrent memory between an encoder and the heads."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


class GRUMemory(nn.Module):
    """One GRU layer with orthogonal weights. Its output is its state."""

    def __init__(self, *, input_size: int, units: int) -> None:
        super().__init__()
        self.output_size = units
        self.cell = nn.GRUCell(input_size, units)
        for name, parameter in self.cell.named_parameters():
            nn.init.orthogonal_(parameter) if "weight" in name else nn.init.zeros_(parameter)

    def initial(self, rows: int) -> Float[Tensor, "rows units"]:
        return self.cell.weight_hh.new_zeros(rows, self.output_size)

    def step(
        self, features: Float[Tensor, "rows inputs"], memory: Float[Tensor, "rows units"]
    ) -> Float[Tensor, "rows units"]:
        return self.cell(features, memory)

    def scan(
        self,
        features: Float[Tensor, "time rows inputs"],
        memory: Float[Tensor, "rows units"],
        is_first: Bool[Tensor, "time rows"],
    ) -> Float[Tensor, "time rows units"]:
        """All states of a sequence that begins with `memory`; it is cleared where an episode begins."""
        keep = (~is_first).to(memory.dtype).unsqueeze(-1)
        states = []
        for features_t, keep_t in zip(features.unbind(0), keep.unbind(0), strict=True):
            memory = self.step(features_t, memory * keep_t)
            states.append(memory)
        return torch.stack(states)
