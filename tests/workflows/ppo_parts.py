"""A small PPO with hand-made rollouts, for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from tests.packaged import packaged
from torch import Tensor, nn

from rl_lab.components.actors.ppo import ValueHead, make_policy
from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.encoders import MultiKeyEncoder
from rl_lab.components.memories import GRUMemory
from rl_lab.components.normalizers import ObservationNormalizer, RewardNormalizer
from rl_lab.data_sources.stream import StreamSource
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.records import Rollout, RolloutBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.ppo import PPO

VECTOR = {"vector": ObservationSpec("vector", (2,), "float32")}
DISCRETE, CONTINUOUS = ActionSpec("discrete", (1,), (3,)), ActionSpec("continuous", (2,))
MULTI = ActionSpec("discrete", (2,), (3, 4))
PHASE = PhaseView("train", "online", data_source="stream")
POLICY = packaged("controllers/policies/auto") | {"units": 8, "output_gain": 1.0}
VALUE = packaged("controllers/critics/value") | {"units": 8}


def make_ppo(
    action: ActionSpec = DISCRETE,
    observation: dict[str, ObservationSpec] | None = None,
    *,
    recurrent: bool = False,
    normalized: bool = False,
    lr: float = 1e-2,
    device: str = "cpu",
    workflow: type[PPO] = PPO,
    components: dict[str, nn.Module] | None = None,
    controllers: dict[str, nn.Module] | None = None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    **hyperparameters: Any,
) -> PPO:
    """`components`, `controllers` and `optimizer` take the place of the usual ones."""
    torch.manual_seed(0)
    observation = observation or VECTOR
    encoder = MultiKeyEncoder(observation=observation, layers=0, image_encoder="nature", depth=4, use_symlog=False)
    parts: dict[str, nn.Module] = {"encoder": encoder} | (components or {})
    size = int(parts["encoder"].output_size)
    if recurrent:
        parts["memory"] = GRUMemory(input_size=size, units=5)
        size = 5
    if normalized:
        parts["observation_normalizer"] = ObservationNormalizer(observation=observation, clip=10.0)
        parts["reward_normalizer"] = RewardNormalizer(discount=0.9, clip=10.0)
    heads = {
        "policy": make_policy(action=action, feature_size=size, **POLICY),
        "critic": ValueHead(feature_size=size, **VALUE),
    } | (controllers or {})
    modules = [module.to(device) for module in [*parts.values(), *heads.values()]]
    parameters = [p for module in modules for p in module.parameters()]
    context = WorkflowContext(
        config={}, device=torch.device(device), seed=0, observation_spec=observation, action_spec=action,
        components=parts, controllers=ControllerManager(heads), compile=device == "cuda",
        optimizers={"main": optimizer(parameters) if optimizer else FlatAdam(parameters, lr=lr, eps=1e-5, clip=0.5)},
        data_sources={"stream": StreamSource(length=128, epochs=4)},
    )  # fmt: skip
    settings = packaged("workflow/ppo") | {"batch_size": 4, "discount": 0.9, "lambda_": 0.8} | hyperparameters
    ppo = workflow(**settings)
    ppo.initialize(context)
    return ppo


def make_rollout(workflow: PPO, *, time: int = 6, envs: int = 2, seed: int = 0, number: int = 0) -> Rollout:
    """Random decisions; environment 0 terminates after decision 1, environment 1 is truncated after decision 3."""
    torch.manual_seed(seed)
    spec, observation = workflow.context.action_spec, {}
    for key, entry in workflow.context.observation_spec.items():
        shape = (time, envs, *entry.shape)
        image = entry.kind == "image"
        observation[key] = torch.randint(0, 256, shape, dtype=torch.uint8) if image else torch.randn(shape)
    if spec.kind == "discrete":
        action = torch.stack([torch.randint(0, n, (time, envs), dtype=torch.int32) for n in spec.classes], -1)
    else:
        action = torch.randn(time, envs, *spec.shape) * 2.0
    is_last, is_terminal = torch.zeros(time, envs, dtype=torch.bool), torch.zeros(time, envs, dtype=torch.bool)
    is_last[1, 0] = is_terminal[1, 0] = is_last[3, 1] = True
    is_first = torch.zeros(time, envs, dtype=torch.bool)
    is_first[2, 0] = is_first[4, 1] = True
    extras = {}
    if workflow.memory is not None:
        extras["memory"] = torch.randn(time, envs, workflow.memory.output_size)
    rollout = Rollout(
        number=number, observation=observation, action=action, is_first=is_first, reward=torch.randn(time, envs),
        is_last=is_last, is_terminal=is_terminal, extras=extras,
        following={key: value[0] + 1 for key, value in observation.items()},
        following_first=torch.zeros(envs, dtype=torch.bool),
        cut={key: value[:1, 0] + 2 for key, value in observation.items()},
        cut_indices=torch.tensor([3 * envs + 1]),
    )  # fmt: skip
    device = workflow.context.device
    return replace(rollout, **{field.name: _moved(getattr(rollout, field.name), device) for field in fields(rollout)})


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: part.to(device) for key, part in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def whole(rollout: Rollout, *, sequence: int = 1, is_final: bool = True) -> RolloutBatch:
    """Every decision in one minibatch."""
    time, envs = rollout.reward.shape
    starts = torch.cat([torch.arange(envs) + start * envs for start in range(0, time, sequence)])
    indices = starts[:, None] + torch.arange(sequence) * envs
    return RolloutBatch(rollout, indices.to(rollout.reward.device), 0, is_final)
