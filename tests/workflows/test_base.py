"""The workflow base class: records, episode tracking, random actions, and their saved state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from rl_lab.components.controller_manager import ControllerManager
from rl_lab.environments.base import VectorEnv
from rl_lab.records import EpisodeEnd, VectorStep
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.random import RandomWorkflow
from rl_lab.workflows.random_actions import BLOCK, RandomActions

ONLINE, RANDOM = PhaseView("main", "online"), PhaseView("fill", "warmup", controller_role="random")


class TwoEnvs(VectorEnv):
    """Environment 1 ends every third step, with a reward of 10; all other rewards are 1."""

    num_envs, action_repeat = 2, 1

    def __init__(self, action_spec: ActionSpec) -> None:
        self.observation_spec = {"vector": ObservationSpec("vector", (1,), "float32")}
        self.action_spec, self.events, self.count = action_spec, [], 0

    def reset(self):
        return VectorStep({"vector": np.zeros((2, 1), np.float32)}, np.zeros(2, np.float32), np.ones(2, bool))

    def step(self, action):
        self.count += 1
        observation = {"vector": np.full((2, 1), self.count, np.float32)}
        if self.count % 3:
            return VectorStep(observation, np.ones(2, np.float32), np.zeros(2, bool))
        last = EpisodeEnd(
            np.array([1]),
            {"vector": np.full((1, 1), -1.0, np.float32)},
            np.array([10.0], np.float32),
            np.array([True]),
            [{}],
        )
        return VectorStep(observation, np.array([1.0, 0.0], np.float32), np.array([False, True]), last)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
        first = np.array([self.count == 0, self.count % 3 == 0])
        return VectorStep({"vector": np.full((2, 1), self.count, np.float32)}, np.zeros(2, np.float32), first)

    def render(self):
        return None

    def close(self):
        pass


class Counter(Workflow):
    """Its memory counts the decisions since the episode began."""

    name = "counter"

    def initial_state(self, num_envs):
        return {"seen": torch.zeros(num_envs, 1)}

    def act(self, observation, state, *, mode="eval"):
        seen = state["seen"] + 1
        return seen.numpy().astype(np.int32), {"seen": seen}

    def record_fields(self, state):
        return {"seen": state["seen"].numpy().copy()}


def start(workflow: Workflow, spec: ActionSpec | None = None) -> Workflow:
    envs = TwoEnvs(spec or ActionSpec("discrete", (1,), (3,)))
    context = WorkflowContext(
        config={},
        device=torch.device("cpu"),
        seed=5,
        observation_spec=envs.observation_spec,
        action_spec=envs.action_spec,
        components={"layer": nn.Linear(1, 1)},
        controllers=ControllerManager({}),
        train_envs=envs,
        initial=envs.reset(),
    )
    workflow.initialize(context)
    return workflow


def test_a_record_holds_the_observation_and_the_action_chosen_after_it():
    """The first record is that of the reset, with reward 0 and is_first."""
    block = start(Counter()).collect_step(0, phase=ONLINE).blocks[0]
    assert block.indices is None
    assert block.fields["observation.vector"][:, 0].tolist() == [0.0, 0.0]
    assert block.fields["action"][:, 0].tolist() == [1, 1]
    assert block.fields["reward"].tolist() == [0.0, 0.0]
    assert block.fields["is_first"].tolist() == [True, True]
    assert not block.fields["is_last"].any()


def test_an_episode_end_adds_its_last_record_and_its_summary():
    """The true last observation, its reward, no action; the next episode's first record follows in the next block."""
    workflow = start(Counter())
    results = [workflow.collect_step(0, phase=ONLINE) for _ in range(4)]
    assert [len(result.blocks) for result in results] == [1, 1, 2, 1]
    last = results[2].blocks[1]
    assert last.indices.tolist() == [1]
    assert last.fields["observation.vector"].tolist() == [[-1.0]]
    assert (last.fields["reward"].tolist(), last.fields["is_last"].tolist()) == ([10.0], [True])
    assert last.fields["is_terminal"].tolist() == [True]
    assert "action" not in last.fields  # stored as zeros
    (episode,) = results[2].episodes
    assert (episode.env_index, episode.episode_return, episode.length, episode.is_terminal) == (1, 12.0, 3, True)
    following = results[3].blocks[0]
    assert following.fields["is_first"].tolist() == [False, True]
    assert following.fields["reward"].tolist() == [1.0, 0.0]


