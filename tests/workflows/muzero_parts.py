"""A small MuZero with hand-made batches, for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.frame_stack import FrameStack
from rl_lab.components.muzero.dynamics import Dynamics
from rl_lab.components.muzero.model import Projection, make_slow_model
from rl_lab.components.muzero.prediction import PolicyValueNetwork
from rl_lab.components.muzero.representation import make_representation
from rl_lab.components.planners.mcts import MCTS
from rl_lab.data_sources.base import DataSource
from rl_lab.kernels.registry import enable
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.muzero import MuZero

VECTOR = {"vector": ObservationSpec("vector", (4,), "float32")}
IMAGE = {"image": ObservationSpec("image", (32, 32, 1), "uint8")}
DISCRETE, CONTINUOUS = ActionSpec("discrete", (1,), (3,)), ActionSpec("continuous", (2,))


def make_muzero(
    observation: dict[str, ObservationSpec] = VECTOR,
    action: ActionSpec = DISCRETE,
    *,
    projection: bool = True,
    value_prefix: bool = False,
    depth: int = 1,
    sources: dict[str, DataSource] | None = None,
    planner: dict | None = None,
    limit: float = 20.0,
    lr: float = 1e-3,
    device: str = "cpu",
    compile_: bool = False,
    kinds: dict[str, Callable[..., Any]] | None = None,  # other classes for some parts
    **settings,
) -> MuZero:
    """With `kinds`, even empty, the parts take the kernels that suit them, as those of a run do."""
    torch.manual_seed(0)
    chosen = {
        "dynamics": Dynamics, "prediction": PolicyValueNetwork, "planner": MCTS, "workflow": MuZero,
        "optimizer": partial(FlatAdam, eps=1e-8, clip=None), **(kinds or {}),
    }  # fmt: skip
    frames = FrameStack(observation=observation, depth=depth)
    representation = make_representation(
        observation=frames.observation, latent_size=12, units=16, channels=8, mask=action.mask
    )
    if "representation" in chosen:
        representation.__class__ = chosen["representation"]
    shape = representation.latent_shape
    dynamics = chosen["dynamics"](
        latent_shape=shape, action_size=action.encoded_size, units=16, head_units=8, bins=21, limit=10.0,
        value_prefix=value_prefix, prefix_length=2, prefix_units=8,
    )  # fmt: skip
    prediction = chosen["prediction"](latent_shape=shape, action=action, units=16, head_units=8, bins=41, limit=limit)
    components = {"frame_stack": frames, "representation": representation, "dynamics": dynamics}
    components["prediction"] = prediction
    model_parts = [representation, dynamics]
    if projection:
        components["projection"] = Projection(latent_size=representation.latent_size, units=16, hidden=8)
        model_parts.append(components["projection"])
    components["slow_model"] = make_slow_model(
        representation=representation, dynamics=dynamics, prediction=prediction, every=2
    )
    sampled = None if action.kind == "discrete" else 4
    arguments = {"simulations": 4, "sampled_actions": sampled, "players": settings.get("players", 1)}
    search = chosen["planner"](action=action, **(arguments | (planner or {})))
    search.to(device)
    for part in components.values():
        part.to(device)
    if kinds is not None:
        enable({**components, "planner": search}, device=torch.device(device))
    trained = [value for part in model_parts for value in part.parameters()]
    context = WorkflowContext(
        config={}, device=torch.device(device), compile=compile_, seed=0,
        observation_spec=observation, action_spec=action, components=components,
        controllers=ControllerManager({"planner": search}), data_sources=sources or {},
        optimizers={
            "model": chosen["optimizer"](trained, lr=lr),
            "prediction": chosen["optimizer"](list(prediction.parameters()), lr=lr),
        },
    )  # fmt: skip
    workflow = chosen["workflow"](**({"batch_size": 12, "unroll": 3, "td_steps": 4} | settings))
    workflow.initialize(context)
    return workflow


def make_batch(workflow: MuZero, *, seed: int = 0, weighted: bool = False) -> SequenceBatch:
    """Random records with many episode ends, terminal and truncated."""
    generator = torch.Generator().manual_seed(seed)
    spec, action_spec = workflow.batch_spec(), workflow.context.action_spec
    shape = (spec.batch_size, spec.window)
    observation = {}
    for key, own in workflow.context.observation_spec.items():
        if own.kind == "image":
            observation[key] = torch.randint(0, 256, (*shape, *own.shape), generator=generator, dtype=torch.uint8)
        elif key == action_spec.mask:
            observation[key] = torch.ones(*shape, *own.shape)
        else:
            observation[key] = torch.randn(*shape, *own.shape, generator=generator)
    is_last = torch.rand(shape, generator=generator) < 0.2
    is_terminal = is_last & (torch.rand(shape, generator=generator) < 0.5)
    if action_spec.kind == "discrete":
        action = torch.randint(0, 3, (*shape, 1), generator=generator, dtype=torch.int32)
    else:
        action = torch.rand(*shape, *action_spec.shape, generator=generator) * 2.0 - 1.0
    extras = {}
    for name, field in workflow.record_specs().items():
        value = torch.rand(*shape, *field.shape, generator=generator)
        extras[name] = value / value.sum(-1, keepdim=True) if name == "search.policy" else value
    batch = SequenceBatch(
        observation=observation,
        action=action,
        reward=torch.randn(shape, generator=generator),
        is_first=torch.cat([torch.zeros(shape[0], 1, dtype=torch.bool), is_last[:, :-1]], 1),
        is_last=is_last,
        is_terminal=is_terminal,
        extras=extras,
        indices=torch.arange(shape[0] * shape[1]).reshape(shape),
        weight=torch.rand(shape[0], generator=generator) if weighted else None,
    )
    device = workflow.context.device
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    moved = {name: value.to(device) for name, value in tensors.items() if name != "indices"}
    for name in ("observation", "extras"):
        moved[name] = {key: value.to(device) for key, value in getattr(batch, name).items()}
    return replace(batch, **moved)
