"""On a GPU: the captured, compiled update and the captured acting do what the plain ones do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.workflows.dreamer_parts import CONTINUOUS, DISCRETE, make_batch, make_dreamer

from rl_lab.nn.distributions import TwoHot
from rl_lab.specs import ObservationSpec
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.dreamer_v3 import DreamerV3

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PHASE = PhaseView("train", "online")
IMAGE = {"image": ObservationSpec("image", (16, 16, 3), "uint8")}
# The outermost bins of the usual two-hot range stand for ±5·10⁸: the mean of an untrained head, where all are equally
# likely, then consists of rounding errors.
NARROW = {"bin_limit": 3.0}
# Large enough for the fused kernels.
FUSED = {"deter": 512, "hidden": 64, "groups": 16, "classes": 4, "units": 64, "depth": 4}


def updates(workflow: DreamerV3, count: int) -> list[dict[str, float]]:
    batch, history = make_batch(workflow, device="cuda"), []
    torch.cuda.manual_seed(0)
    for _ in range(count):
        metrics = workflow.update(batch, phase=PHASE)
        history.append(dict(zip(metrics.names, metrics.values_vector.tolist(), strict=True)))
    return history


def test_compiled_two_hot_loss_equals_the_plain_one():
    """Inductor once placed every target one bin too high."""
    two_hot = TwoHot().cuda()
    logits, target = torch.randn(512, 255, device="cuda"), 10.0 * torch.randn(512, device="cuda")
    torch.testing.assert_close(torch.compile(two_hot.loss)(logits, target), two_hot.loss(logits, target))


@pytest.mark.parametrize("action", [DISCRETE, CONTINUOUS])
def test_captured_updates_equal_plain_ones(action):
    """Three updates in float32 from the same random stream: the same losses, and the warm-up leaves no trace."""
    plain, captured = (
        updates(make_dreamer(action=action, device="cuda", compile_=compile_, **NARROW), 3)
        for compile_ in (False, True)
    )
    for left, right in zip(captured, plain, strict=True):
        assert left == pytest.approx(right, rel=2e-3, abs=2e-3)


def test_captured_updates_in_half_precision_stay_close_to_plain_ones():
    """The fused kernels, the working copies of dreams and the rewritten convolution, in a whole update. Rounding
    changes some samples, so losses agree as averages do."""
    plain, captured = (
        updates(
            make_dreamer(IMAGE, device="cuda", sizes=FUSED, compile_=compile_, autocast_dtype=torch.bfloat16, **NARROW),
            2,
        )
        for compile_ in (False, True)
    )
    for left, right in zip(captured, plain, strict=True):
        for name in ("loss/observation", "loss/reward", "loss/continue", "loss/value", "loss/total"):
            assert left[name] == pytest.approx(right[name], rel=0.05), name
        assert left["optimizer/grad_norm"] == pytest.approx(right["optimizer/grad_norm"], rel=0.2)


@pytest.mark.parametrize("action", [DISCRETE, CONTINUOUS])
def test_captured_acting_equals_plain_acting(action):
    """The same actions and states from the same random stream, whatever the number of environments and the mode of the
    calls in between."""
    histories = []
    for compile_ in (False, True):
        workflow = make_dreamer(IMAGE, action=action, device="cuda", compile_=compile_)
        rng, states, history = np.random.default_rng(0), {}, []
        torch.cuda.manual_seed(0)
        for envs, mode in [(1, "train"), (4, "train"), (4, "eval"), (1, "train"), (4, "train"), (4, "eval")]:
            observation = {"image": rng.integers(0, 256, (envs, 16, 16, 3), dtype=np.uint8)}
            state = states.get((envs, mode), workflow.initial_state(envs))
            chosen, states[envs, mode] = workflow.act(observation, state, mode=mode)
            history.append((chosen, {name: value.cpu() for name, value in states[envs, mode].items()}))
        histories.append(history)
    for (plain, plain_state), (captured, captured_state) in zip(*histories, strict=True):
        np.testing.assert_allclose(captured, plain, atol=1e-5)
        torch.testing.assert_close(captured_state, plain_state, rtol=1e-5, atol=1e-5)