def test_memory_is_cleared_where_an_episode_starts_and_only_there():
    """Environment 1 counts anew, environment 0 goes on; extra fields are stored with the record."""
    workflow = start(Counter())
    seen = [workflow.collect_step(0, phase=ONLINE).blocks[0].fields["seen"][:, 0].tolist() for _ in range(5)]
    assert seen == [[1, 1], [2, 2], [3, 3], [4, 1], [5, 2]]


def test_the_random_role_acts_without_the_workflow_and_leaves_no_memory():
    """A warm-up does not put the agent into a state it never saw."""
    workflow = start(Counter())
    actions = np.concatenate([workflow.collect_step(0, phase=RANDOM).blocks[0].fields["action"] for _ in range(100)])
    assert set(actions[:, 0].tolist()) == {0, 1, 2}
    assert actions.dtype == np.int32
    assert "seen" in workflow.collect_step(0, phase=ONLINE).blocks[0].fields
    assert float(workflow._state["seen"].max()) == 1.0


@pytest.mark.parametrize("workflow", [Counter, RandomWorkflow])
@pytest.mark.parametrize("point", range(8))
def test_saved_state_continues_exactly(workflow, point):
    """At any step, in the middle of episodes, both by the workflow's own actions and at random."""

    def play(agent: Workflow, count: int) -> list:
        results = []
        for step in range(count):
            result = agent.collect_step(step, phase=RANDOM if agent._decisions % 5 == 4 else ONLINE)
            fields = result.blocks[0].fields
            results.append((fields["action"].tolist(), fields["is_first"].tolist(), result.episodes))
        return results

    whole = play(start(workflow()), 20)
    first = start(workflow())
    head = play(first, point)
    second = start(workflow())
    second.restart(second.context.train_envs.load_state_dict(first.context.train_envs.state_dict()))
    second.load_state_dict(first.state_dict())
    assert head + play(second, 20 - point) == whole


def test_random_actions_survive_a_block_boundary():
    """Drawing ahead does not show."""
    spec = ActionSpec("continuous", (2,))
    whole = RandomActions(spec, 3, seed=1)
    expected = [whole.draw().copy() for _ in range(2 * BLOCK + 5)]
    assert np.abs(np.stack(expected)).max() <= 1.0
    for point in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
        first, second = RandomActions(spec, 3, seed=1), RandomActions(spec, 3, seed=2)
        for _ in range(point):
            first.draw()
        second.load_state_dict(first.state_dict())
        np.testing.assert_array_equal(second.draw(), expected[point])


def test_mixed_classes_are_each_drawn_in_their_range():
    """MultiDiscrete components have different numbers of classes."""
    workflow = start(RandomWorkflow(), ActionSpec("discrete", (2,), (2, 5)))
    drawn = np.concatenate([workflow.random_action() for _ in range(200)])
    assert [set(drawn[:, index].tolist()) for index in range(2)] == [set(range(2)), set(range(5))]
    torch.manual_seed(0)
    observation = {"vector": np.zeros((64, 1), np.float32)}
    action, _ = workflow.act(observation, {}, mode="eval")
    assert action.shape == (64, 2)
    assert action.max(0).tolist() == [1, 4]


def test_diagnose_names_a_bad_parameter():
    """Before it looks for where a value went wrong."""
    workflow = start(Counter())
    with torch.no_grad():
        workflow.context.components["layer"].weight.fill_(float("inf"))
    zeros, flags = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bool)
    from rl_lab.records import SequenceBatch

    batch = SequenceBatch({"vector": zeros}, zeros, zeros, flags, flags, flags)
    assert workflow.diagnose(batch) == "the parameter components.layer.weight, which holds 1 infinite of 1 values"
    bad = SequenceBatch({"vector": zeros}, zeros, zeros / 0, flags, flags, flags)
    assert workflow.diagnose(bad) == "the batch itself: reward holds 1 NaN of 1 values"
