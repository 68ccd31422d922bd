"""Small TD-MPC and TD-MPC2 workflows with hand-made batches, for tests."""

from __future__ import annotations

from typing import Any

import torch

from rl_lab.components.controllers.critics import SlowTarget
from rl_lab.components.controllers.latent_policies import make_latent_policy
from rl_lab.components.controllers.manager import ControllerManager
from rl_lab.components.controllers.q_ensembles import QEnsemble
from rl_lab.components.dynamics.latent import LatentModel
from rl_lab.components.encoders.latent import LatentEncoder
from rl_lab.components.planners.tdmpc import TDMPCPlanner
from rl_lab.data_sources.base import DataSource
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.nn.normalizers import RunningScale
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.latent_planning import LatentPlanning
from rl_lab.workflows.tdmpc import TDMPC
from rl_lab.workflows.tdmpc2 import TDMPC2

VECTOR = {"vector": ObservationSpec("vector", (4,), "float32")}
IMAGE = {"image": ObservationSpec("image", (64, 64, 3), "uint8")}
DISCRETE, CONTINUOUS = ActionSpec("discrete", (1,), (3,)), ActionSpec("continuous", (2,))
PLANNER = {"samples": 16, "policy_samples": 4, "iterations": 2, "elites": 6}


def make_workflow(
    kind: type[LatentPlanning] = TDMPC2,
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
    **hyperparameters: Any,
) -> Any:
    torch.manual_seed(0)
    old = kind is TDMPC
    style: dict[str, Any] = {"style": "tdmpc" if old else "tdmpc2"}
    simplex: dict[str, Any] = style | {"simplex": None if old else 8}
    bins, members = (1, 2) if old else (101, members)
    encoder = LatentEncoder(observation=observation, latent_size=latent, units=units, **simplex)
    size = {"latent_size": latent, "action_size": action.encoded_size, "units": units, "bins": bins}
    components = {"encoder": encoder, "model": LatentModel(**size, **simplex, episodic=episodic, discount=discount)}
    components |= {"slow_encoder": SlowTarget(encoder, rate=0.01, every=2)} if old else {"value_scale": RunningScale()}
    controllers = {
        "policy": make_latent_policy(action=action, latent_size=latent, units=units, **style),
        "q": QEnsemble(
            **size, members=members, dropout=dropout, target_rate=target_rate, target_every=2 if old else 1, **style
        ),
        "planner": TDMPCPlanner(action=action, horizon=3, discount=discount, **planner),
    }
    for module in [*components.values(), *controllers.values()]:
        module.to(device)
    trained = [p for part in (encoder, components["model"], controllers["q"]) for p in part.parameters()]
    context = WorkflowContext(
        config={}, device=torch.device(device), seed=0, observation_spec=observation, action_spec=action,
        components=components, controllers=ControllerManager(controllers),
        optimizers={
            "model": FlatAdam([p for p in trained if p.requires_grad], lr=lr, clip=20.0),
            "policy": FlatAdam(controllers["policy"].parameters(), lr=lr, clip=20.0),
        },
        data_sources=sources or {}, compile=compile_,
    )  # fmt: skip
    workflow = kind(**({"batch_size": 8, "horizon": 3} | hyperparameters))
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
