"""Action values: kinds of observations, dueling, precision."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.encoders import MultiKeyEncoder
from rl_lab.components.q_functions.dqn import QNetwork
from rl_lab.errors import ConfigError
from rl_lab.specs import ActionSpec, ObservationSpec

VECTOR = {"vector": ObservationSpec("vector", (4,), "float32")}
MIXED = VECTOR | {"gear": ObservationSpec("discrete", (1,), "int32", (3,))}
IMAGE = {"image": ObservationSpec("image", (36, 40, 2), "uint8")}
ACTION = ActionSpec("discrete", (1,), (3,))


def make(observation: dict[str, ObservationSpec] = VECTOR, **settings) -> QNetwork:
    torch.manual_seed(0)
    encoder = MultiKeyEncoder(observation=observation, layers=0, depth=4, use_symlog=False, image_encoder="nature")
    return QNetwork(encoder=encoder, action=ACTION, **({"units": 8, "layers": 2, "dueling": False} | settings))


def sample(observation: dict[str, ObservationSpec], batch: int = 5) -> dict[str, torch.Tensor]:
    return {
        key: torch.randn(batch, *spec.shape)
        if spec.kind == "vector"
        else torch.randint(0, 3, (batch, *spec.shape), dtype=getattr(torch, spec.dtype))
        for key, spec in observation.items()
    }


@pytest.mark.parametrize("observation", [VECTOR, MIXED, IMAGE], ids=["vector", "mixed", "image"])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_every_kind_of_observation_has_values(observation: dict, dueling: bool, layers: int) -> None:
    """One for each action, with a gradient for every parameter."""
    network = make(observation, dueling=dueling, layers=layers)
    values = network(sample(observation))
    assert values.shape == (5, 3)
    values.sum().backward()
    assert all(value.grad is not None for value in network.parameters())


def test_mixed_precision_gives_full_precision_values() -> None:
    """Matrix products in bfloat16, values and gradients in float32."""
    network, batch = make(), sample(VECTOR)
    with torch.autocast("cpu", torch.bfloat16):
        values = network(batch)
    values.sum().backward()
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, network(batch), rtol=0.05, atol=0.05)
    assert all(value.grad is not None and value.grad.dtype == torch.float32 for value in network.parameters())


def test_dueling_advantages_have_mean_zero() -> None:
    """Q = V + A - mean A: the mean over actions is the state's value."""
    network, batch = make(dueling=True), sample(VECTOR)
    value = network.value(network.trunk(batch["vector"]))
    torch.testing.assert_close(network(batch).mean(-1, keepdim=True), value)


@pytest.mark.parametrize("action", [ActionSpec("continuous", (2,)), ActionSpec("discrete", (2,), (3, 3))])
def test_other_actions_are_refused(action: ActionSpec) -> None:
    """One discrete choice, and a message that says so."""
    encoder = MultiKeyEncoder(observation=VECTOR, layers=0)
    with pytest.raises(ConfigError, match="one discrete action"):
        QNetwork(encoder=encoder, action=action, units=8, layers=2, dueling=False)
