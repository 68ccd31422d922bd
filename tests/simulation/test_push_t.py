"""The physics of Push-T against gym-pusht's, decision by decision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_lab.simulation.push_t import PushT

pytest.importorskip("gym_pusht")

MIDDLE = [180, 330, 240, 250, 0.4]  # disc and block, far from the walls


def real(seed: int):
    from rl_lab.environments.push_t import PushT as Environment

    env = Environment()
    env.reset(seed=seed, options={"reset_to_state": MIDDLE})
    return env


def seen(env) -> torch.Tensor:
    return torch.from_numpy(env.state()).double().unsqueeze(0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_decisions_lead_where_they_do_in_the_environment(seed: int) -> None:
    """Corners, disc and velocity agree to a hundredth of a pixel, while the block is pushed about away from walls."""
    task, env, rng = PushT(), real(seed), np.random.default_rng(seed)
    state, moved = task.decode(seen(env)), 0.0
    for _ in range(12):
        before = task.keypoints(state)
        target = np.clip(np.asarray(env.block.position) + rng.normal(0.0, 60.0, 2), 150.0, 360.0)
        env.step(target.astype(np.float32))
        state = task.step(state, torch.from_numpy(target.astype(np.float32) / 256.0 - 1.0).double().unsqueeze(0))
        torch.testing.assert_close(task.encode(state), seen(env), atol=0.05, rtol=0)
        moved += float((task.keypoints(state) - before).abs().mean())
    assert moved > 20.0  # pixels: it was pushed, and more than once


def test_a_state_is_read_off_what_is_seen() -> None:
    """And shown again, block at rest."""
    task, env = PushT(), real(3)
    torch.testing.assert_close(task.encode(task.decode(seen(env))), seen(env), atol=1e-3, rtol=0)


def test_the_reward_is_highest_where_the_block_covers_its_outline() -> None:
    task = PushT(approach=0.0)
    goal = task._goal
    first, second = goal[0], goal[1]
    observation = torch.cat([goal.flatten(), torch.zeros(4)]).unsqueeze(0)
    state = task.decode(observation)
    assert task.reward(state, torch.zeros(1, 2), state).item() == pytest.approx(0.0, abs=1e-4)
    moved = state.clone()
    moved[:, 0] += 30.0
    assert task.reward(state, torch.zeros(1, 2), moved).item() == pytest.approx(-0.3, abs=1e-4)
    assert (second - first).norm().item() == pytest.approx(120.0, abs=1e-3)  # the bar's length


def test_actions_may_count_from_the_disc() -> None:
    """With a reach, never further away, and within the field."""
    task = PushT(reach=40.0)
    state = torch.zeros(2, 10)
    state[0, 3:5], state[1, 3:5] = 100.0, 500.0
    target = task.target(state, torch.tensor([[1.0, -0.5], [1.0, 9.0]]))
    torch.testing.assert_close(target, torch.tensor([[140.0, 80.0], [512.0, 512.0]]))
