"""The network of DQN: what each of a few discrete actions is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.spaces import action_spec
from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import at_least_float32
from rl_lab.nn.plain_mlp import PlainMLP
from rl_lab.specs import ActionSpec


class QNetwork(nn.Module):
    """Q(s, ·): encoder → `layers` times Linear → ReLU → one value for each action.

    Dueling (Wang et al., 2016): the last hidden layer (one more where there is none) is there twice, for the value of
    the state and for the advantages of the actions; Q = V + A - mean A.
    """

    def __init__(
        self,
        *,
        encoder: nn.Module,
        action: ActionSpec | Mapping[str, Any],
        units: int,
        layers: int,
        dueling: bool,
    ) -> None:
        super().__init__()
        spec = action_spec(action)
        if spec.kind != "discrete" or len(spec.classes) != 1:
            seen = "continuous" if spec.kind == "continuous" else f"{len(spec.classes)} discrete choices at once"
            raise ConfigError(
                f"A Q network needs one discrete action, and the environment's is {seen}. Choose an environment with a "
                "Discrete action space, or a workflow for this one (dreamer_v3)."
            )
        self.actions, self.encoder, self.dueling = spec.classes[0], encoder, dueling
        size = int(encoder.output_size)  # type: ignore[arg-type]
        if not dueling:
            self.head = PlainMLP(size, self.actions, units=units, layers=layers)
            return
        self.trunk = nn.Sequential()
        for _ in range(layers - 1):
            self.trunk.extend([nn.Linear(size, units), nn.ReLU()])
            size = units
        self.head = PlainMLP(size, self.actions, units=units, layers=1)
        self.value = PlainMLP(size, 1, units=units, layers=1)

    def forward(self, observation: Mapping[str, Tensor]) -> Float[Tensor, "*lead actions"]:
        """In float32, under mixed precision too."""
        features = self.encoder(observation)
        if not self.dueling:
            return at_least_float32(self.head(features))
        features = self.trunk(features)
        advantage = at_least_float32(self.head(features))
        return at_least_float32(self.value(features)) + advantage - advantage.mean(-1, keepdim=True)

    def wiring(self) -> dict[str, str]:
        """For people: what each observation key goes through."""
        wiring = getattr(self.encoder, "wiring", None)
        return wiring() if wiring is not None else {}
