"""On a GPU: captured, compiled updates and plans do what the plain ones do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.workflows.tdmpc_parts import CONTINUOUS, DISCRETE, IMAGE, VECTOR, make_batch, make_workflow

from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.tdmpc import TDMPC
from rl_lab.workflows.tdmpc2 import TDMPC2

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PHASE = PhaseView("train", "online")


@pytest.mark.parametrize("kind", [TDMPC2, TDMPC])
@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize("observation", [VECTOR, IMAGE], ids=["vector", "image"])
def test_captured_equals_plain(kind, action, observation):
    """The same metrics over three updates and the same actions, from the same random stream."""
    torch.compiler.reset()
    histories, decisions = [], []
    for compile_ in (False, True):
        workflow = make_workflow(
            kind, action, observation=observation, latent=32, dropout=0.1, device="cuda", compile_=compile_
        )
        batch = make_batch(workflow, weighted=kind is TDMPC)
        torch.cuda.manual_seed(0)
        histories.append([workflow.update(batch, phase=PHASE).values_vector.clone() for _ in range(3)])
        seen = {key: value[:4, 0].cpu().numpy() for key, value in batch.observation.items()}
        state, chosen = workflow.initial_state(4), []
        torch.cuda.manual_seed(1)
        for _ in range(3):
            choice, state = workflow.act(seen, state, mode="eval")
            chosen.append(choice)
        decisions.append(np.stack(chosen))
    for plain, captured in zip(*histories, strict=True):
        torch.testing.assert_close(captured, plain, rtol=1e-3, atol=1e-3)
    if action is DISCRETE:  # of choices that are worth nearly the same, rounding decides
        assert (decisions[0] == decisions[1]).mean() > 0.9
    else:
        np.testing.assert_allclose(decisions[0], decisions[1], rtol=1e-2, atol=1e-2)


def test_plans_in_float16_are_worth_what_the_plain_ones_are():
    """Where products may be short, plans are computed with short weights, those of the last update."""
    torch.compiler.reset()
    returns = []
    torch.set_float32_matmul_precision("high")
    try:
        for compile_ in (False, True):
            workflow = make_workflow(units=64, latent=64, device="cuda", compile_=compile_)
            batch = make_batch(workflow)
            torch.cuda.manual_seed(0)
            for _ in range(20):
                workflow.update(batch, phase=PHASE)
            seen = {"vector": batch.observation["vector"][:4, 0].cpu().numpy()}
            torch.cuda.manual_seed(1)
            plan, _ = workflow.plan(seen, workflow.initial_state(4))
            returns.append(plan.returns)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert workflow.simulator.model.latent_output.linear.weight.dtype == torch.float16
    torch.testing.assert_close(returns[1], returns[0], rtol=0.02, atol=0.02)


def test_plans_for_another_number_of_environments():
    """Evaluation has its own; a graph is captured for each, and they do not disturb one another."""
    workflow = make_workflow(device="cuda", compile_=True)
    for num_envs in (4, 2, 4, 1):
        seen = {"vector": np.ones((num_envs, 4), np.float32)}
        chosen, state = workflow.act(seen, workflow.initial_state(num_envs), mode="train")
        assert chosen.shape == (num_envs, 2)
        assert state["plan_mean"].shape[0] == num_envs
