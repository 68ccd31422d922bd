"""Board games: rules, opponents, masks, and how vector environments and random agents see them."""

from __future__ import annotations

import numpy as np
import pytest

from rl_lab.environments import EnvironmentSettings, make_vector_env
from rl_lab.environments.board_games import Connect4, TicTacToe
from rl_lab.errors import ConfigError
from rl_lab.specs import ActionSpec
from rl_lab.workflows.random_actions import legal_action


def play(game, moves: list[int]) -> list[float]:
    game.reset(seed=0)
    return [game.step(move)[1] for move in moves]


def test_three_in_a_row_wins_for_the_mover() -> None:
    """In self-play the observation is that of the side to move: own stones are 1."""
    game = TicTacToe()
    assert play(game, [0, 3, 1, 4, 2]) == [0.0, 0.0, 0.0, 0.0, 1.0]
    game.reset(seed=0)
    seen = game.step(4)[0]
    assert seen["board"].tolist() == [[0, 0, 0], [0, -1, 0], [0, 0, 0]]
    assert seen["action_mask"].tolist() == [1, 1, 1, 1, 0, 1, 1, 1, 1]
    *_, (_, reward, ended, _, _) = [game.reset(seed=0)] + [game.step(move) for move in (0, 1, 2, 4, 3, 5, 7, 6, 8)]
    assert (reward, ended) == (0.0, True)


def test_an_illegal_move_loses() -> None:
    game = TicTacToe()
    game.reset(seed=0)
    game.step(0)
    _, reward, ended, _, info = game.step(0)
    assert (reward, ended, info) == (-1.0, True, {"illegal": True})


@pytest.mark.parametrize("moves", [[3, 0, 3, 0, 3, 0, 3], [0, 6, 1, 6, 2, 6, 3], [0, 1, 1, 2, 2, 3, 2, 3, 3, 6, 3]])
def test_four_in_a_row_wins_upright_flat_and_slanting(moves: list[int]) -> None:
    rewards = play(Connect4(), moves)
    assert rewards == [0.0] * (len(moves) - 1) + [1.0]


def test_a_full_column_is_masked() -> None:
    game = Connect4()
    game.reset(seed=0)
    for _ in range(6):
        seen = game.step(2)[0]
    assert seen["action_mask"].tolist() == [1, 1, 0, 1, 1, 1, 1]


def test_games_of_self_play_may_open_with_random_moves() -> None:
    """Any number up to the limit, and none that ends a game; the side to move sees its own stones as 1."""
    game, stones = TicTacToe(random_moves=8), set()
    for seed in range(200):
        board = game.reset(seed=seed)[0]["board"]
        stones.add(int(np.abs(board).sum()))
        assert board.sum() in (0, -1)  # whose turn it is has as many stones as the other, or one less
        sides = (game.own, game.other)
        assert not any(game.wins(side, cell) for side in sides for cell in range(9) if side >> cell & 1)
        assert game.legal(game.own, game.other)
    assert stones >= {0, 1, 2, 3, 4, 5, 6}
    with pytest.raises(ConfigError, match="random_moves=9"):
        TicTacToe(random_moves=9)


def test_two_perfect_players_draw_and_a_random_one_never_wins() -> None:
    for seed in range(30):
        game = TicTacToe(opponent="minimax", depth=9)
        game.reset(seed=seed)
        ended, random = False, np.random.default_rng(seed)
        while not ended:
            perfect = seed % 2 == 0
            action = game.choose() if perfect else int(random.choice(game.legal(game.own, game.other)))
            _, reward, ended, _, _ = game.step(action)
        assert reward <= 0.0
        assert reward == 0.0 or not perfect


def test_minimax_takes_a_win_and_blocks_one() -> None:
    game = Connect4(opponent="minimax", depth=2)
    game.reset(seed=0)
    game.own, game.other = sum(1 << 35 + column for column in (0, 1, 2)), sum(1 << 28 + column for column in (0, 1, 2))
    assert game.choose() == 3  # its own four come first
    game.own, game.other = 1 << 41, sum(1 << 35 + column for column in (0, 1, 2))
    assert game.choose() == 3


def test_the_mask_is_part_of_the_action_spec() -> None:
    envs = make_vector_env(EnvironmentSettings(id="rl_lab/Connect4-v0", num_envs=2), seed=0)
    try:
        assert envs.action_spec == ActionSpec("discrete", (1,), (7,), "action_mask")
        assert envs.observation_spec["board"].shape == (6, 7)
        assert envs.reset().observation["action_mask"].tolist() == [[1.0] * 7] * 2
    finally:
        envs.close()


def test_random_actions_are_legal() -> None:
    spec = ActionSpec("discrete", (1,), (3,), "action_mask")
    mask = np.array([[0, 1, 1], [0, 0, 1], [1, 1, 1]], np.float32)
    for drawn in range(3):
        action = legal_action(np.full((3, 1), drawn, np.int32), {"action_mask": mask}, spec)
        assert mask[np.arange(3), action[:, 0]].all()
    assert action[:, 0].tolist() == [1, 2, 2]


def test_unknown_opponents_are_refused() -> None:
    with pytest.raises(ConfigError, match="opponent='human'"):
        TicTacToe(opponent="human")
