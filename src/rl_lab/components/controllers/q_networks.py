"""Action values: what each of a few actions is worth, with a target copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.spaces import action_spec
from rl_lab.errors import ConfigError
from rl_lab.nn.math import at_least_float32
from rl_lab.specs import ActionSpec


class ActionValues(nn.Module):
    """Encoder → `layers` times Linear → ReLU → one value for each action.

    Dueling (Wang et al., 2016): the last hidden layer (one more where there is none) is there twice, for the value of
    the state and for the advantages of the actions; Q = V + A - mean A.
    """

    def __init__(self, encoder: nn.Module, actions: int, *, units: int, layers: int, dueling: bool) -> None:
        super().__init__()
        self.encoder = encoder
        shared = max(layers - 1, 0) if dueling else layers
        size = int(encoder.output_size)  # type: ignore[arg-type]
        trunk: list[nn.Module] = []
        for _ in range(shared):
            trunk += [nn.Linear(size, units), nn.ReLU()]
            size = units
        self.trunk = nn.Sequential(*trunk)
        self.advantage = _stream(size, units, actions) if dueling else nn.Linear(size, actions)
        self.value = _stream(size, units, 1) if dueling else None

    def forward(self, observation: Mapping[str, Tensor]) -> Float[Tensor, "*lead actions"]:
        features = self.trunk(self.encoder(observation))
        values = at_least_float32(self.advantage(features))
        if self.value is None:
            return values
        return at_least_float32(self.value(features)) + values - values.mean(-1, keepdim=True)


def _stream(size: int, units: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, units), nn.ReLU(), nn.Linear(units, outputs))


class QNetwork(nn.Module):
    """Q(observation, ·) and its target copy, which is not trained: it is moved towards the network now and then."""

    def __init__(
        self,
        *,
        encoder: nn.Module,
        action: ActionSpec | Mapping[str, Any],
        units: int = 256,
        layers: int = 2,
        dueling: bool = False,
    ) -> None:
        super().__init__()
        spec = action_spec(action)
        if spec.kind != "discrete" or len(spec.classes) != 1:
            seen = "continuous" if spec.kind == "continuous" else f"{len(spec.classes)} discrete choices at once"
            raise ConfigError(
                f"A Q network needs one discrete action, and the environment's is {seen}. Choose an environment with a "
                "Discrete action space, or a workflow for this one (dreamer_v3)."
            )
        self.actions = spec.classes[0]
        self.online = ActionValues(encoder, self.actions, units=units, layers=layers, dueling=dueling)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, observation: Mapping[str, Tensor]) -> Float[Tensor, "*lead actions"]:
        return self.online(observation)

    @torch.no_grad()
    def move_target(self, rate: float) -> None:
        """target += rate·(online - target); a rate of 1 copies."""
        target: list[Tensor] = list(self.target.parameters())
        online: list[Tensor] = list(self.online.parameters())
        if rate == 1.0:
            torch._foreach_copy_(target, online)
        else:
            torch._foreach_lerp_(target, online, rate)

    def wiring(self) -> dict[str, str]:
        """For people: what each observation key goes through."""
        wiring = getattr(self.online.encoder, "wiring", None)
        return wiring() if wiring is not None else {}
