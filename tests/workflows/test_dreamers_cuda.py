"""On a GPU: the captured, compiled updates of Dreamer v1, v2 and v3 of 2023 do what the plain ones do."""

from __future__ import annotations

import pytest
import torch
from tests.workflows.dreamer_family import make_v1, make_v2, make_v3_2023
from tests.workflows.dreamer_parts import CONTINUOUS, DISCRETE, make_batch

from rl_lab.workflows.context import PhaseView

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PHASE = PhaseView("train", "online")


@pytest.mark.parametrize("action", [DISCRETE, CONTINUOUS])
@pytest.mark.parametrize("make", [make_v1, make_v2, make_v3_2023])
def test_captured_updates_equal_plain_ones(make, action):
    """Three updates in float32 from the same random stream: the same losses, and the warm-up leaves no trace."""
    histories = []
    for compile_ in (False, True):
        workflow = make(action=action, device="cuda", compile_=compile_)
        batch = make_batch(workflow, latents=False, device="cuda")
        torch.cuda.manual_seed(0)
        histories.append([workflow.update(batch, phase=PHASE).values_vector.clone() for _ in range(3)])
    for plain, captured in zip(*histories, strict=True):
        torch.testing.assert_close(captured, plain, rtol=1e-3, atol=1e-3)
