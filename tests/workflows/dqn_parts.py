"""A small DQN with hand-made batches, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.packaged import packaged
from torch import nn

from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.critics.dreamer import SlowTarget
from rl_lab.components.encoders import MultiKeyEncoder
from rl_lab.components.frame_stack import FrameStack
from rl_lab.components.q_functions.dqn import QNetwork
from rl_lab.data_sources.base import DataSource
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dqn import DQN

VECTOR = {"vector": ObservationSpec("vector", (4,), "float32")}
IMAGE = {"image": ObservationSpec("image", (36, 36, 1), "uint8")}
ACTION = ActionSpec("discrete", (1,), (3,))


def make_dqn(
    observation: dict[str, ObservationSpec] = VECTOR,
    *,
    depth: int = 1,
    dueling: bool = False,
    lr: float = 1e-3,
    clip: float | None = 10.0,
    target: tuple[float, int] = (1.0, 250),  # rate, every
    sources: dict[str, DataSource] | None = None,
    action: ActionSpec = ACTION,
    seed: int = 0,
    device: str = "cpu",
    compile_: bool = False,
    workflow: type[DQN] = DQN,
    network: type[QNetwork] = QNetwork,
    encoder: Callable[..., nn.Module] = MultiKeyEncoder,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    **hyperparameters: Any,
) -> DQN:
    torch.manual_seed(0)
    frames = FrameStack(observation=observation, depth=depth)
    encoder_ = encoder(observation=frames.observation, layers=0, depth=4, use_symlog=False, image_encoder="nature")
    q = network(encoder=encoder_, action=action, units=16, layers=2, dueling=dueling).to(device)
    slow = SlowTarget(q, rate=target[0], every=target[1]).to(device)
    trained = [value for value in q.parameters() if value.requires_grad]
    context = WorkflowContext(
        config={}, device=torch.device(device), seed=seed, observation_spec=observation, action_spec=action,
        components={"frame_stack": frames, "target": slow}, controllers=ControllerManager({"q": q}),
        optimizers={"main": optimizer(trained) if optimizer else FlatAdam(trained, lr=lr, eps=1e-8, clip=clip)},
        data_sources=sources or {}, compile=compile_,
    )  # fmt: skip
    dqn = workflow(**(packaged("workflow/dqn") | {"batch_size": 24} | hyperparameters))
    dqn.initialize(context)
    return dqn


def make_batch(workflow: DQN, *, seed: int = 0, weighted: bool = False) -> SequenceBatch:
    """Random records with many episode ends, terminal and truncated."""
    generator = torch.Generator().manual_seed(seed)
    spec = workflow.batch_spec()
    shape = (spec.batch_size, spec.window)
    observation = {}
    for key, own in workflow.context.observation_spec.items():
        if own.kind == "image":
            observation[key] = torch.randint(0, 256, (*shape, *own.shape), generator=generator, dtype=torch.uint8)
        else:
            observation[key] = torch.randn(*shape, *own.shape, generator=generator)
    device = workflow.context.device
    is_last = torch.rand(shape, generator=generator) < 0.3
    is_first = torch.cat([torch.zeros(shape[0], 1, dtype=torch.bool), is_last[:, :-1]], 1)
    is_terminal = is_last & (torch.rand(shape, generator=generator) < 0.5)
    action = torch.randint(0, 3, (*shape, 1), generator=generator, dtype=torch.int32)
    reward = torch.randn(shape, generator=generator)
    return SequenceBatch(
        observation={key: value.to(device) for key, value in observation.items()},
        action=action.to(device),
        reward=reward.to(device),
        is_first=is_first.to(device),
        is_last=is_last.to(device),
        is_terminal=is_terminal.to(device),
        indices=torch.arange(shape[0] * shape[1]).reshape(shape),
        weight=torch.rand(shape[0], generator=generator).to(device) if weighted else None,
    )
