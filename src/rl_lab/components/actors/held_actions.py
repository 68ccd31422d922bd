"""Random actions that last: exploration in which the world has time to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from rl_lab.components.spaces import action_spec
from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import one_hot
from rl_lab.specs import ActionSpec


class HeldActions(nn.Module):
    """Each action is held for 1 to `hold` decisions, drawn uniformly. Discrete actions are uniform; continuous ones are
    uniform too, or normal around `mean` with deviation `std`, cut to [-1, 1].

    Actions that change with every decision cancel each other out: a car under them hardly moves, and a model learns to
    ignore them.
    """

    def __init__(
        self, *, action: ActionSpec | Mapping[str, Any], hold: int = 10, mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = action_spec(action)
        size = self.spec.encoded_size
        if hold < 1 or (mean is None) != (std is None):
            raise ConfigError(
                f"hold={hold}, mean={mean}, std={std}: expected a hold of at least 1, and both or neither."
            )
        if mean is not None and (self.spec.kind == "discrete" or len(mean) != size or len(std or ()) != size):
            raise ConfigError(f"mean={mean}, std={std}: expected one number for each of {size} continuous entries.")
        self.hold = hold
        self.mean = None if mean is None else torch.tensor(mean, dtype=torch.float32)
        self.std = None if std is None else torch.tensor(std, dtype=torch.float32)

    def initial_memory(self, num_envs: int) -> dict[str, Tensor]:
        """No action is held yet."""
        return {"held": torch.zeros(num_envs, self.spec.encoded_size), "left": torch.zeros(num_envs)}

    def act(self, memory: Mapping[str, Tensor]) -> tuple[Float[Tensor, "env action"], dict[str, Tensor]]:
        """Encoded actions, and the memory to act on next. Draws are made for all, needed or not: so the random stream
        does not depend on the episodes."""
        held, left = memory["held"], memory["left"]
        fresh, length = self._draw(held), torch.randint(1, self.hold + 1, left.shape, device=left.device)
        over = left < 1.0
        action = torch.where(over[:, None], fresh, held)
        return action, {"held": action, "left": torch.where(over, length.to(left.dtype), left) - 1.0}

    def _draw(self, like: Shaped[Tensor, "env action"]) -> Float[Tensor, "env action"]:
        if self.spec.kind == "discrete":
            classes = [torch.randint(count, like.shape[:1], device=like.device) for count in self.spec.classes]
            return torch.cat([one_hot(part, n) for part, n in zip(classes, self.spec.classes, strict=True)], -1)
        if self.mean is None or self.std is None:
            return 2.0 * torch.rand_like(like) - 1.0
        return (self.mean.to(like) + self.std.to(like) * torch.randn_like(like)).clamp(-1.0, 1.0)
