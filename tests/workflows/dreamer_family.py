"""Small Dreamers of every generation, wired as their experiments wire them, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tests.packaged import adjusted
from tests.workflows.dreamer_parts import CONTINUOUS, VECTOR
from torch import nn

from rl_lab.components.actors.dreamer import make_actor
from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.critics.dreamer import ReturnNormalizer, ScalarCritic, TwoHotCritic
from rl_lab.components.decoders import MultiKeyDecoder
from rl_lab.components.encoders import MultiKeyEncoder
from rl_lab.components.predictors import ContinuePredictor, RewardPredictor
from rl_lab.components.world_models.dense_rssm import DenseCategoricalRSSM, GaussianRSSM
from rl_lab.kernels import registry
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer import Dreamer
from rl_lab.workflows.dreamer_v1 import DreamerV1
from rl_lab.workflows.dreamer_v2 import DreamerV2
from rl_lab.workflows.dreamer_v3 import DreamerV3

SMALL = {"deter": 24, "hidden": 16, "stoch": 6, "groups": 4, "classes": 4, "units": 16, "depth": 2}
SHORT = {"batch_size": 3, "sequence_length": 7, "horizon": 4}


def make_v1(
    action: ActionSpec = CONTINUOUS, *, observation: Mapping[str, ObservationSpec] = VECTOR,
    sizes: Mapping[str, int] = SMALL, with_continue: bool = True, half_images: bool = False, device: str = "cpu",
    compile_: bool = False, **settings: Any,
) -> DreamerV1:  # fmt: skip
    torch.manual_seed(0)
    networks = _networks(observation, sizes, style="dreamer_v1", image_style="planet", half_images=half_images)
    rssm = GaussianRSSM(
        **_latent_sizes(networks, action, sizes), stoch=sizes["stoch"], cell="reset_after", style="dreamer_v1",
        separate_std=False,
    )  # fmt: skip
    size = {"feature_size": rssm.feature_size, "units": sizes["units"], "style": "dreamer_v1"}
    components = _model(networks, rssm, reward=_normal_reward(size, layers=2))
    workflow = DreamerV1(**adjusted("workflow/dreamer_v1", **(SHORT | settings)))
    if with_continue:
        components["continue"] = ContinuePredictor(**size, layers=3, discount=workflow.discount)
    controllers = {
        "policy": make_actor(
            action=action, **size, layers=4, outscale=1.0, continuous="tanh_normal", unimix=0.0
        ),
        "critic": ScalarCritic(**size, layers=3, slow_rate=None),
    }  # fmt: skip
    return _assembled(workflow, observation, action, components, controllers, device, compile_)


def make_v2(
    action: ActionSpec = CONTINUOUS, *, observation: Mapping[str, ObservationSpec] = VECTOR,
    sizes: Mapping[str, int] = SMALL, with_continue: bool = True, slow_every: int = 100, device: str = "cpu",
    compile_: bool = False, **settings: Any,
) -> DreamerV2:  # fmt: skip
    torch.manual_seed(0)
    networks = _networks(observation, sizes, style="dreamer_v2", image_style=None)
    rssm = DenseCategoricalRSSM(
        **_latent_sizes(networks, action, sizes), groups=sizes["groups"], classes=sizes["classes"], style="dreamer_v2"
    )
    size = {"feature_size": rssm.feature_size, "units": sizes["units"], "style": "dreamer_v2"}
    components = _model(networks, rssm, reward=_normal_reward(size, layers=4))
    workflow = DreamerV2(**adjusted("workflow/dreamer_v2", **(SHORT | settings)))
    if with_continue:
        components["continue"] = ContinuePredictor(**size, layers=4, discount=workflow.discount)
    controllers = {
        "policy": make_actor(
            action=action, **size, layers=4, outscale=1.0, continuous="truncated_normal", unimix=0.0
        ),
        "critic": ScalarCritic(**size, layers=4, slow_rate=1.0, slow_every=slow_every),
    }  # fmt: skip
    return _assembled(workflow, observation, action, components, controllers, device, compile_, weight_decay=1e-6)


def make_v3_2023(
    action: ActionSpec = CONTINUOUS, *, device: str = "cpu", compile_: bool = False, **settings: Any
) -> DreamerV3:
    """The first form of DreamerV3."""
    torch.manual_seed(0)
    sizes, style = SMALL, "dreamer_v3_2023"
    encoder = MultiKeyEncoder(observation=VECTOR, units=sizes["units"], style=style)
    networks = {"encoder": encoder, "decoder": {"observation": VECTOR, "units": sizes["units"], "style": style}}
    rssm = DenseCategoricalRSSM(
        **_latent_sizes(networks, action, sizes), groups=sizes["groups"], classes=sizes["classes"], unimix=0.01,
        style=style, clip_actions=True, learned_initial=True,
    )  # fmt: skip
    size = {"feature_size": rssm.feature_size, "units": sizes["units"], "style": style}
    components = _model(networks, rssm, reward=RewardPredictor(**size, spacing="linear"))
    components |= {"continue": ContinuePredictor(**size, label="hard"), "return_normalizer": ReturnNormalizer()}
    controllers = {
        "policy": make_actor(action=action, **size, outscale=1.0),
        "critic": TwoHotCritic(**size, spacing="linear"),
    }
    chosen = {
        "stored_latents": False, "actor_gradient": "auto", "first_discount": "data", "model_first": True,
        "loss_scales": {"dynamics": 0.5, "replay_value": 0.0},
    }  # fmt: skip
    workflow = DreamerV3(**adjusted("workflow/dreamer_v3", **(SHORT | chosen | settings)))
    return _assembled(workflow, VECTOR, action, components, controllers, device, compile_)


def _networks(observation: Mapping[str, ObservationSpec], sizes: Mapping[str, int], **choices: Any) -> dict[str, Any]:
    """The encoder, and how to make the decoder: PlaNet's networks for images, four layers for vectors."""
    common = {"observation": observation, "units": sizes["units"], "layers": 4, "depth": sizes["depth"]}
    common |= {"use_symlog": False, **choices}
    return {
        "encoder": MultiKeyEncoder(**common, image_encoder="planet"),
        "decoder": common | {"image_decoder": "planet", "unit_normal": True},
    }


