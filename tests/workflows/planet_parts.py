"""A small PlaNet with hand-made batches, for tests."""

from __future__ import annotations

import torch
from tests.components.planner_models import make_planner
from tests.packaged import adjusted

from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.decoders import MultiKeyDecoder
from rl_lab.components.encoders import MultiKeyEncoder, QuantizedImages
from rl_lab.components.planners.cem import CEM
from rl_lab.components.predictors import RewardPredictor
from rl_lab.components.world_models.dense_rssm import GaussianRSSM
from rl_lab.kernels import registry
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.planet import PlaNet

VECTOR = {"vector": ObservationSpec("vector", (3,), "float32")}
IMAGE = {"image": ObservationSpec("image", (64, 64, 3), "uint8")}
CONTINUOUS, DISCRETE = ActionSpec("continuous", (2,)), ActionSpec("discrete", (1,), (3,))
B, T = 3, 7


def make_planet(
    observation: dict[str, ObservationSpec] = VECTOR,
    action: ActionSpec = CONTINUOUS,
    *,
    lr: float = 1e-3,
    device: str = "cpu",
    compile_: bool = False,
    warm_start: bool = False,
    **hyperparameters,
) -> PlaNet:
    torch.manual_seed(0)
    style = {"style": "planet"}
    encoder = MultiKeyEncoder(
        observation=observation, units=16, layers=1, depth=2, image_encoder="planet", use_symlog=False, **style
    )
    rssm = GaussianRSSM(embed_size=encoder.output_size, action_size=action.encoded_size, deter=12, hidden=10, stoch=4)
    decoder = MultiKeyDecoder(
        observation=observation, deter=12, stoch_size=4, units=16, layers=1, depth=2, image_decoder="planet",
        use_symlog=False, unit_normal=True, **style,
    )  # fmt: skip
    reward = RewardPredictor(feature_size=16, units=8, distribution="unit_normal", outscale=1.0, **style)
    components = {"encoder": encoder, "rssm": rssm, "decoder": decoder, "reward": reward}
    if "image" in observation:
        components["preprocess"] = QuantizedImages()
    planner = make_planner(CEM, action=action, horizon=4, samples=20, iterations=3, elites=4, warm_start=warm_start)
    modules = [*components.values(), planner]
    parameters = [p for module in modules for p in module.to(device).parameters()]
    context = WorkflowContext(
        config={}, device=torch.device(device), seed=0, observation_spec=observation, action_spec=action,
        components=components, controllers=ControllerManager({"planner": planner}),
        optimizers={"main": FlatAdam(parameters, lr=lr, eps=1e-4, clip=1000.0)}, compile=compile_,
    )  # fmt: skip
    workflow = PlaNet(**adjusted("workflow/planet", **({"batch_size": B, "sequence_length": T} | hyperparameters)))
    if compile_:
        registry.enable(components, device=context.device)
    workflow.initialize(context)
    return workflow


def make_batch(workflow: PlaNet, *, seed: int = 0, device: str = "cpu") -> SequenceBatch:
    """Random records; an episode ends inside the first sequence."""
    generator = torch.Generator().manual_seed(seed)
    observation = {
        key: torch.randint(0, 256, (B, T, *spec.shape), generator=generator, dtype=torch.uint8)
        if spec.kind == "image"
        else torch.randn(B, T, *spec.shape, generator=generator)
        for key, spec in workflow.context.observation_spec.items()
    }
    spec = workflow.context.action_spec
    if spec.kind == "discrete":
        action = torch.randint(0, 3, (B, T, 1), generator=generator, dtype=torch.int32)
    else:
        action = torch.rand(B, T, *spec.shape, generator=generator) * 2 - 1
    first, last = torch.zeros(B, T, dtype=torch.bool), torch.zeros(B, T, dtype=torch.bool)
    last[0, 3] = first[0, 4] = True
    return SequenceBatch(
        observation={key: value.to(device) for key, value in observation.items()}, action=action.to(device),
        reward=torch.randn(B, T, generator=generator).to(device), is_first=first.to(device), is_last=last.to(device),
        is_terminal=torch.zeros(B, T, dtype=torch.bool, device=device),
    )  # fmt: skip
