"""On a GPU the behaviour learns beside the world model, whose gradients wait at its states: the same gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.workflows import dreamer_parts
from tests.workflows.dreamer_family import make_v1, make_v2
from tests.workflows.dreamer_parts import CONTINUOUS, make_dreamer

from rl_lab.specs import ObservationSpec
from rl_lab.workflows.side_by_side import learn_side_by_side

IMAGE = {"image": ObservationSpec("image", (16, 16, 3), "uint8")}
FAMILIES = {
    "v3": make_dreamer,
    "v3_image": partial(make_dreamer, IMAGE, action=CONTINUOUS),
    "v3_without_replayed_values": partial(make_dreamer, loss_scales={"replay_value": 0.0}),
    "v1": make_v1,
    "v2": make_v2,
}


class BranchOnHost:
    """Stands in for a second stream, and keeps what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def fork(self) -> None:
        self.told.append("fork")

    def join(self) -> None:
        self.told.append("join")

    def __enter__(self) -> None:
        self.told.append("enter")

    def __exit__(self, *_: object) -> None:
        self.told.append("leave")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_one_backward_pass(family: str) -> None:
    results = []
    branch = BranchOnHost()
    for branches in ((), (branch,)):
        torch.manual_seed(0)
        workflow: Any = FAMILIES[family]()
        inputs = workflow._inputs(dreamer_parts.make_batch(workflow, latents=bool(workflow.latent_specs)))
        torch.manual_seed(1)
        data = workflow._replayed(inputs)
        if branches:
            total, losses, _, metrics = learn_side_by_side(workflow, data, *branches)
        else:
            losses, _, metrics = workflow.losses(data)
            total = workflow.total(losses)
            total.backward()
        modules = [*workflow.context.components.values(), workflow.actor, workflow.critic]
        grads = {
            f"{type(module).__name__}.{name}": value.grad.clone()
            for module in modules
            for name, value in module.named_parameters()
            if value.grad is not None
        }
        assert grads
        values = {name: value.detach() for name, value in (losses | metrics).items()}
        results.append((list(values), values | grads | {"total": total.detach()}))
    (plain_names, plain), (names, beside) = results
    assert names == plain_names
    assert beside.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(
            beside[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert branch.told[0] == "fork"
    assert branch.told[-1] == "join"


def test_both_sides_run_beside_each_other() -> None:
    """The dream and its losses, and the behaviour's backward pass beside the model's. In between each side waits for
    the other: replayed states learn from the dreams' returns, and the critic has gradients of both."""
    torch.manual_seed(0)
    workflow: Any = make_dreamer()
    branch = BranchOnHost()
    learn_side_by_side(workflow, workflow._replayed(workflow._inputs(dreamer_parts.make_batch(workflow))), branch)
    assert branch.told == ["fork", "enter", "leave", "join", "fork", "enter", "leave", "join"]
