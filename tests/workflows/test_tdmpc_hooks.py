"""TD-MPC and TD-MPC2 in parts: the world model alone, the behaviour alone in a frozen model, and both at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.overrides import QUIET
from tests.workflows.tdmpc_parts import make_batch, make_workflow, randomize
from torch import nn

from rl_lab.experiment.train import run_training
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.tdmpc import TDMPC
from rl_lab.workflows.tdmpc2 import TDMPC2

PHASE = PhaseView("train", "offline", "replay")


class WrittenPriorities:
    """Stands for the replay."""

    def __init__(self) -> None:
        self.updates: list[torch.Tensor] = []

    def update(self, indices: torch.Tensor, fields: dict[str, torch.Tensor]) -> None:
        self.updates.append(fields["priority"])


def snapshot(*modules: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for module in modules for value in module.state_dict().values()]


def is_same(before: list[torch.Tensor], *modules: nn.Module) -> bool:
    return all(torch.equal(one, other) for one, other in zip(before, snapshot(*modules), strict=True))


def make(kind: type):
    workflow = make_workflow(kind, sources={"replay": WrittenPriorities()})
    randomize(workflow.model, workflow.q)
    batch = make_batch(workflow, weighted=kind is TDMPC)
    for _ in range(2):  # Adam has moments of all parameters from here on
        workflow.update(batch, phase=PHASE)
    return workflow, batch


@pytest.mark.parametrize("kind", [TDMPC, TDMPC2])
def test_the_world_model_alone(kind) -> None:
    """Encoder, dynamics, reward and termination move; Qs, their slow copies and the policy do not."""
    workflow, batch = make(kind)
    world_model, behaviour = (workflow.encoder, workflow.model), (workflow.q, workflow.policy)
    before, kept, moments = snapshot(*world_model), snapshot(*behaviour), workflow.model_optimizer.momentum.clone()
    metrics = workflow.update_world_model(batch, phase=PHASE)
    assert not is_same(before, *world_model)
    assert is_same(kept, *behaviour)
    assert not torch.equal(moments, workflow.model_optimizer.momentum)
    assert workflow.model_optimizer.updates.tolist() == [3.0, 3.0, 2.0]
    assert set(metrics.names) >= {"loss/consistency", "loss/reward", "loss/termination"}
    assert "loss/value" not in metrics.names


@pytest.mark.parametrize("kind", [TDMPC, TDMPC2])
def test_the_behaviour_alone(kind) -> None:
    """Qs and policy move, on a world model that stays as it is to the bit."""
    workflow, batch = make(kind)
    world_model, behaviour = [workflow.encoder, workflow.model], (workflow.q, workflow.policy)
    world_model += [workflow.slow_encoder] if kind is TDMPC else []
    before, kept = snapshot(*behaviour), snapshot(*world_model)
    written = len(workflow.context.data_sources["replay"].updates)
    metrics = workflow.update_controller(batch, phase=PHASE)
    assert is_same(kept, *world_model)
    for part in behaviour:
        assert not all(torch.equal(a, b) for a, b in zip(before, snapshot(*behaviour), strict=True)), part
    assert workflow.model_optimizer.updates.tolist() == [2.0, 2.0, 3.0]
    assert set(metrics.names) >= {"loss/value", "loss/policy"}
    assert len(workflow.context.data_sources["replay"].updates) == written + (kind is TDMPC)


@pytest.mark.parametrize("kind", [TDMPC, TDMPC2])
def test_the_parts_have_the_losses_of_the_whole(kind) -> None:
    """The same noise: each loss of a part is the one that the joint update has."""
    workflow, batch = make(kind)
    torch.manual_seed(0)
    losses = workflow.batch_losses(batch)
    state = snapshot(workflow.encoder, workflow.model, workflow.q, workflow.policy)
    torch.manual_seed(0)
    controller = workflow.update_controller(batch, phase=PHASE)
    torch.testing.assert_close(controller["loss/value"], losses["value"].detach())
    workflow, batch = make(kind)
    assert is_same(state, workflow.encoder, workflow.model, workflow.q, workflow.policy)
    world_model = workflow.update_world_model(batch, phase=PHASE)
    for name in ("consistency", "reward", "termination"):
        torch.testing.assert_close(world_model[f"loss/{name}"], losses[name].detach())


PARTS = [
    "{name: explore, type: warmup, duration: 24_steps, controller: random, workflow_hooks: [collect]}",
    "{name: model, type: offline, duration: 3_updates, workflow_hooks: [world_model]}",
    "{name: behaviour, type: offline, duration: 3_updates, workflow_hooks: [controller]}",
    "{name: together, type: online, duration: 8_steps, workflow_hooks: [collect, {update: {ratio: 0.5}}, eval]}",
]


@pytest.mark.parametrize("experiment", ["tdmpc2_curriculum", "tdmpc"])
def test_a_curriculum_in_parts_runs_by_yaml_alone(tmp_path: Path, experiment: str) -> None:
    """Random data, the world model offline, the behaviour in the frozen model, all together; with the short names."""
    settings = ["environment.id=CartPole-v1", "environment.num_envs=2", "workflow.batch_size=4"]
    planner = {"samples": 8, "policy_samples": 2, "elites": 4, "iterations": 1, "horizon": 3}
    settings += [f"controllers.planner.{key}={value}" for key, value in planner.items()]
    settings += ["workflow.horizon=3", f"training.phases=[{','.join(PARTS)}]", f"run_root={tmp_path}"]
    settings += ["evaluation.episodes=1", "evaluation.num_envs=1", "checkpoint.best=null", "evaluation.select=last"]
    outcome = run_training(
        [f"+experiment={experiment}", *settings, "evaluation.final_episodes=1", "logging.every=1", *QUIET]
    )
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    seen: dict[str, set[str]] = {}
    for row in rows:
        seen.setdefault(row["phase"], set()).update(row)
    assert {"train/loss/consistency", "train/loss/reward"} <= seen["model"]
    assert "train/loss/value" not in seen["model"]
    assert {"controller/loss/value", "controller/loss/policy"} <= seen["behaviour"]
    assert {"train/loss/consistency", "train/loss/policy"} <= seen["together"]
    summary = json.loads((outcome.folder / "summary.json").read_text())
    assert summary["updates"] == 3 + 3 + 4
