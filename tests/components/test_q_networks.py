"""Action values: dueling, the gradients without autograd, the target copy."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.controllers.q_networks import QNetwork
from rl_lab.components.encoders import MultiKeyEncoder
from rl_lab.errors import ConfigError
from rl_lab.specs import ActionSpec, ObservationSpec

VECTOR = {"vector": ObservationSpec("vector", (4,), "float32")}
MIXED = VECTOR | {"gear": ObservationSpec("discrete", (1,), "int32", (3,))}
IMAGE = {"image": ObservationSpec("image", (36, 40, 2), "uint8")}
ACTION = ActionSpec("discrete", (1,), (3,))


def make(observation: dict[str, ObservationSpec] = VECTOR, **settings) -> QNetwork:
    torch.manual_seed(0)
    encoder = MultiKeyEncoder(observation=observation, layers=0, depth=4, use_symlog=False, image_encoder="nature")
    return QNetwork(encoder=encoder, action=ACTION, units=8, **settings)


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
def test_gradients_are_those_of_autograd(observation: dict, dueling: bool, layers: int) -> None:
    """Whichever way a network takes, `with_backward` gives the values and the gradients of plain autograd."""
    network, batch, slope = make(observation, dueling=dueling, layers=layers), sample(observation), torch.randn(5, 3)
    expected = network(batch)
    trained = [value for value in network.parameters() if value.requires_grad]
    gradients = torch.autograd.grad(expected, trained, slope)
    values, backward = network.online.with_backward(batch)
    torch.testing.assert_close(values, expected.detach())
    backward(slope)
    for value, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(value.grad, gradient)


def test_mixed_precision_gives_full_precision_values() -> None:
    """Matrix products in bfloat16, values and gradients in float32."""
    network, batch = make(), sample(VECTOR)
    with torch.autocast("cpu", torch.bfloat16):
        values, backward = network.online.with_backward(batch)
    backward(torch.ones_like(values))
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, network(batch).detach(), rtol=0.05, atol=0.05)
    assert all(value.grad is not None and value.grad.dtype == torch.float32 for value in network.online.parameters())


def test_dueling_advantages_have_mean_zero() -> None:
    """Q = V + A - mean A: the mean over actions is the state's value."""
    network, batch = make(dueling=True), sample(VECTOR)
    online = network.online
    value = online.value(online.trunk(batch["vector"]))
    torch.testing.assert_close(network(batch).mean(-1, keepdim=True), value)


@pytest.mark.parametrize(("rate", "share"), [(1.0, 1.0), (0.25, 0.25)])
def test_the_target_moves_only_when_told(rate: float, share: float) -> None:
    """It starts as a copy, is not trained, and then goes that share of the way."""
    network = make()
    assert not any(value.requires_grad for value in network.target.parameters())
    before = [value.clone() for value in network.target.parameters()]
    with torch.no_grad():
        for value in network.online.parameters():
            value += 1.0
    network.move_target(rate)
    for old, new in zip(before, network.target.parameters(), strict=True):
        torch.testing.assert_close(new, old + share)


@pytest.mark.parametrize("action", [ActionSpec("continuous", (2,)), ActionSpec("discrete", (2,), (3, 3))])
def test_other_actions_are_refused(action: ActionSpec) -> None:
    """One discrete choice, and a message that says so."""
    encoder = MultiKeyEncoder(observation=VECTOR, layers=0)
    with pytest.raises(ConfigError, match="one discrete action"):
        QNetwork(encoder=encoder, action=action)
