"""Using a run: loading, acting, evaluating, imagining, with nothing but its directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.errors import ConfigError
from rl_lab.experiment.agent import Agent
from rl_lab.experiment.evaluate import evaluate_run
from rl_lab.experiment.results import chosen_actions


@pytest.fixture(scope="module")
def agent(dreamer_run: Path) -> Agent:
    return rl_lab.load(dreamer_run)


def test_three_lines_play_an_episode(agent: Agent) -> None:
    """The user's own observation goes in; what comes out goes into env.step."""
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    state = agent.initial_state(num_envs=1)
    for _ in range(5):
        action, state = agent.act(observation, state)
        assert env.action_space.contains(action)
        observation, *_ = env.step(action)


def test_a_batch_of_environments(agent: Agent) -> None:
    """Each environment has its own memory: what one of them sees does not reach the others."""
    first = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    second = np.concatenate([first[:2], 10 * first[2:]])
    memories = []
    for observations in (first, second):
        torch.manual_seed(0)
        state = agent.initial_state(3)
        for _ in range(10):  # an untrained model needs some steps to sample another latent for another observation
            action, state = agent.act(observations, state)
            assert action.shape == (3,)
        memories.append(state.state["deter"])
    torch.testing.assert_close(memories[0][:2], memories[1][:2])
    assert not torch.allclose(memories[0][2], memories[1][2])


def test_memory_can_be_cleared_for_some(agent: Agent) -> None:
    """An environment that starts anew forgets; the other one does not."""
    _, state = agent.act(np.ones((2, 4), np.float32), agent.initial_state(2))
    cleared = agent.reset_state(state, np.array([True, False]))
    assert float(cleared.state["deter"][0].abs().sum()) == 0.0
    assert float(cleared.state["deter"][1].abs().sum()) > 0.0


def test_a_wrong_shape_is_explained(agent: Agent) -> None:
    """Seen and expected shapes are in the message."""
    with pytest.raises(ConfigError, match=r"\(5,\).*\(1, 4\) or \(4,\)"):
        agent.act(np.zeros(5, np.float32), agent.initial_state(1))


def test_another_environment_is_refused(dreamer_run: Path) -> None:
    """An agent sees what it was trained on, or nothing."""
    with pytest.raises(ConfigError, match="CartPole-v1"):
        rl_lab.load(dreamer_run, env=gymnasium.make("Pendulum-v1"))


def test_evaluation_repeats_the_final_one(dreamer_run: Path) -> None:
    """The same agent on the same held-out episodes gets the score of summary.json."""
    summary = json.loads((dreamer_run / "summary.json").read_text())
    evaluation = evaluate_run(dreamer_run)
    assert evaluation.as_dict()["eval/return_mean"] == summary["eval/return_mean"]
    assert evaluation.as_dict()["mode"] == "greedy"


@pytest.mark.parametrize(("workflow", "actions"), [({}, "greedy"), ({"sample_in_eval": True}, "sampled")])
def test_an_evaluation_says_how_actions_were_chosen(workflow: dict, actions: str) -> None:
    """Not every workflow knows the setting."""
    assert chosen_actions({"workflow": workflow}) == actions


def test_only_the_run_directory_is_needed(dreamer_run: Path, tmp_path: Path) -> None:
    """A copy elsewhere works as well, also from one of its checkpoints."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(dreamer_run, copy, symlinks=True)
    assert rl_lab.load(copy).initial_state(2).is_first.all()
    assert rl_lab.load(copy / "checkpoints" / "latest").run.path == copy
