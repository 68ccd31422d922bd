"""Evaluation: fair between short and long episodes, repeatable, and invisible to training."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from orchestration_toys import CountingEnvs, build

from rl_lab.errors import ConfigError
from rl_lab.orchestration.evaluation import evaluate


@pytest.fixture
def workflow(tmp_path):
    orchestrator = build(tmp_path, [{"duration": 10}])
    yield orchestrator.workflow
    orchestrator.close()


def test_long_episodes_count_as_often_as_short_ones(workflow):
    """With lengths 2 and 50, counting whichever ends first would play the short one alone."""
    result = evaluate(workflow, CountingEnvs((2, 50)), 6, seed=0)
    assert result.lengths == (2, 50, 2, 50, 2, 50)
    assert result.returns == (2.0, 51.0, 2.0, 51.0, 2.0, 51.0)
    assert result.return_mean == 26.5
    assert result.return_std == 24.5


def test_episodes_that_do_not_divide_evenly(workflow):
    """Episode k runs in environment k mod n; fewer episodes than environments leave some idle."""
    assert evaluate(workflow, CountingEnvs((2, 3, 4)), 4, seed=0).lengths == (2, 3, 4, 2)
    assert evaluate(workflow, CountingEnvs((2, 3, 4)), 2, seed=0).lengths == (2, 3)


def test_training_does_not_notice(workflow):
    """Every global random stream goes on where it was."""
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    evaluate(workflow, CountingEnvs(), 3, seed=0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_the_same_agent_gets_the_same_score(workflow):
    """Whatever acting draws is seeded from (seed, stream); another stream or seed draws anew."""
    runs = {}
    for name, seed, stream in [("a", 0, "eval"), ("b", 0, "eval"), ("c", 0, "final"), ("d", 1, "eval")]:
        torch.manual_seed(hash(name) % 1000)
        envs = CountingEnvs()
        evaluate(workflow, envs, 4, seed=seed, stream=stream)
        runs[name] = envs.actions
    assert runs["a"] == runs["b"]
    assert runs["a"] != runs["c"]
    assert runs["a"] != runs["d"]


def test_frames_are_those_of_the_first_episode(workflow):
    """One frame for each decision of episode 0."""
    result = evaluate(workflow, CountingEnvs((3, 5)), 4, seed=0, record=True)
    assert result.frames.shape == (3, 4, 4, 3)
    assert result.frames[:, 0, 0, 0].tolist() == [0, 1, 2]


def test_a_stop_gives_up_without_a_score(workflow):
    """Half an evaluation is none."""
    assert evaluate(workflow, CountingEnvs(), 4, seed=0, stop=lambda: True) is None


def test_no_episodes_is_an_error(workflow):
    """A mean of nothing is refused."""
    with pytest.raises(ConfigError, match=r"evaluation\.episodes is 0"):
        evaluate(workflow, CountingEnvs(), 0, seed=0)