def _latent_sizes(networks: dict[str, Any], action: ActionSpec, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "embed_size": networks["encoder"].output_size, "action_size": action.encoded_size, "deter": sizes["deter"],
        "hidden": sizes["hidden"],
    }  # fmt: skip


def _model(networks: dict[str, Any], rssm: Any, *, reward: RewardPredictor) -> dict[str, nn.Module]:
    decoder = MultiKeyDecoder(**networks["decoder"], deter=rssm.deter, stoch_size=rssm.stoch_size)
    return {"encoder": networks["encoder"], "rssm": rssm, "decoder": decoder, "reward": reward}


def _normal_reward(size: dict[str, Any], *, layers: int) -> RewardPredictor:
    return RewardPredictor(**size, layers=layers, distribution="unit_normal", outscale=1.0)


def _assembled(
    workflow: Any, observation: Mapping[str, ObservationSpec], action: ActionSpec, components: dict[str, nn.Module],
    controllers: dict[str, nn.Module], device: str, compile_: bool, weight_decay: float = 0.0,
) -> Any:  # fmt: skip
    for module in (*components.values(), *controllers.values()):
        module.to(device)
    optimizers = {
        "model": _adam(components.values(), weight_decay, lr=6e-4),
        "actor": _adam([controllers["policy"]], weight_decay, lr=8e-5),
        "critic": _adam([controllers["critic"]], weight_decay, lr=8e-5),
    }
    assert isinstance(workflow, Dreamer)
    context = WorkflowContext(
        config={}, device=torch.device(device), seed=0, observation_spec=observation, action_spec=action,
        components=components, controllers=ControllerManager(controllers), optimizers=optimizers,
        compile=compile_,
    )  # fmt: skip
    if compile_:
        registry.enable({**components, **controllers}, device=context.device)
    workflow.initialize(context)
    return workflow


def _adam(modules: Any, weight_decay: float, *, lr: float) -> FlatAdam:
    parameters = [value for module in modules for value in module.parameters() if value.requires_grad]
    return FlatAdam(parameters, lr=lr, eps=1e-5, clip=100.0, weight_decay=weight_decay)
