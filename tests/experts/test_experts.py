"""Scripted experts solve their tasks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_lab.environments import inspect_environment, make_vector_env
from rl_lab.errors import ConfigError
from rl_lab.experts.base import EXPERTS, find_expert
from rl_lab.experts.demonstrations import Demonstrations
from rl_lab.orchestration.evaluation import evaluate

WELL = {"cartpole": 500.0, "pendulum": -220.0, "detour": 1.0}  # mean return of ten episodes, at least


@pytest.mark.parametrize("name", sorted(WELL))
def test_an_expert_solves_its_task(name: str) -> None:
    expert = find_expert(name)
    envs = make_vector_env(expert.settings(backend="sync"), seed=0, num_envs=10, stream="final")
    result = evaluate(expert(), envs, 10, seed=0, stream="final")
    envs.close()
    assert result is not None
    assert result.return_mean >= WELL[name]


def test_the_detour_is_taken_on_both_sides_and_kept_to() -> None:
    """A side is drawn once an episode: the path never changes sides before the obstacle."""
    expert = find_expert("detour")()
    state = expert.initial_state(200)
    start = {"vector": np.tile(np.array([[-0.6, 0.0]], np.float32), (200, 1))}
    torch.manual_seed(0)
    action, state = expert.act(start, state)
    upward = action[:, 1] > 0
    assert 70 < upward.sum() < 130
    for _ in range(3):
        again, state = expert.act(start, state)
        np.testing.assert_array_equal(again[:, 1] > 0, upward)


def test_every_expert_is_found_and_unknown_ones_are_named() -> None:
    for name in EXPERTS:
        assert find_expert(name).environment["id"]
    with pytest.raises(ConfigError, match=r"'cartpol' is not an expert. Did you mean 'cartpole'"):
        find_expert("cartpol")


def test_an_expert_refuses_other_environments(tmp_path) -> None:
    settings = find_expert("pendulum").settings()
    with pytest.raises(ConfigError, match="'cartpole' plays CartPole-v1, and the environment is Pendulum-v1"):
        Demonstrations(name="cartpole", episodes=1).record(settings, tmp_path / "data.npz")


def test_the_obstacle_cannot_be_jumped() -> None:
    """Straight ahead ends in the obstacle, without reward."""
    settings = find_expert("detour").settings()
    assert inspect_environment(settings).max_episode_steps == 40
    envs = make_vector_env(settings, seed=0, num_envs=1, stream="eval")
    envs.reset()
    for _ in range(30):
        step = envs.step(np.array([[1.0, 0.0]], np.float32))
        if step.ended is not None:
            break
    assert step.ended is not None
    assert step.ended.is_terminal[0]
    assert step.ended.reward[0] == 0.0
    assert step.ended.info[0]["success"] is False
    envs.close()


def test_waypoints_lead_through_every_maze() -> None:
    """The goal is reached in all three mazes, from anywhere."""
    pytest.importorskip("gymnasium_robotics")
    for name in ("UMaze", "Medium", "Large"):
        settings = find_expert("point_maze").settings(id=f"PointMaze_{name}-v3", backend="sync")
        envs = make_vector_env(settings, seed=0, num_envs=3, stream="final")
        result = evaluate(find_expert("point_maze").for_environment(settings), envs, 3, seed=0, stream="final")
        envs.close()
        assert result is not None
        assert result.shares["success"] == 1.0


def test_the_racing_expert_stays_on_the_track() -> None:
    """After the start, tiles come faster than the frames cost."""
    pytest.importorskip("Box2D")
    settings = find_expert("car_racing").settings(backend="sync")
    envs = make_vector_env(settings, seed=0, num_envs=1, stream="final")
    expert, step, total = find_expert("car_racing")(), envs.reset(), 0.0
    expert.watch(envs.environments)
    for _ in range(160):
        step = envs.step(expert.act(step.observation, {})[0])
        total += float(step.reward[0])
    envs.close()
    assert total > 60.0


def test_the_pushing_expert_pushes_the_block_home() -> None:
    """From beside it: it plans in the physics, and looks at the environment itself, whatever the agent sees."""
    pytest.importorskip("gym_pusht")
    from rl_lab.environments.push_t import PushT

    torch.manual_seed(0)
    env, expert = PushT(observation="pixels"), find_expert("push_t")()
    env.reset(options={"reset_to_state": [380, 200, 300, 230, 0.785]})
    before = env._get_coverage()
    expert.planner.samples, expert.planner.iterations = 64, 1
    expert.watch([env])
    state = expert.initial_state(1)
    for _ in range(12):
        action, state = expert.act({}, state)
        assert np.abs(action).max() <= 1.0
        _, _, _, _, info = env.step(256.0 * (action[0] + 1.0))
    assert info["coverage"] > before + 0.2
