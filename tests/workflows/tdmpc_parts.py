"""Small TD-MPC and TD-MPC2 workflows with hand-made batches, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tests.packaged import adjusted, packaged

from rl_lab.components.actors.tdmpc import CategoricalPrior, NoisyMean, make_tdmpc_policy
from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.critics.dreamer import SlowTarget
from rl_lab.components.dynamics.tdmpc import TDMPCModel
from rl_lab.components.encoders.tdmpc import TDMPCEncoder
from rl_lab.components.planners.tdmpc import TDMPCPlanner
from rl_lab.components.q_functions.ensemble import QEnsemble
from rl_lab.data_sources.base import DataSource
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.nn.normalizers import RunningScale
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.tdmpc import TDMPC
from rl_lab.workflows.tdmpc2 import TDMPC2
from rl_lab.workflows.tdmpc_base import TDMPCBase

VECTOR = {"vector": ObservationSpec("vector", (4,), "float32")}
IMAGE = {"image": ObservationSpec("image", (64, 64, 3), "uint8")}
DISCRETE, CONTINUOUS = ActionSpec("discrete", (1,), (3,)), ActionSpec("continuous", (2,))
KINDS: dict[str, Any] = {
    "encoder": TDMPCEncoder, "model": TDMPCModel, "policy": make_tdmpc_policy, "q": QEnsemble, "planner": TDMPCPlanner,
}  # fmt: skip
FILES = {
    "encoder": "components/encoders/tdmpc", "model": "components/dynamics/tdmpc",
    "policy": "controllers/tdmpc_policies/auto", "q": "controllers/q_ensembles/two_hot",
    "planner": "controllers/planners/tdmpc2",
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {  # of size 5m
    "encoder": {"latent_size": 512, "units": 256, "layers": 2}, "model": {"units": 512, "episode_length": None},
    "q": {"members": 5, "units": 512}, "policy": {"units": 512}, "planner": {},
}  # fmt: skip
PLANNER = {"samples": 16, "policy_samples": 4, "iterations": 2, "elites": 6}


def make_part(name: str, kind: Any = None, **settings: Any) -> Any:
    """A part with the packaged settings but for these; of another class, if `kind` is given."""
    kind, given = kind or KINDS[name], adjusted(FILES[name], **{**SIZES[name], **settings})
    if isinstance(kind, type):  # a policy's class, not the function that chooses one
        others = {"noise_std": NoisyMean, "unimix": CategoricalPrior}
        given = {key: value for key, value in given.items() if key not in others or issubclass(kind, others[key])}
    return kind(**given)


def make_workflow(
    kind: type[TDMPCBase] = TDMPC2,
    action: ActionSpec = CONTINUOUS,
    *,
    observation: dict[str, ObservationSpec] = VECTOR,
    units: int = 16,
    latent: int = 16,
    episodic: bool = True,
    discount: float = 0.9,
    lr: float = 1e-3,
    dropout: float = 0.0,
    members: int = 3,
    target_rate: float = 0.01,
    planner: dict[str, Any] = PLANNER,
    device: str = "cpu",
    compile_: bool = False,
    sources: dict[str, DataSource] | None = None,
    kinds: Mapping[str, Any] | None = None,
    **hyperparameters: Any,
) -> Any:
    """`kinds`: other classes for some parts."""
    torch.manual_seed(0)
    kinds = KINDS | dict(kinds or {})
    old = issubclass(kind, TDMPC)
    style: dict[str, Any] = {"style": "tdmpc" if old else "tdmpc2"}
    simplex: dict[str, Any] = style | {"simplex": None if old else 8}
    bins, members = (1, 2) if old else (101, members)
    size = {"latent_size": latent, "action_size": action.encoded_size, "units": units, "bins": bins}
    encoder = make_part(
        "encoder", kinds["encoder"], observation=observation, latent_size=latent, units=units, **simplex
    )
    model = make_part("model", kinds["model"], **size, **simplex, episodic=episodic, discount=discount)
    components = {"encoder": encoder, "model": model}
    components |= (
        {"slow_encoder": SlowTarget(encoder, rate=0.01, every=2)}
        if old
        else {"value_scale": RunningScale(**packaged("components/normalizers/values"))}
    )
    slow = {"target_rate": target_rate, "target_every": 2 if old else 1}
    controllers = {
        "policy": make_part("policy", kinds["policy"], action=action, latent_size=latent, units=units, **style),
        "q": make_part("q", kinds["q"], **size, members=members, dropout=dropout, **slow, **style),
        "planner": make_part("planner", kinds["planner"], action=action, horizon=3, **planner),
    }
    for module in [*components.values(), *controllers.values()]:
        module.to(device)
    trained = {"encoder": encoder, "model": components["model"], "q": controllers["q"]}
    groups = [
        {"params": [p for p in part.parameters() if p.requires_grad], "name": name} for name, part in trained.items()
    ]
    context = WorkflowContext(
        config={}, device=torch.device(device), seed=0, observation_spec=observation, action_spec=action,
        components=components, controllers=ControllerManager(controllers),
        optimizers={
            "model": FlatAdam(groups, lr=lr, eps=1e-8, clip=20.0),
            "policy": FlatAdam(controllers["policy"].parameters(), lr=lr, eps=1e-8, clip=20.0),
        },
        data_sources=sources or {}, compile=compile_,
    )  # fmt: skip
    workflow = kind(**adjusted(f"workflow/{kind.name}", **{"batch_size": 8, "horizon": 3, **hyperparameters}))
    workflow.initialize(context)
    return workflow


def randomize(*modules: torch.nn.Module, scale: float = 0.3) -> None:
    """Move every parameter away from its initial value, those of the slow copies as well."""
    with torch.no_grad():
        for module in modules:
            for value in module.parameters():
                value += scale * torch.randn(value.shape).to(value.device)


def make_batch(workflow: Any, *, seed: int = 0, ends: float = 0.2, weighted: bool = False) -> SequenceBatch:
    """Random records with episode ends, terminal and truncated."""
    generator = torch.Generator().manual_seed(seed)
    spec, device = workflow.batch_spec(), workflow.context.device
    shape = (spec.batch_size, spec.window)
    observation = {}
    for key, own in workflow.context.observation_spec.items():
        if own.kind == "image":
            observation[key] = torch.randint(0, 256, (*shape, *own.shape), generator=generator, dtype=torch.uint8)
        else:
            observation[key] = torch.randn(*shape, *own.shape, generator=generator)
    action_spec = workflow.context.action_spec
    if action_spec.kind == "discrete":
        action = torch.randint(0, action_spec.classes[0], (*shape, 1), generator=generator, dtype=torch.int32)
    else:
        action = torch.rand(*shape, *action_spec.shape, generator=generator) * 2 - 1
    is_last = torch.rand(shape, generator=generator) < ends
    batch = SequenceBatch(
        observation={key: value.to(device) for key, value in observation.items()},
        action=action.to(device),
        reward=torch.randn(shape, generator=generator).to(device),
        is_first=torch.cat([torch.zeros(shape[0], 1, dtype=torch.bool), is_last[:, :-1]], 1).to(device),
        is_last=is_last.to(device),
        is_terminal=(is_last & (torch.rand(shape, generator=generator) < 0.5)).to(device),
        indices=torch.arange(shape[0] * shape[1]).reshape(shape),
        weight=torch.rand(shape[0], generator=generator).to(device) if weighted else None,
    )
    return batch
