"""Another planner in the model of a trained run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.components.planner_models import make_planner
from tests.overrides import QUIET
from tests.packaged import adjusted
from tests.workflows.dreamer_family import make_v1, make_v2
from tests.workflows.dreamer_parts import CONTINUOUS, make_dreamer
from tests.workflows.tdmpc_parts import make_workflow
from tests.workflows.test_mbmpc import CONTINUOUS as TORQUE
from tests.workflows.test_mbmpc import make_mbmpc
from tests.workflows.test_mpc import make_mpc

from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.diffusion import DiffusionPlanner
from rl_lab.components.planners.diffusion_prior import DiffusionPrior
from rl_lab.components.planners.gradient import GradientPlanner
from rl_lab.components.planners.policy_guided import PolicyGuided
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.experiment.agent import load_run
from rl_lab.experiment.evaluate import evaluate_run
from rl_lab.experiment.train import run_training
from rl_lab.orchestration.checkpoint import Checkpoint
from rl_lab.orchestration.run_state import agent_state, load_agent
from rl_lab.specs import ActionSpec, ObservationSpec

SMALL = ["horizon=2", "samples=4", "elites=2", "iterations=1"]


def planning_dreamer(planner: type, **settings):
    """A small Dreamer that plans in its evaluations."""
    workflow = make_dreamer(action=CONTINUOUS)
    workflow.planner = make_planner(planner, action=CONTINUOUS, **{"horizon": 3, "discount": 0.9} | settings)
    workflow.planner.attach(workflow.context.simulator)
    return workflow


def observation(envs: int) -> dict[str, np.ndarray]:
    return {"vector": np.random.default_rng(0).normal(size=(envs, 4)).astype(np.float32)}


def test_a_dreamers_run_is_evaluated_with_a_planner(dreamer_run: Path) -> None:
    """The run's configuration has no planner; the one that is asked for plans in its RSSM, and its name is told."""
    result = evaluate_run(dreamer_run, episodes=2, planner="cem", planner_settings=SMALL)
    assert len(result.result.returns) == 2
    assert result.as_dict()["planner"] == "cem " + " ".join(SMALL)
    assert "planner cem horizon=2" in result.text()
    assert "planner" not in evaluate_run(dreamer_run, episodes=1).as_dict()


def test_a_tree_is_searched_in_a_dreamers_rssm(dreamer_run: Path) -> None:
    """The actor is the prior, and the critic the value of new nodes."""
    for rule in ("puct", "gumbel"):
        settings = [f"rule={rule}", "simulations=4"]
        assert len(evaluate_run(dreamer_run, episodes=1, planner="mcts", planner_settings=settings).result.returns) == 1
    with pytest.raises(ConfigError, match="simulations=0"):
        evaluate_run(dreamer_run, episodes=1, planner="mcts", planner_settings=["simulations=0"])


def test_a_run_that_acts_by_its_policy_plans_when_asked_to(tmp_path: Path) -> None:
    phase = "{name: seed, type: warmup, duration_steps: 20, controller: random, workflow_hooks: [collect]}"
    tiny = ["+experiment=tdmpc2_cartpole", "size=tiny", "workflow.act_with=policy", f"training.phases=[{phase}]"]
    short = ["evaluation.episodes=1", "evaluation.final_episodes=1", "evaluation.select=last", "checkpoint.best=null"]
    outcome = run_training([*tiny, *short, *QUIET, f"run_root={tmp_path}"])
    assert load_run(outcome.folder).workflow.act_with == "policy"
    assert load_run(outcome.folder, planner="cem", planner_settings=SMALL).workflow.act_with == "planner"


def test_what_cannot_plan_is_told_so(dreamer_run: Path, random_run: Path) -> None:
    """A workflow without a model, a discrete action in the gradient planner, a setting that no planner has."""
    with pytest.raises(ConfigError, match="no model to plan in"):
        evaluate_run(random_run, planner="cem")
    with pytest.raises(ConfigError, match="continuous actions"):
        evaluate_run(dreamer_run, planner="gradient")
    with pytest.raises(ConfigError, match="horizn"):
        evaluate_run(dreamer_run, planner="cem", planner_settings=["horizn=3"])


def test_the_command_names_what_is_missing(rl_lab: Callable, dreamer_run: Path) -> None:
    """Settings without a planner, and a planner that does not exist."""
    assert "--planner" in rl_lab("eval", dreamer_run, "horizon=3")[2]
    code, _, errors = rl_lab("eval", dreamer_run, "--planner", "icm")
    assert code == 2
    assert "icem" in errors


def test_a_dreamer_plans_in_evaluations_alone() -> None:
    """While training the actor acts as without a planner; in an evaluation the plan's first action is taken and the
    rest of it is remembered, for each environment."""
    workflow = planning_dreamer(CEM, samples=8, elites=2, iterations=2)
    state = workflow.initial_state(3)
    torch.manual_seed(1)
    plan, _ = workflow.plan(observation(3), state)
    torch.manual_seed(1)
    action, after = workflow.act(observation(3), state, mode="eval")
    np.testing.assert_allclose(action, plan.action.numpy(), atol=1e-6)
    torch.testing.assert_close(after["plan.plan_mean"], plan.memory["plan_mean"])
    assert after.keys() == state.keys()
    cleared = workflow.reset_state(after, np.array([True, False, False]))
    assert cleared["plan.plan_known"].tolist() == [0.0, 1.0, 1.0]
    torch.manual_seed(1)
    sampled, trained = workflow.act(observation(3), state, mode="train")
    workflow.planner = None
    without = workflow.initial_state(3)
    torch.manual_seed(1)
    plain, _ = workflow.act(observation(3), without, mode="train")
    np.testing.assert_array_equal(sampled, plain)
    assert trained.keys() == state.keys()


