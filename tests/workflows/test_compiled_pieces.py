"""Without a GPU: what is compiled there can be traced in one piece, and computes the same.

The compiler's first half runs here; kernels and CUDA graphs need a GPU, and have tests of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.workflows import dreamer_parts, planet_parts, tdmpc_parts
from tests.workflows.dreamer_family import make_v1, make_v2
from tests.workflows.dreamer_parts import CONTINUOUS, make_dreamer
from tests.workflows.planet_parts import make_planet

from rl_lab.kernels.graphs import CapturedStep
from rl_lab.specs import ObservationSpec
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.tdmpc2 import TDMPC2

PHASE = PhaseView("train", "online")
IMAGE = {"image": ObservationSpec("image", (16, 16, 3), "uint8")}
without_latents = partial(dreamer_parts.make_batch, latents=False)
FAMILIES = {  # those in even and those in odd places take about the same time
    "v3_vector": (partial(make_dreamer, bin_limit=3.0), dreamer_parts.make_batch),
    "v1": (make_v1, without_latents),
    "v3_image": (partial(make_dreamer, IMAGE, action=CONTINUOUS, bin_limit=3.0), dreamer_parts.make_batch),
    "tdmpc2": (partial(tdmpc_parts.make_workflow, TDMPC2, latent=32), tdmpc_parts.make_batch),
    "v2": (make_v2, without_latents),
    "planet": (make_planet, planet_parts.make_batch),
    "v1_image": (partial(make_v1, observation=planet_parts.IMAGE, half_images=True), without_latents),
}
PROCESSES = 2


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's paths, without kernels and graphs."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(CapturedStep, "__call__", lambda self, inputs: self._function(dict(inputs)))


@pytest.mark.skipif("RL_LAB_TESTS_COMPILE" in os.environ, reason="runs the others in a process of their own")
def test_pieces_compile() -> None:
    """In processes without the run-time checks of shapes, which the compiler cannot see through: two, for it computes
    little in parallel."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    name = f"{__file__}::{test_compiled_updates_and_decisions_equal_plain_ones.__name__}"
    families = [[f"{name}[{family}]" for family in list(FAMILIES)[first::PROCESSES]] for first in range(PROCESSES)]
    assert sum(map(len, families)) == len(FAMILIES)
    environment, pipes = os.environ | {"RL_LAB_TESTS_COMPILE": "1"}, {"stdout": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([*command, *own], env=environment, **pipes) for own in families]
    outputs = [run.communicate()[0] for run in runs]
    for run, own, output in zip(runs, families, outputs, strict=True):
        assert run.returncode == 0, output[-3000:]
        assert f"{len(own)} passed" in output


@pytest.mark.skipif("RL_LAB_TESTS_COMPILE" not in os.environ, reason="see test_pieces_compile")
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_updates_and_decisions_equal_plain_ones(family: str) -> None:
    make, make_batch = FAMILIES[family]
    results: list[tuple[torch.Tensor, list[np.ndarray]]] = []
    for compile_ in (False, True):
        torch.manual_seed(0)
        workflow: Any = make(compile_=compile_)
        batch = make_batch(workflow)
        torch.manual_seed(1)
        metrics = getattr(workflow, workflow.update_hooks[0])(batch, phase=PHASE).values_vector.clone()
        seen = {key: value[:2, 0].numpy() for key, value in batch.observation.items()}
        state, actions = workflow.initial_state(2), []
        for mode in ("train", "eval"):
            action, state = workflow.act(seen, state, mode=mode)
            actions.append(action)
        results.append((metrics, actions))
    (plain, plain_actions), (compiled, compiled_actions) = results
    torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(compiled_actions, plain_actions, rtol=1e-3, atol=1e-3)
