"""Action values: what each of a few actions is worth, with a target copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.encoders import handed_on
from rl_lab.components.spaces import action_spec
from rl_lab.errors import ConfigError
from rl_lab.nn.arrays import Array
from rl_lab.nn.math import at_least_float32
from rl_lab.nn.plain_mlp import Backward, PlainMLP, run_heads
from rl_lab.specs import ActionSpec


class ActionValues(nn.Module):
    """Encoder → `layers` times Linear → ReLU → one value for each action.

    Dueling (Wang et al., 2016): the last hidden layer (one more where there is none) is there twice, for the value of
    the state and for the advantages of the actions; Q = V + A - mean A.
    """

    def __init__(self, encoder: nn.Module, actions: int, *, units: int, layers: int, dueling: bool) -> None:
        super().__init__()
        self.encoder, self.dueling = encoder, dueling
        self._only_key = handed_on(encoder)
        size, hidden = int(encoder.output_size), [units] * layers  # type: ignore[arg-type]
        if not dueling:
            self.head = PlainMLP(size, hidden, actions)
            return
        self.trunk = nn.Sequential()
        for _ in hidden[:-1]:
            self.trunk.extend([nn.Linear(size, units), nn.ReLU()])
            size = units
        self.head, self.value = PlainMLP(size, [units], actions), PlainMLP(size, [units], 1)

    @property
    def takes_arrays(self) -> bool:
        """Whether NumPy can run it: a plain network on one vector."""
        return self._only_key is not None and not self.dueling

    def forward(self, observation: Mapping[str, Array]) -> Array:
        """[*lead, actions]"""
        features = self._encode(observation)
        if not self.dueling:
            values = self.head.forward(features)
            return values if isinstance(values, np.ndarray) else at_least_float32(values)
        features = self.trunk(features)
        advantage = at_least_float32(self.head(features))
        return at_least_float32(self.value(features)) + advantage - advantage.mean(-1, keepdim=True)

    def with_backward(self, observation: Mapping[str, Array]) -> tuple[Array, Backward]:
        """[batch, actions] without a graph, and what takes the loss's derivative by them to give the gradients."""
        if isinstance(features := observation.get(self._only_key or ""), np.ndarray):
            (values,), backward = run_heads(features, self.head)
            return values, backward
        with torch.enable_grad():
            values = self(observation)
        return values.detach(), values.backward

    def _encode(self, observation: Mapping[str, Array]) -> Array:
        return self.encoder(observation) if self._only_key is None else observation[self._only_key]


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
