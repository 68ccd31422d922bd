"""What a researcher overrides in MuZero is what runs, in updates and in searches: on the CPU with kernels on, whose
compiled search then steps aside, and on a GPU."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.extension.overriding import assert_captured_anew, assert_differ, overriding
from tests.workflows.muzero_parts import CONTINUOUS, DISCRETE, make_batch, make_muzero
from torch import Tensor, nn

from rl_lab.components.muzero.dynamics import Dynamics
from rl_lab.components.muzero.prediction import PolicyValueNetwork
from rl_lab.components.muzero.representation import VectorRepresentation
from rl_lab.components.planners.mcts import MCTS
from rl_lab.kernels.registry import chosen_kernels
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.specs import ActionSpec
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.muzero import MuZero

PHASE = PhaseView("train", "online")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
SEEN = {"vector": np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(2, 4)}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def make(device: str, action: ActionSpec = DISCRETE, **kinds: Any) -> MuZero:
    """Weights that start at 0 would hide much: they get others."""
    muzero = make_muzero(action=action, device=device, compile_=device == "cuda", kinds=kinds, lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in (value for part in muzero.context.components.values() for value in part.parameters()):
            value += 0.1 * torch.randn(value.shape, generator=generator).to(device)
    return muzero


def results(muzero: MuZero) -> dict[str, Tensor]:
    """Losses and weights of an update, and what a search finds before it."""
    torch.manual_seed(0)
    search = muzero.planner.search(muzero.simulator.observe(torch_seen(muzero)), explore=True)
    found = {"policy": search.policy, "value": search.value, "visits": search.visits, "chosen": search.chosen}
    torch.manual_seed(1)
    metrics = muzero.update(make_batch(muzero), phase=PHASE)
    found |= {name: torch.tensor(float(value)) for name, value in metrics.items()}
    weights = [value for part in muzero.context.components.values() for value in part.parameters()]
    found |= {f"weight {number}": value for number, value in enumerate(weights)}
    return {name: value.detach().cpu().clone() for name, value in found.items()}


def torch_seen(muzero: MuZero) -> dict[str, Tensor]:
    return {key: torch.as_tensor(value, device=muzero.context.device) for key, value in SEEN.items()}


@cache
def plain_results(device: str, action: ActionSpec = DISCRETE) -> dict[str, Tensor]:
    return results(make(device, action))


def assert_changes(name: str, calls: list[str], device: str, action: ActionSpec = DISCRETE, **kinds: Any) -> None:
    changed = results(make(device, action, **kinds))
    assert calls, f"{name} was overridden and never called"
    assert_differ(changed, plain_results(device, action), name)


PARTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "representation": (VectorRepresentation, ("encode", "forward", "augment")),
    "dynamics": (Dynamics, ("following", "forward", "unroll", "reward_targets")),
    "prediction": (PolicyValueNetwork, ("forward",)),
    "planner": (MCTS, ("_noisy_prior", "_draw_root_noise", "_result")),
    "workflow": (MuZero, ("losses", "_policy_loss", "_over_unroll")),
}


@pytest.mark.parametrize(("part", "method"), [(part, method) for part in PARTS for method in PARTS[part][1]])
def test_parts(device: str, part: str, method: str) -> None:
    """Networks, search, and losses."""
    kind, calls = PARTS[part][0], list[str]()
    assert_changes(f"{part}.{method}", calls, device, **{part: overriding(kind, method, calls)})


@pytest.mark.parametrize("method", ["following", "forward"])
def test_the_search_takes_an_overridden_model(device: str, method: str) -> None:
    """Not the compiled one of its parent: what a search finds changes, and not only an update's losses."""
    assert "MCTS._grow" in chosen_kernels(make(device).planner) or device != "cpu"
    calls: list[str] = []
    changed = results(make(device, dynamics=overriding(Dynamics, method, calls)))
    plain = plain_results(device)
    assert not torch.equal(changed["value"], plain["value"])


def test_sampled_actions(device: str) -> None:
    calls: list[str] = []
    kind = overriding(PolicyValueNetwork, "forward", calls)
    assert_changes("prediction.forward", calls, device, CONTINUOUS, prediction=kind)


def test_hooks_and_swapped_layers(device: str) -> None:
    """A hook and another activation of the dynamics, and a replaced method, before the first search."""
    for change in (add_hook, swap_activation, replace_method):
        muzero = make(device)
        change(muzero)
        changed = results(muzero)
        for name in ("value", "loss/total"):
            assert not torch.equal(changed[name], plain_results(device)[name]), (change.__name__, name)


def add_hook(muzero: MuZero) -> None:
    muzero.model.dynamics.trunk.register_forward_hook(lambda module, inputs, output: output.flip(-1))


def swap_activation(muzero: MuZero) -> None:
    trunk: Any = muzero.model.prediction.trunk
    number = next(number for number, layer in enumerate(trunk) if isinstance(layer, nn.ReLU))
    trunk[number] = nn.Tanh()


def replace_method(muzero: MuZero) -> None:
    dynamics: Any = muzero.model.dynamics
    following = dynamics.following
    dynamics.following = lambda latent, action: following(latent, action).flip(-1)


def test_optimizer(device: str) -> None:
    """A subclass of the usual one whose step does more."""
    calls: list[str] = []

    class Decaying(FlatAdam):
        def step(self, closure: None = None, *, loss: Any = None) -> None:  # type: ignore[override]
            calls.append("step")
            self.weights.mul_(0.99)
            super().step(loss=loss)

    assert_changes("step", calls, device, optimizer=partial(Decaying, eps=1e-8, clip=None))


@pytest.mark.parametrize("step", ["update", "act"])
def test_hooks_after_the_capture(step: str) -> None:
    """A CUDA graph is made anew for a module that was changed since."""
    muzero = make_muzero(action=DISCRETE, compile_=True)
    batch, state = make_batch(muzero), muzero.initial_state(2)
    run = partial(muzero.update, batch, phase=PHASE) if step == "update" else partial(muzero.act, SEEN, state)
    layer = next(part for part in muzero.context.components["dynamics"].modules() if isinstance(part, nn.Linear))
    assert_captured_anew(run, layer)
