"""Model-based MPC: the transitions it learns from, its losses, its runs and its pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.components.planner_models import make_planner
from tests.conftest import QUIET
from tests.packaged import adjusted

from rl_lab.components.actors.dreamer import make_actor
from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.critics.dreamer import ScalarCritic
from rl_lab.components.dynamics.models import GaussianDynamics
from rl_lab.components.dynamics.outcomes import LearnedOutcome, Outcome
from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.policy_guided import PolicyGuided
from rl_lab.errors import ConfigError
from rl_lab.experiment.train import run_training
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.mbmpc import MBMPC

OBSERVATION = {"vector": ObservationSpec("vector", (2,), "float32")}
CONTINUOUS, DISCRETE = ActionSpec("continuous", (1,)), ActionSpec("discrete", (1,), (3,))
PHASE = PhaseView("plan", "online", "replay")


def make_mbmpc(action: ActionSpec, *, guided: bool = True, **settings) -> MBMPC:
    torch.manual_seed(0)
    dynamics = GaussianDynamics(observation=OBSERVATION, action=action, members=2, elites=None, units=16, layers=1)
    outcome = LearnedOutcome(observation=OBSERVATION, action=action, units=16, layers=1)
    adam = partial(FlatAdam, lr=3e-3, eps=1e-8, clip=None)
    controllers, optimizers = {}, {"model": adam([*dynamics.parameters(), *outcome.parameters()])}
    if guided:
        controllers["policy"] = make_actor(action=action, feature_size=2, units=16, layers=1)
        controllers["critic"] = ScalarCritic(feature_size=2, units=16, layers=1)
        trained = [value for part in controllers.values() for value in part.parameters() if value.requires_grad]
        optimizers["behaviour"] = adam(trained)
        small = {"action": action, "horizon": 2, "samples": 8, "policy_samples": 2, "iterations": 1, "elites": 4}
        controllers["planner"] = make_planner(PolicyGuided, **small, discount=0.9)
    else:
        small = {"action": action, "horizon": 2, "samples": 8, "elites": 2, "iterations": 1, "particles": 2}
        controllers["planner"] = make_planner(CEM, **small)
    context = WorkflowContext(
        config={}, device=torch.device("cpu"), seed=0, observation_spec=OBSERVATION, action_spec=action,
        components={"dynamics": dynamics, "outcome": outcome}, controllers=ControllerManager(controllers),
        optimizers=optimizers,
    )  # fmt: skip
    small = {"batch_size": 4, "sequence_length": 5, "value_horizon": 2}
    workflow = MBMPC(**adjusted("workflow/mbmpc", **small | settings))
    workflow.initialize(context)
    return workflow


def make_batch(workflow: MBMPC, ends: bool = True) -> SequenceBatch:
    """x' = x + 0.1·push, reward -|x'|²; some episodes end at the third record."""
    spec = workflow.batch_spec()
    shape, action = (spec.batch_size, spec.sequence_length), workflow.context.action_spec
    if action.kind == "continuous":
        taken = torch.rand(*shape, 1) * 2 - 1
        push = taken
    else:
        taken = torch.randint(0, 3, (*shape, 1), dtype=torch.int32)
        push = taken.float() - 1.0
    x = torch.randn(shape[0], 1, 2) + 0.1 * torch.cat([torch.zeros_like(push[:, :1]), push[:, :-1]], 1).cumsum(1)
    flags = {name: torch.zeros(shape, dtype=torch.bool) for name in ("is_first", "is_last", "is_terminal")}
    if ends:
        flags["is_last"][::2, 2] = flags["is_terminal"][::2, 2] = flags["is_first"][::2, 3] = True
    indices = torch.arange(shape[0] * shape[1]).view(shape)
    return SequenceBatch({"vector": x}, taken, -x.square().sum(-1), **flags, indices=indices)


def test_transitions_are_pairs_of_records():
    """The successor of a record is the next record, with its reward and end; the last record of an episode has none."""
    workflow = make_mbmpc(CONTINUOUS)
    batch = make_batch(workflow)
    seen = workflow.transitions(batch)
    row = 1  # sequence 0, record 1: the next record ends the episode
    torch.testing.assert_close(seen.following[row], batch.observation["vector"][0, 2])
    assert seen.reward[row] == batch.reward[0, 2]
    assert seen.is_terminal[row]
    assert seen.valid[row]
    assert not seen.valid[2]
    assert seen.valid.sum() == 4 * 4 - 2


def test_members_learn_from_bootstraps_of_the_replayed_records():
    """The update tells the ensemble which records it sees: their loss is that of each member's own bootstrap."""
    workflow = make_mbmpc(CONTINUOUS, batch_size=16)
    batch = make_batch(workflow)
    seen = workflow.transitions(batch)
    assert seen.record is not None
    assert seen.record.tolist() == batch.indices[:, :-1].flatten().tolist()
    shared = workflow.model_losses(seen._replace(record=None))["dynamics"]
    assert not torch.isclose(workflow.model_losses(seen)["dynamics"], shared)


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_updates_lower_the_losses(action):
    """Dynamics, outcome, value and policy all learn from the same batches."""
    workflow, rows = make_mbmpc(action, batch_size=32, discount=0.0), []
    for _ in range(40):
        batch = make_batch(workflow)
        rows.append(
            {**workflow.update_world_model(batch, phase=PHASE), **workflow.update_controller(batch, phase=PHASE)}
        )
    for name in ("loss/dynamics", "loss/continue", "loss/value"):
        assert sum(row[name] for row in rows[-10:]) < sum(row[name] for row in rows[:10])