def test_an_rssm_has_all_that_planners_ask_for() -> None:
    """The actor guides, the critic's value ends a plan, and gradients reach the actions through the latents."""
    guided = planning_dreamer(PolicyGuided, samples=6, policy_samples=2, elites=2, iterations=1)
    plan, latent = guided.plan(observation(2), guided.initial_state(2))
    assert plan.is_finite.all()
    features = latent.features
    torch.testing.assert_close(guided.model.value(latent), guided.critic.mean(guided.critic(features)))
    climbing = planning_dreamer(GradientPlanner, restarts=2, iterations=2)
    plan, _ = climbing.plan(observation(2), climbing.initial_state(2))
    assert plan.is_finite.all()


@pytest.mark.parametrize("prior", ["gaussian", "learned"])
@pytest.mark.parametrize("steering", ["smc", "gradient", "annealed"])
@pytest.mark.parametrize("model", ["analytic", "ensemble", "rssm", "tdmpc2"])
def test_the_diffusion_planner_plans_in_every_model(model: str, steering: str, prior: str) -> None:
    """Known equations, an ensemble, an RSSM and a TD-MPC latent; all three ways of steering, in inference mode; with a
    learned prior too, which annealing has no use for."""
    settings: dict[str, Any] = {"horizon": 3, "samples": 6, "steps": 3, "scored": 2, "steering": steering}
    if prior == "learned":
        if steering == "annealed":
            return
        settings["prior"] = small_prior(model)
    if model == "rssm":
        workflow = planning_dreamer(DiffusionPlanner, **settings)
    elif model == "analytic":
        workflow = make_mpc("Pendulum-v1", DiffusionPlanner, **settings)
    else:
        workflow = make_mbmpc(TORQUE) if model == "ensemble" else make_workflow()
        workflow.planner = make_planner(DiffusionPlanner, action=workflow.context.action_spec, **settings)
        workflow.planner.attach(workflow.context.simulator)
    size = next(iter(workflow.context.observation_spec.values())).shape[0]
    seen = {"vector": np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)}
    with torch.inference_mode():
        plan, _ = workflow.plan(seen, workflow.initial_state(2))
        action, _ = workflow.act(seen, workflow.initial_state(2), mode="eval")
    assert plan.is_finite.all()
    torch.testing.assert_close(plan.weights.sum(1), torch.ones(2, dtype=plan.weights.dtype))
    assert ((plan.effective_samples >= 0.999) & (plan.effective_samples <= 6.001)).all()
    assert (np.abs(action) <= 1.0).all()


def small_prior(model: str) -> DiffusionPrior:
    """Untrained, for the observations and actions of that model's test."""
    sizes = {"analytic": 3, "rssm": 4}
    spec = {"vector": ObservationSpec("vector", (sizes[model],), "float32")} if model in sizes else None
    action = {"analytic": ActionSpec("continuous", (1,)), "rssm": CONTINUOUS}.get(model)
    if spec is None or action is None:
        context = (make_mbmpc(TORQUE) if model == "ensemble" else make_workflow()).context
        spec, action = dict(context.observation_spec), context.action_spec
    settings = {"observation": spec, "action": action, "horizon": 3, "network_settings": {"units": 8, "layers": 1}}
    return DiffusionPrior(**adjusted("controllers/priors/diffusion", **settings))


@pytest.mark.parametrize(("make", "includes"), [(make_v1, True), (make_v2, True), (make_dreamer, False)])
def test_a_dreamers_model_says_how_its_values_count(make: Callable, includes: bool) -> None:
    """v1 and v2 train V(s) with the reward of s included, v3 without; all plan with the discount they learned with."""
    workflow = make()
    assert workflow.model.value_includes_reward is includes
    assert workflow.model.discount == workflow.discount < 1.0


def test_the_state_of_another_planner_is_left_out() -> None:
    """TD-MPC2's planner keeps a buffer in its checkpoints; CEM, put in its place, has none. Else names must agree."""
    saved = make_workflow()
    checkpoint = Checkpoint(Path("step-1"), "tdmpc2", 1, agent_state(saved, saved.context))
    other = make_workflow()
    controllers = dict(other.context.controllers.items())
    planner = make_planner(CEM, action=other.context.action_spec, horizon=2)
    context = replace(other.context, controllers=ControllerManager(controllers | {"planner": planner}))
    with pytest.raises(CheckpointError):
        load_agent(checkpoint, other, context)
    with torch.no_grad():
        next(saved.q.parameters()).add_(1.0)
    load_agent(checkpoint, other, context, exchanged=("planner",))
    torch.testing.assert_close(next(other.q.parameters()), next(saved.q.parameters()))
