"""On a GPU: captured updates and searches are the plain ones, and an update does not wait for the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.workflows.muzero_parts import IMAGE, VECTOR, make_batch, make_muzero

from rl_lab.kernels.registry import enable
from rl_lab.records import SequenceBatch
from rl_lab.workflows.context import PhaseView

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PHASE = PhaseView("train", "online", "replay")
VARIANTS = {
    "vectors": {"observation": VECTOR, "planner": {"noise_share": 0.0}},
    "efficientzero": {
        "observation": IMAGE, "depth": 2, "value_prefix": True, "reanalyze": 0.5, "correction_interval": 20,
        "planner": {"rule": "gumbel"},
    },
}  # fmt: skip


class Written:
    """Notes what it is told, in the place of a replay."""

    def __init__(self) -> None:
        self.told: list[dict[str, torch.Tensor]] = []

    def update(self, indices: torch.Tensor, fields: dict[str, torch.Tensor]) -> None:
        self.told.append({name: value.clone() for name, value in fields.items()})


def made(variant: str, *, compile_: bool):
    source = Written()
    workflow = make_muzero(**VARIANTS[variant], device="cuda", compile_=compile_, sources={"replay": source})
    for planner in (workflow.planner, workflow.target_maker.planner):
        enable({"planner": planner}, device=torch.device("cuda"))
        assert planner.kernel("_walker") is not None
    return workflow, source


def one_episode(workflow, seed: int) -> SequenceBatch:
    """Records without ends: after an end actions are random."""
    batch = make_batch(workflow, seed=seed, weighted=True)
    never = torch.zeros_like(batch.is_last)
    return replace(batch, is_first=never, is_last=never, is_terminal=never)


@pytest.mark.parametrize("variant", VARIANTS)
def test_captured_equals_plain(variant: str) -> None:
    """The same metrics over four updates, the same new searches and priorities, the same greedy choices."""
    histories, told, chosen = [], [], []
    for compile_ in (False, True):
        workflow, source = made(variant, compile_=compile_)
        workflow.model.representation.augment = lambda observation: observation
        batches = [one_episode(workflow, seed) for seed in range(4)]
        histories.append([workflow.update(batch, phase=PHASE).values_vector.clone() for batch in batches])
        told.append([value for fields in source.told for value in fields.values()])
        state, actions = workflow.initial_state(5), []
        for time in range(3):
            seen = {key: value[:5, time].cpu().numpy() for key, value in batches[0].observation.items()}
            action, state = workflow.act(seen, state)
            actions.append(action)
        chosen.append(np.stack(actions))
    assert all(graph._graph is not None for graph in workflow._graphs.values()), "a step could not be captured"
    for plain, captured in zip(histories[0] + told[0], histories[1] + told[1], strict=True):
        torch.testing.assert_close(captured, plain, rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(*chosen)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_update_does_not_wait_for_the_gpu(variant: str) -> None:
    """Once it is captured; the priorities of the update before may have to be waited for, by their event alone."""
    workflow, _ = made(variant, compile_=True)
    batch = make_batch(workflow, weighted=True)
    workflow.update(batch, phase=PHASE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            workflow.update(batch, phase=PHASE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
