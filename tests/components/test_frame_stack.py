"""Frames that are stored once and stacked later: what the agent sees is what the environment's own stack shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_lab.components.frame_stack import FrameStack
from rl_lab.environments.adapter import LeafConverter
from rl_lab.errors import ConfigError
from rl_lab.specs import ObservationSpec
from rl_lab.workflows.base import Workflow

IMAGE = ObservationSpec("image", (6, 5, 2), "uint8")
VECTOR = ObservationSpec("vector", (2, 3), "float32")
STEPS, DEPTH = 60, 4


def stream(spec: ObservationSpec, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Frames with episodes of 1 to 9 records, their `is_first`, and what the environment's stack shows at each."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 255, (STEPS, *spec.shape)).astype(spec.dtype)
    first = np.zeros(STEPS, bool)
    at = 0
    while at < STEPS:
        first[at] = True
        at += int(rng.integers(1, 10))
    leaf = LeafConverter("key", (), spec, None, DEPTH)
    shown = np.stack([leaf.value(frame, bool(start)) for frame, start in zip(frames, first, strict=True)])
    return frames, first, shown


@pytest.mark.parametrize("spec", [IMAGE, VECTOR], ids=["image", "vector"])
@pytest.mark.parametrize("as_number", [True, False])
def test_a_batch_shows_what_the_environment_would(spec: ObservationSpec, as_number: bool) -> None:
    """From any window with enough records before, at any record, across episodes."""
    frames, first, shown = stream(spec)
    stack = FrameStack(observation={"key": spec}, depth=DEPTH)
    assert stack.context == DEPTH - 1
    assert stack.observation["key"].shape == shown.shape[1:]
    starts, window = np.arange(STEPS - 7), 8
    rows = starts[:, None] + np.arange(window)
    observation = {"key": torch.from_numpy(frames[rows])}
    for position in range(stack.context, window):
        where = position if as_number else torch.full((len(starts),), position)
        seen = stack.at(observation, torch.from_numpy(first[rows]), where)["key"]
        np.testing.assert_array_equal(seen.numpy(), shown[starts + position])


@pytest.mark.parametrize("spec", [IMAGE, VECTOR], ids=["image", "vector"])
def test_acting_shows_what_the_environment_would(spec: ObservationSpec) -> None:
    """The memory is cleared at episode starts as any agent's is, in each environment by itself."""
    streams = [stream(spec, seed) for seed in range(3)]
    stack, workflow = FrameStack(observation={"key": spec}, depth=DEPTH), Workflow()
    memory = stack.initial(3, torch.device("cpu"))
    for step in range(STEPS):
        memory = workflow.reset_state(memory, np.array([first[step] for _, first, _ in streams]))
        frame = {"key": torch.from_numpy(np.stack([frames[step] for frames, _, _ in streams]))}
        seen, memory = stack.push(frame, memory)
        np.testing.assert_array_equal(seen["key"].numpy(), np.stack([shown[step] for _, _, shown in streams]))


def test_only_images_are_stacked_where_there_are_any() -> None:
    """As the environment's stack does; other keys pass as they are."""
    stack = FrameStack(observation={"image": IMAGE, "vector": VECTOR}, depth=3)
    assert stack.observation["image"].shape == (6, 5, 6)
    assert stack.observation["vector"] == VECTOR
    batch = {"image": torch.zeros(2, 5, 6, 5, 2, dtype=torch.uint8), "vector": torch.randn(2, 5, 2, 3)}
    seen = stack.at(batch, torch.zeros(2, 5, dtype=torch.bool), torch.tensor([3, 4]))
    torch.testing.assert_close(seen["vector"], torch.stack([batch["vector"][0, 3], batch["vector"][1, 4]]))


def test_depth_one_keeps_no_memory() -> None:
    """Nothing is stacked, nothing is remembered."""
    stack = FrameStack(observation={"vector": VECTOR}, depth=1)
    assert stack.context == 0
    assert stack.initial(2, torch.device("cpu")) == {}
    with pytest.raises(ConfigError, match="depth=0"):
        FrameStack(observation={"vector": VECTOR}, depth=0)
