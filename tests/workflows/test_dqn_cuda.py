"""On a GPU: captured updates and choices are the plain ones, and nothing waits for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dqn_parts import IMAGE, VECTOR, make_batch, make_dqn

from rl_lab.workflows.context import PhaseView

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PHASE = PhaseView("train", "online", "replay")


class Priorities:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[torch.Tensor] = []

    def update(self, indices: torch.Tensor, fields: dict[str, torch.Tensor]) -> None:
        self.told.append(fields["priority"].clone())


@pytest.mark.parametrize(("observation", "depth"), [(VECTOR, 1), (IMAGE, 4)], ids=["vector", "image"])
@pytest.mark.parametrize("weighted", [False, True])
def test_captured_equals_plain(observation: dict, depth: int, weighted: bool) -> None:
    """The same metrics over four updates with a moving target, the same late priorities, the same choices."""
    histories, told, chosen = [], [], []
    for compile_ in (False, True):
        source = Priorities()
        workflow = make_dqn(
            observation, depth=depth, n_step=3, double=True, dueling=True, target=(1.0, 2), device="cuda",
            compile_=compile_, sources={"replay": source},  # type: ignore[dict-item]
        )  # fmt: skip
        batches = [make_batch(workflow, seed=seed, weighted=weighted) for seed in range(4)]
        histories.append([workflow.update(batch, phase=PHASE).values_vector.clone() for batch in batches])  # type: ignore[attr-defined]
        told.append(source.told)
        state, actions = workflow.initial_state(5), []
        for time in range(3):
            seen = {key: value[:5, time].cpu().numpy() for key, value in batches[0].observation.items()}
            action, state = workflow.act(seen, state)
            actions.append(action)
        chosen.append(np.stack(actions))
    for plain, captured in zip(*histories, strict=True):
        torch.testing.assert_close(captured, plain, rtol=1e-3, atol=1e-3)
    assert len(told[0]) == (3 if weighted else 0)
    for plain, captured in zip(*told, strict=True):
        torch.testing.assert_close(captured, plain, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(*chosen)


def test_an_update_does_not_wait_for_the_gpu() -> None:
    """Once it is captured; the priorities of the update before may have to be waited for, by their event alone."""
    workflow = make_dqn(IMAGE, depth=4, device="cuda", compile_=True, sources={"replay": Priorities()})  # type: ignore[dict-item]
    batch = make_batch(workflow, weighted=True)
    workflow.update(batch, phase=PHASE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            workflow.update(batch, phase=PHASE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
