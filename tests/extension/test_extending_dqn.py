"""What a researcher overrides in DQN is what runs, on the CPU with kernels on, and captured on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.extension.overriding import assert_captured_anew, assert_differ, overriding
from tests.workflows.dqn_parts import make_batch, make_dqn
from torch import Tensor, nn

from rl_lab.components.encoders import MultiKeyEncoder
from rl_lab.components.q_functions.dqn import QNetwork
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.dqn import DQN

PHASE = PhaseView("train", "online", "replay")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def results(device: str, **parts: Any) -> dict[str, Tensor]:
    """Metrics and parameters after two updates, and the actions of some states; with `auto` compiling on a GPU."""
    dqn = make_dqn(device=device, compile_=device == "cuda", n_step=2, target=(0.5, 1), lr=1e-2, **parts)
    for seed in range(2):
        metrics = dqn.update(make_batch(dqn, seed=seed), phase=PHASE)
    seen = {"vector": np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)}
    found = {name: torch.tensor(float(value)) for name, value in metrics.items()}
    found |= {f"parameter {number}": value.detach().cpu() for number, value in enumerate(dqn.q.parameters())}
    return found | {"action": torch.from_numpy(dqn.act(seen, {}, mode="eval")[0])}


def assert_changes(name: str, calls: list[str], device: str, **parts: Any) -> None:
    """The override was called, and the result is another one."""
    changed = results(device, **parts)
    assert calls, f"{name} was overridden and never called"
    assert_differ(results(device), changed, name)


@pytest.mark.parametrize("method", ["td_loss", "targets", "bootstrap_value"])
def test_workflow(method: str, device: str) -> None:
    calls: list[str] = []
    assert_changes(method, calls, device, workflow=overriding(DQN, method, calls))


def test_double_target(device: str) -> None:
    """The bootstrap of double Q-learning written as an override is that of the setting."""

    class MyDouble(DQN):
        def bootstrap_value(self, observation: Any) -> Tensor:
            best = self.q(observation).argmax(-1)
            return self.target.network(observation)[torch.arange(len(best), device=best.device), best]

    torch.testing.assert_close(results(device, workflow=MyDouble), results(device, double=True))
    assert_differ(results(device), results(device, workflow=MyDouble), "bootstrap_value")


def test_network(device: str) -> None:
    """`forward` of the Q network: in values, targets and actions."""
    calls: list[str] = []
    assert_changes("forward", calls, device, network=overriding(QNetwork, "forward", calls))
    calls.clear()
    dqn = make_dqn(device=device, network=overriding(QNetwork, "forward", calls))
    batch = make_batch(dqn)
    calls.clear()
    dqn.targets(batch)
    assert calls == ["forward"], "the target copy is a copy of the overridden network"


def test_encoder(device: str) -> None:
    """Though the usual encoder hands a vector on as it is."""
    calls: list[str] = []
    assert_changes("encoder", calls, device, encoder=overriding(MultiKeyEncoder, "forward", calls))


def test_hooks_and_swapped_layers(device: str) -> None:
    """A forward hook of a layer, and another activation in its place."""
    calls: list[str] = []

    class Hooked(QNetwork):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.head[0].register_forward_hook(lambda *_: calls.append("hook"))
            self.head[1] = nn.Tanh()

    assert_changes("layers", calls, device, network=Hooked)


def test_optimizer(device: str) -> None:
    """Any of torch's, whose steps are not captured; or a subclass of the usual one whose step does more."""
    calls: list[str] = []

    class Decaying(FlatAdam):
        def step(self, closure: None = None, *, loss: Any = None) -> None:  # type: ignore[override]
            calls.append("step")
            self.weights.mul_(0.99)
            super().step(loss=loss)

    assert_changes("step", calls, device, optimizer=partial(Decaying, lr=1e-2, eps=1e-8, clip=10.0))
    assert_differ(results(device), results(device, optimizer=torch.optim.SGD), "torch's optimiser")


@pytest.mark.parametrize("step", ["update", "act"])
def test_hooks_after_the_capture(step: str) -> None:
    """A CUDA graph is made anew for a module that was changed since."""
    dqn = make_dqn(compile_=True)
    batch, seen = make_batch(dqn), {"vector": np.zeros((3, 4), np.float32)}
    run = {"update": lambda: dqn.update(batch, phase=PHASE), "act": lambda: dqn.act(seen, {}, mode="eval")}[step]
    assert_captured_anew(run, dqn.q.head[0])
