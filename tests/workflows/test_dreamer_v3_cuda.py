"""On a GPU: the captured, compiled update does what the plain one does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.workflows.dreamer_parts import CONTINUOUS, DISCRETE, make_batch, make_dreamer

from rl_lab.nn.two_hot import TwoHot
from rl_lab.workflows.context import PhaseView

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PHASE = PhaseView("train", "online")
FLAGS = ("is_first", "is_last", "is_terminal")


def test_compiled_two_hot_loss_equals_the_plain_one():
    """Inductor once placed every target one bin too high."""
    two_hot = TwoHot().cuda()
    logits, target = torch.randn(512, 255, device="cuda"), 10.0 * torch.randn(512, device="cuda")
    torch.testing.assert_close(torch.compile(two_hot.loss)(logits, target), two_hot.loss(logits, target))


@pytest.mark.parametrize("action", [DISCRETE, CONTINUOUS])
def test_captured_updates_equal_plain_ones(action):
    """Three updates in float32 from the same random stream: the same losses, and the warm-up leaves no trace."""
    histories = []
    for compile_ in (False, True):
        workflow = make_dreamer(action=action, device="cuda", compile_=compile_)
        batch = make_batch(workflow)
        batch = dataclasses.replace(
            batch,
            **{
                name: getattr(batch, name).cuda() for name in ("action", "reward", "is_first", "is_last", "is_terminal")
            },
            observation={key: value.cuda() for key, value in batch.observation.items()},
            extras={key: value.cuda() for key, value in batch.extras.items()},
        )
        torch.cuda.manual_seed(0)
        histories.append([workflow.update(batch, phase=PHASE).values_vector.clone() for _ in range(3)])
    for plain, captured in zip(*histories, strict=True):
        torch.testing.assert_close(captured, plain, rtol=1e-3, atol=1e-3)
