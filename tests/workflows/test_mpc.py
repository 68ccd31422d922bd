"""Model predictive control with known dynamics."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tests.components.planner_models import make_planner
from tests.conftest import QUIET

from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.diffusion import DiffusionPlanner
from rl_lab.components.planners.gradient import GradientPlanner
from rl_lab.components.planners.icem import ICEM
from rl_lab.components.planners.mppi import MPPI
from rl_lab.components.planners.random_shooting import RandomShooting
from rl_lab.environments import make_vector_env
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import ConfigError, NonFiniteError
from rl_lab.experiment.train import run_training
from rl_lab.orchestration.evaluation import evaluate
from rl_lab.simulation.analytic import AnalyticSimulator, make_task
from rl_lab.specs import ObservationSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.mpc import MPC


def make_mpc(environment: str, planner, *, shaping: float = 0.0, **settings) -> MPC:
    task = make_task(environment=environment)
    context = WorkflowContext(
        config={}, device=torch.device("cpu"), seed=0, action_spec=task.action,
        observation_spec={"vector": ObservationSpec("vector", (task.observation_size,), "float32")},
        components={"simulator": AnalyticSimulator(task, shaping=shaping)},
        controllers=ControllerManager({"planner": make_planner(planner, action=task.action, **settings)}),
    )  # fmt: skip
    workflow = MPC()
    workflow.initialize(context)
    return workflow


def play(workflow: MPC, environment: str, *, episodes: int, time_limit: int) -> tuple[float, ...]:
    settings = EnvironmentSettings(id=environment, time_limit=time_limit, backend="sync")
    envs = make_vector_env(settings, seed=0, num_envs=episodes, stream="eval")
    try:
        return evaluate(workflow, envs, episodes, seed=0).returns
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("planner", "settings"),
    [
        (RandomShooting, {"samples": 64}),
        (CEM, {"samples": 32, "elites": 6, "iterations": 2}),
        (DiffusionPlanner, {"samples": 32, "steps": 4, "scored": 2}),
    ],
)
def test_cartpole_stands(planner, settings):
    """Random shooting, categorical CEM and the diffusion planner keep the pole up in every episode."""
    workflow = make_mpc("CartPole-v1", planner, shaping=0.2, horizon=15, **settings)
    assert play(workflow, "CartPole-v1", episodes=4, time_limit=80) == (80.0,) * 4


@pytest.mark.parametrize(
    ("planner", "settings"),
    [
        pytest.param(CEM, {"samples": 40, "elites": 6, "iterations": 3}, marks=pytest.mark.learning),
        (ICEM, {"samples": 24, "elites": 6, "iterations": 2}),
        pytest.param(MPPI, {"samples": 100, "temperature": 0.3, "std": 1.0}, marks=pytest.mark.learning),
        pytest.param(GradientPlanner, {"restarts": 1, "iterations": 4}, marks=pytest.mark.learning),
    ],
)
def test_the_pendulum_swings_up(planner, settings):
    """A second of foresight swings a pendulum up, which no planner does by chance: random torques lose about 1,200."""
    workflow = make_mpc("Pendulum-v1", planner, horizon=20, **settings)
    returns = play(workflow, "Pendulum-v1", episodes=4, time_limit=100)
    assert np.mean(returns) > -420


def test_an_episode_begins_without_the_last_ones_plan():
    """Cleared memory is the memory of a first decision; what the planner keeps belongs to each environment."""
    workflow = make_mpc("Pendulum-v1", CEM, samples=16, elites=4, iterations=2)
    observation = {"vector": np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5]], np.float32)}
    torch.manual_seed(0)
    fresh, memory = workflow.act(observation, workflow.initial_state(2))
    cleared = workflow.reset_state(memory, np.array([True, False]))
    torch.manual_seed(0)
    again, _ = workflow.act(observation, cleared)
    assert again[0] == fresh[0]
    assert again[1] != fresh[1]


def test_a_model_that_is_not_finite_stops_the_run():
    """NaN in the state makes every candidate NaN: the error names the planner's model and the environment."""
    workflow = make_mpc("Pendulum-v1", CEM, samples=16, elites=4, iterations=2)
    with pytest.raises(NonFiniteError, match="environment 1"):
        workflow.act({"vector": np.array([[1.0, 0, 0], [np.nan, 0, 0]], np.float32)}, workflow.initial_state(2))


SMALL = [*QUIET, "evaluation.imagination=false",
         "environment.num_envs=2", "environment.time_limit=12", "evaluation.episodes=2", "logging.every=10",
         "checkpoint.every=30", "training.total_timesteps=60"]  # fmt: skip


def test_a_run_goes_on_exactly(tmp_path):
    """A planner is one line of the experiment; from a checkpoint, with its memory, the run ends as it would have."""
    overrides = [
        "+experiment=mpc", "environment.id=Pendulum-v1", "controllers/planners@controllers.planner=icem",
        "controllers.planner.horizon=3", *SMALL, f"run_root={tmp_path}",
    ]  # fmt: skip
    whole = run_training(overrides)
    assert whole.code == 0
    rows = [json.loads(line) for line in (whole.folder / "metrics.jsonl").read_text().splitlines()]
    assert any("planner/expected_return" in row for row in rows)
    first = sorted((whole.folder / "checkpoints").glob("step-*"))[0]
    resumed = run_training([f"training.resume_path={first}", f"run_root={tmp_path}"])
    assert resumed.code == 0
    again = [json.loads(line) for line in (resumed.folder / "metrics.jsonl").read_text().splitlines()]
    drop = lambda row: {k: v for k, v in row.items() if k != "wall_s" and not k.startswith("time/")}  # noqa: E731
    assert list(map(drop, again)) == list(map(drop, rows))


def test_an_environment_without_known_equations_is_refused(rl_lab):
    """One line that names the environment and what to use instead."""
    code, _, errors = rl_lab("train", "+experiment=mpc", "environment.id=LunarLander-v3")
    assert code != 0
    assert "no known dynamics for 'LunarLander-v3'" in errors
    assert "Traceback" not in errors


def test_a_discrete_environment_refuses_the_gradient_planner(rl_lab):
    """Discrete actions have no gradient: said before the first step."""
    code, _, errors = rl_lab(
        "train", "+experiment=mpc_cartpole", "controllers/planners@controllers.planner=gradient",
        "~controllers.planner.samples",
    )  # fmt: skip
    assert code != 0
    assert "needs continuous actions" in errors
    with pytest.raises(ConfigError, match="needs continuous"):
        make_mpc("CartPole-v1", GradientPlanner)
