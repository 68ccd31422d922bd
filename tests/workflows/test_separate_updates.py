"""The world model and the behaviour of each Dreamer can learn apart, on the code of the joint update."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.workflows.dreamer_family import make_v1, make_v2, make_v3_2023
from tests.workflows.dreamer_parts import make_batch, make_dreamer
from torch import Tensor

from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.workflows.context import PhaseView

PHASE = PhaseView("train", "offline")
FAMILY = {"v1": make_v1, "v2": make_v2, "v3_2023": make_v3_2023, "v3": partial(make_dreamer, lr=1e-3)}


@pytest.fixture(params=FAMILY)
def workflow(request: pytest.FixtureRequest) -> Any:
    return FAMILY[request.param]()


def batch_for(workflow: Any, seed: int = 0) -> Any:
    return make_batch(workflow, seed=seed, latents=bool(workflow.latent_specs))


def model_state(workflow: Any) -> dict[str, Tensor]:
    return _state(workflow.context.components)


def behaviour_state(workflow: Any) -> dict[str, Tensor]:
    return _state({"actor": workflow.actor, "critic": workflow.critic})


def _state(parts: Any) -> dict[str, Tensor]:
    return {f"{name}.{key}": p.clone() for name, part in parts.items() for key, p in part.named_parameters()}


def differs(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return any(not torch.equal(before[name], after[name]) for name in before)


def test_each_update_moves_its_own_side_alone(workflow: Any) -> None:
    """Momentum of earlier joint updates included: what does not learn now, stays."""
    workflow.update(batch_for(workflow), phase=PHASE)
    model, behaviour = model_state(workflow), behaviour_state(workflow)
    metrics = workflow.update_world_model(batch_for(workflow, 1), phase=PHASE)
    assert "loss/observation" in metrics
    assert "loss/policy" not in metrics
    assert differs(model, model_state(workflow))
    assert not differs(behaviour, behaviour_state(workflow))
    model = model_state(workflow)
    for _ in range(2):
        metrics = workflow.update_controller(batch_for(workflow, 2), phase=PHASE)
    assert "loss/policy" in metrics
    assert "loss/observation" not in metrics
    assert not differs(model, model_state(workflow))
    assert differs(behaviour, behaviour_state(workflow))


def test_dreams_start_where_the_model_has_just_filtered(workflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch of a cycle is filtered once; another batch is filtered anew, without a gradient."""
    calls = []
    plain = workflow.filter
    monkeypatch.setattr(workflow, "filter", lambda data: calls.append(torch.is_grad_enabled()) or plain(data))
    batch = batch_for(workflow)
    workflow.update_world_model(batch, phase=PHASE)
    workflow.update_controller(batch, phase=PHASE)
    assert calls == [True]
    workflow.update_controller(batch_for(workflow, 1), phase=PHASE)
    assert calls == [True, False]


def test_the_model_steps_before_it_dreams_where_the_original_does() -> None:
    """In DreamerV2 and in DreamerV3 of 2023 dreams are those of the stepped model; in v1 and v3 of the one before."""
    for name, make in FAMILY.items():
        workflow: Any = make()
        before, seen = model_state(workflow), {}
        plain = workflow.dream

        def dream(start: Any, workflow: Any = workflow, seen: dict = seen, plain: Any = plain) -> Any:
            seen["model"] = model_state(workflow)
            return plain(start)

        workflow.dream = dream
        workflow.update(batch_for(workflow), phase=PHASE)
        assert differs(before, seen["model"]) == (name in ("v2", "v3_2023")), name


def test_an_optimiser_of_both_sides_that_cannot_be_split_is_named() -> None:
    workflow = make_dreamer()
    parts = [*workflow.context.components.values(), workflow.actor, workflow.critic]
    workflow.optimizers.optimizers["main"] = FlatAdam(
        [p for part in parts for p in part.parameters() if p.requires_grad], lr=1e-3, eps=1e-8, clip=None
    )
    with pytest.raises(Exception, match=r"optimizers\.main holds parameters of the world model and of the behaviour"):
        workflow.update_world_model(batch_for(workflow), phase=PHASE)