def test_values_are_the_policys_own_returns():
    """In a model that pays 1 and goes on with probability 1/2: 1 + γ/2 + (γ/2)² V' after two steps."""
    workflow = make_mbmpc(CONTINUOUS, discount=0.5, value_horizon=2)
    workflow.outcome.forward = lambda before, action, after: Outcome(
        torch.ones(len(after)), torch.full((len(after),), 0.5)
    )
    start = torch.randn(6, 2)
    end = workflow.planner.simulator.rollout(start, torch.zeros(6, 2, 1)).states[-1]
    workflow.policy.distribution = lambda params: Still(len(params))
    value = workflow.critic.slow_mean(workflow.dynamics.features(end))
    torch.testing.assert_close(workflow.policy_returns(start), 1 + 0.25 + 0.0625 * value)


class Still:
    """A policy that does nothing."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def sample(self) -> torch.Tensor:
        return torch.zeros(self.rows, 1)


def test_good_actions_are_imitated_more():
    """The policy moves towards what paid more than expected, and away from what paid less."""
    workflow = make_mbmpc(DISCRETE, batch_size=64, discount=0.0, imitation_temperature=0.5)
    for _ in range(50):
        batch = make_batch(workflow, ends=False)
        reward = torch.zeros_like(batch.reward)
        reward[:, 1:] = (batch.action[:, :-1, 0] == 2).float()
        batch = replace(batch, reward=reward)
        workflow.update_world_model(batch, phase=PHASE)
        workflow.update_controller(batch, phase=PHASE)
    features = workflow.dynamics.features(batch.observation["vector"][:, 0])
    probabilities = workflow.policy.distribution(workflow.policy(features)).log_probs.exp().mean(0)
    assert probabilities[2] > 0.6


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_exploration_is_for_training_alone(action):
    """Noise, or random classes; evaluation does what was planned, and every action is valid."""
    workflow = make_mbmpc(action, exploration=1.0)
    observation = {"vector": torch.randn(64, 2).numpy()}

    def act(mode):
        torch.manual_seed(0)
        return workflow.act(observation, workflow.initial_state(64), mode=mode)[0]

    explored, planned = act("train"), act("eval")
    assert (explored != planned).any()
    if action.kind == "continuous":
        assert abs(explored).max() <= 1.0
    else:
        assert set(explored.ravel().tolist()) <= {0, 1, 2}


def test_the_policy_guides_and_the_value_extends():
    """The planner's model has both where the experiment does, and neither in the PETS setting."""
    guided, bare = make_mbmpc(CONTINUOUS), make_mbmpc(CONTINUOUS, guided=False)
    assert guided.planner.simulator.has_policy
    assert guided.planner.simulator.has_value
    assert not bare.planner.simulator.has_value
    with pytest.raises(ConfigError, match="no policy and critic to train"):
        bare.update_controller(make_batch(bare), phase=PHASE)


def test_wrong_settings_are_refused():
    """Said with the setting's name."""
    with pytest.raises(ConfigError, match="sequence_length=1"):
        MBMPC(**adjusted("workflow/mbmpc", sequence_length=1))
    with pytest.raises(ConfigError, match="discount=2"):
        MBMPC(**adjusted("workflow/mbmpc", discount=2.0))


SMALL = [*QUIET, "evaluation.imagination=false",
         "environment.num_envs=2", "environment.time_limit=30", "evaluation.episodes=1", "logging.every=20",
         "checkpoint.every=60", "training.total_timesteps=80", "training.phases.0.duration_steps=40",
         "training.phases.1.duration_updates=3", "workflow.batch_size=4", "components.dynamics.units=8",
         "controllers.planner.horizon=2", "controllers.planner.samples=8", "controllers.planner.elites=4",
         "controllers.planner.iterations=1"]  # fmt: skip


def test_pets_runs(tmp_path):
    """Explore, fit, plan and evaluate; metrics of model and planner are logged."""
    run = run_training(["+experiment=mbmpc_pendulum_pets", *SMALL, f"run_root={tmp_path}"])
    assert run.code == 0
    names = {name for line in (run.folder / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert {"train/loss/dynamics", "planner/expected_return", "eval/final_return_mean"} <= names


def test_a_run_goes_on_exactly(tmp_path):
    """From a checkpoint while planning, the run ends as it would have."""
    overrides = ["+experiment=mbmpc_cartpole", "controllers.planner.policy_samples=2"]
    whole = run_training([*overrides, *SMALL, f"run_root={tmp_path}"])

    def rows():
        lines = (whole.folder / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(("wall_s", "time/"))} for line in lines]

    before = rows()
    checkpoint = sorted((whole.folder / "checkpoints").glob("step-*"))[0]
    assert run_training([f"training.resume_path={checkpoint}", f"run_root={tmp_path}"]).code == 0
    assert rows() == before
