"""What a workflow says that it plans is what it does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.workflows.planet_parts import make_planet
from tests.workflows.tdmpc_parts import make_workflow as make_tdmpc
from tests.workflows.test_mbmpc import CONTINUOUS, make_mbmpc


@pytest.mark.parametrize(
    "make", [make_planet, make_tdmpc, lambda: make_mbmpc(CONTINUOUS)], ids=["planet", "tdmpc2", "mbmpc"]
)
def test_acting_follows_the_plan(make):
    """`plan` shows the plan whose first action `act` takes, from the same memory under the same draws."""
    workflow = make()
    rng = np.random.default_rng(0)
    observation = {}
    for key, spec in workflow.context.observation_spec.items():
        values = rng.integers(0, 256, (2, *spec.shape)) if spec.kind == "image" else rng.normal(size=(2, *spec.shape))
        observation[key] = values.astype(spec.dtype)
    _, state = workflow.act(observation, workflow.initial_state(2), mode="eval")
    torch.manual_seed(0)
    plan, _ = workflow.plan(observation, state)
    torch.manual_seed(0)
    action, _ = workflow.act(observation, state, mode="eval")
    np.testing.assert_allclose(workflow.codec.decode(plan.action).numpy(), action, atol=1e-5)
    assert plan.value.shape == (2,)
