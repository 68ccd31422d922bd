"""Plans of TD-MPC2 with short weights and kernels of their own, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.workflows.tdmpc_parts import CONTINUOUS, DISCRETE, make_workflow, randomize

from rl_lab.kernels import registry
from rl_lab.specs import ActionSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever there are some; nothing is compiled."""
    pytest.importorskip("triton")
    candidates = registry._candidates
    monkeypatch.setattr(registry, "_candidates", lambda module, device: candidates(module, torch.device("cuda")))
    monkeypatch.setattr("rl_lab.simulation.tdmpc.compile_block", lambda function, **_: function)


@pytest.mark.parametrize("episodic", [True, False])
@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_plans_with_kernels_are_worth_what_the_plain_ones_are(action: ActionSpec, episodic: bool) -> None:
    """The same noise, the same candidates, and returns that differ by the rounding of products alone."""
    workflow = make_workflow(action=action, episodic=episodic, units=24, latent=32, device=DEVICE)
    randomize(workflow.model, workflow.q, workflow.policy, scale=0.1)
    simulator, seen = workflow.simulator, {"vector": torch.randn(3, 4, device=DEVICE)}
    candidates, returns = torch.rand(3, 16, 3, action.encoded_size, device=DEVICE), []
    for _ in range(2):
        torch.manual_seed(1)
        with torch.no_grad():
            latent = simulator.observe(seen)
            returns.append(workflow.planner.score(latent, candidates))
        simulator.compile_blocks(torch.float16)
    layers = [part for part in simulator.model.modules() if isinstance(part, registry.Accelerated)]
    assert all(layer.kernels for layer in layers)
    assert returns[0].std() > 0.01
    torch.testing.assert_close(returns[1], returns[0], rtol=0.02, atol=0.02)


def test_gradients_take_the_plain_layers() -> None:
    """The kernels have no derivative: a planner that climbs the return gets the one of the layers."""
    workflow = make_workflow(units=24, latent=32, device=DEVICE)
    randomize(workflow.model, workflow.q, workflow.policy, scale=0.1)
    workflow.simulator.compile_blocks(torch.float16)
    latent = workflow.simulator.observe({"vector": torch.randn(1, 4, device=DEVICE)}).detach()
    candidates = torch.rand(1, 4, 3, 2, device=DEVICE, requires_grad=True)
    (gradient,) = torch.autograd.grad(workflow.planner.score(latent, candidates).sum(), candidates)
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0
