"""A small DreamerV3 with hand-made batches, for tests."""

from __future__ import annotations

import torch
from tests.packaged import adjusted

from rl_lab.components.actors.dreamer import make_actor
from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.critics.dreamer import ReturnNormalizer, TwoHotCritic
from rl_lab.components.decoders import MultiKeyDecoder
from rl_lab.components.encoders import MultiKeyEncoder
from rl_lab.components.predictors import ContinuePredictor, RewardPredictor
from rl_lab.components.world_models.base import DETER, STOCH
from rl_lab.components.world_models.rssm import BlockRSSM
from rl_lab.kernels import registry
from rl_lab.nn.optimizers import LaProp
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer import Dreamer
from rl_lab.workflows.dreamer_v3 import DreamerV3

VECTOR = {"vector": ObservationSpec("vector", (4,), "float32")}
DISCRETE, CONTINUOUS = ActionSpec("discrete", (1,), (3,)), ActionSpec("continuous", (2,))
SMALL = {"deter": 32, "hidden": 16, "groups": 4, "classes": 4, "units": 16, "depth": 2}


def make_dreamer(
    observation: dict[str, ObservationSpec] | None = None,
    action: ActionSpec = DISCRETE,
    *,
    sizes: dict[str, int] = SMALL,
    lr: float = 1e-3,
    device: str = "cpu",
    compile_: bool = False,
    autocast_dtype: torch.dtype | None = None,
    bin_limit: float = 20.0,
    **hyperparameters,
) -> DreamerV3:
    torch.manual_seed(0)
    observation = observation or VECTOR
    units, depth = sizes["units"], sizes["depth"]
    latent = {name: sizes[name] for name in ("deter", "hidden", "groups", "classes")}
    encoder = MultiKeyEncoder(observation=observation, units=units, depth=depth)
    rssm = BlockRSSM(embed_size=encoder.output_size, action_size=action.encoded_size, **latent)
    decoder = MultiKeyDecoder(
        observation=observation, deter=rssm.deter, stoch_size=rssm.stoch_size, units=units, depth=depth
    )
    size = {"feature_size": rssm.feature_size, "units": units}
    components = {
        "encoder": encoder, "rssm": rssm, "decoder": decoder, "reward": RewardPredictor(limit=bin_limit, **size),
        "continue": ContinuePredictor(**size), "return_normalizer": ReturnNormalizer(),
    }  # fmt: skip
    controllers = {"policy": make_actor(action=action, **size), "critic": TwoHotCritic(limit=bin_limit, **size)}
    modules = [*components.values(), *controllers.values()]
    parameters = [p for module in modules for p in module.to(device).parameters() if p.requires_grad]
    context = WorkflowContext(
        config={}, device=torch.device(device), seed=0, observation_spec=observation, action_spec=action,
        components=components, controllers=ControllerManager(controllers),
        optimizers={"main": LaProp(parameters, lr=lr, warmup=0)}, compile=compile_,
        autocast_dtype=autocast_dtype,
    )  # fmt: skip
    workflow = DreamerV3(
        **adjusted("workflow/dreamer_v3", **({"batch_size": 3, "sequence_length": 6, "horizon": 4} | hyperparameters))
    )
    if compile_:
        dtype = autocast_dtype or torch.float32
        registry.enable({**components, **controllers}, device=context.device, dtype=dtype)
    workflow.initialize(context)
    return workflow


def trainable_counts(workflow: Dreamer) -> dict[str, int]:
    parts = {**workflow.context.components, **dict(workflow.context.controllers.items())}
    return {name: sum(p.numel() for p in part.parameters() if p.requires_grad) for name, part in parts.items()}


def make_batch(
    workflow: Dreamer, *, seed: int = 0, batch: int = 3, time: int = 7, latents: bool = True, device: str = "cpu"
) -> SequenceBatch:
    """Random records; with latents, the context record is one of them."""
    generator = torch.Generator().manual_seed(seed)
    observation = {}
    for key, spec in workflow.context.observation_spec.items():
        shape = (batch, time, *spec.shape)
        if spec.kind == "image":
            observation[key] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        else:
            observation[key] = torch.randn(shape, generator=generator)
    spec = workflow.context.action_spec
    if spec.kind == "discrete":
        action = torch.randint(0, spec.classes[0], (batch, time, 1), generator=generator, dtype=torch.int32)
    else:
        action = torch.rand(batch, time, *spec.shape, generator=generator) * 2 - 1
    flags = torch.zeros(batch, time, dtype=torch.bool)
    reward = torch.randn(batch, time, generator=generator)
    extras, rssm = {}, workflow.rssm
    if latents:
        extras[DETER] = (0.3 * torch.randn(batch, time, rssm.deter, generator=generator)).half()
        shape = (batch, time, rssm.groups)
        extras[STOCH] = torch.randint(0, rssm.classes, shape, generator=generator, dtype=torch.uint8)
    first, last, terminal = (flags.to(device, copy=True) for _ in range(3))
    return SequenceBatch(
        observation={key: value.to(device) for key, value in observation.items()}, action=action.to(device),
        reward=reward.to(device), is_first=first, is_last=last, is_terminal=terminal,
        extras={key: value.to(device) for key, value in extras.items()},
    )  # fmt: skip


def inputs_of(batch: SequenceBatch) -> dict[str, torch.Tensor]:
    """The flat form that the training step takes."""
    inputs = {f"observation.{key}": value for key, value in batch.observation.items()}
    inputs |= {name: getattr(batch, name) for name in ("action", "reward", "is_first", "is_last", "is_terminal")}
    return inputs | {name: value[:, 0] for name, value in batch.extras.items()}
