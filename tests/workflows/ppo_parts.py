"""A small PPO with hand-made rollouts, for tests."""

from __future__ import annotations

import torch

from rl_lab.components.controllers.manager import ControllerManager
from rl_lab.components.controllers.policies import ValueHead, make_policy
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


def make_ppo(
    action: ActionSpec = DISCRETE,
    observation: dict[str, ObservationSpec] | None = None,
    *,
    recurrent: bool = False,
    normalized: bool = False,
    lr: float = 1e-2,
    **hyperparameters,
) -> PPO:
    torch.manual_seed(0)
    observation = observation or VECTOR
    encoder = MultiKeyEncoder(observation=observation, layers=0, image_encoder="nature", depth=4, use_symlog=False)
    components: dict[str, torch.nn.Module] = {"encoder": encoder}
    size = encoder.output_size
    if recurrent:
        components["memory"] = GRUMemory(input_size=size, units=5)
        size = 5
    if normalized:
        components["observation_normalizer"] = ObservationNormalizer(observation=observation)
        components["reward_normalizer"] = RewardNormalizer(discount=0.9)
    controllers = {
        "policy": make_policy(action=action, feature_size=size, units=8, output_gain=1.0),
        "critic": ValueHead(feature_size=size, units=8),
    }
    modules = [*components.values(), *controllers.values()]
    parameters = [p for module in modules for p in module.parameters()]
    context = WorkflowContext(
        config={}, device=torch.device("cpu"), seed=0, observation_spec=observation, action_spec=action,
        components=components, controllers=ControllerManager(controllers),
        optimizers={"main": FlatAdam(parameters, lr=lr, eps=1e-5, clip=0.5)}, data_sources={"stream": StreamSource()},
    )  # fmt: skip
    workflow = PPO(**({"batch_size": 4, "discount": 0.9, "lambda_": 0.8} | hyperparameters))
    workflow.initialize(context)
    return workflow


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
    return Rollout(
        number=number, observation=observation, action=action, is_first=is_first, reward=torch.randn(time, envs),
        is_last=is_last, is_terminal=is_terminal, extras=extras,
        following={key: value[0] + 1 for key, value in observation.items()},
        following_first=torch.zeros(envs, dtype=torch.bool),
        cut={key: value[:1, 0] + 2 for key, value in observation.items()},
        cut_indices=torch.tensor([3 * envs + 1]),
    )  # fmt: skip


def whole(rollout: Rollout, *, sequence: int = 1, is_final: bool = True) -> RolloutBatch:
    """Every decision in one minibatch."""
    time, envs = rollout.reward.shape
    starts = torch.cat([torch.arange(envs) + start * envs for start in range(0, time, sequence)])
    return RolloutBatch(rollout, starts[:, None] + torch.arange(sequence) * envs, 0, is_final)
