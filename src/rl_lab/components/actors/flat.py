"""Controllers that are one flat vector of parameters, so that evolution can work on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.spaces import action_spec
from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import one_hot
from rl_lab.specs import ActionSpec


class FlatController(nn.Module):
    """a = tanh(W x + b), with a hidden tanh layer between where `units` is above 0. Discrete actions are those with the
    largest output.

    A linear one for CarRacing on [z, h] has 288 · 3 + 3 = 867 parameters. A whole population acts in one call: row i of
    `vectors` chooses for row i of the features.
    """

    def __init__(
        self, *, inputs: int, action: ActionSpec | Mapping[str, Any], units: int = 0, bias: bool = True,
        low: Sequence[float] | None = None,  # least value of each entry of a continuous action; null: -1
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = action_spec(action)
        self.bias, outputs = bias, self.spec.encoded_size
        self.shapes = [(outputs, inputs)] if units == 0 else [(units, inputs), (outputs, units)]
        self.size = sum(rows * (columns + bias) for rows, columns in self.shapes)
        self.vector = nn.Parameter(torch.zeros(self.size))
        if low is not None and self.spec.kind == "discrete":
            raise ConfigError(f"low={list(low)}: this action is discrete, so it has no least value. Leave low out.")
        if low is not None and len(low) != outputs:
            raise ConfigError(f"low={list(low)}: expected one number for each of the {outputs} entries of the action.")
        self.register_buffer(
            "low", torch.full((outputs,), -1.0) if low is None else torch.tensor(low), persistent=False
        )

    def forward(
        self, features: Float[Tensor, "rows inputs"], vectors: Float[Tensor, "rows size"] | None = None
    ) -> Float[Tensor, "rows action"]:
        """Encoded actions: entries up to 1, or one-hots. Without `vectors` the controller's own parameters act."""
        x, start = features[..., None], 0
        flat = self.vector[None] if vectors is None else vectors
        for index, (rows, columns) in enumerate(self.shapes):
            weight = flat[:, start : start + rows * columns].unflatten(-1, (rows, columns))
            start += rows * columns
            x = weight @ x
            if self.bias:
                x = x + flat[:, start : start + rows, None]
                start += rows
            if index + 1 < len(self.shapes):
                x = torch.tanh(x)
        output = x.squeeze(-1)
        if self.spec.kind == "discrete":
            parts = output.split(list(self.spec.classes), -1)
            return torch.cat([one_hot(part.argmax(-1), part.shape[-1]) for part in parts], -1)
        low: Any = self.low
        return low + (1.0 - low) * 0.5 * (torch.tanh(output) + 1.0)
