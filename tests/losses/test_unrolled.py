"""Returns and masks of unrolled windows, against hand-solved ones."""

from __future__ import annotations

import pytest
import torch

from rl_lab.losses.unrolled import absorb, bootstrap_positions, episode_masks, unrolled_n_step_returns

TERMINAL = torch.tensor([[0, 0, 1, 0, 0, 0]], dtype=torch.bool)
NEVER = torch.zeros(1, 6, dtype=torch.bool)


def returns(reward: list[float], is_last: torch.Tensor, is_terminal: torch.Tensor, **settings) -> list[float]:
    """With the value 10 in every record."""
    states, steps, discount = settings["states"], settings["steps"], settings["discount"]
    position = bootstrap_positions(is_last, steps, states)
    value = 10.0 * (1.0 - is_terminal.gather(1, position).float())
    found = unrolled_n_step_returns(torch.tensor([reward]), position, value, discount=discount, steps=steps)
    return absorb(found, episode_masks(is_last, is_terminal, states))[0].tolist()


def test_n_rewards_and_then_the_value() -> None:
    """Reward t arrives with record t: the first return begins with the reward of record 1."""
    reward = [100.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert returns(reward, NEVER, NEVER, states=3, steps=2, discount=0.5) == [1 + 1 + 2.5, 2 + 1.5 + 2.5, 3 + 2 + 2.5]


def test_a_window_that_is_too_short_bootstraps_at_its_end() -> None:
    assert returns([0, 1.0, 1.0, 1.0, 1.0, 1.0], NEVER, NEVER, states=5, steps=3, discount=1.0)[-1] == 11.0


def test_a_terminal_record_ends_the_return_and_is_worth_nothing() -> None:
    reward = [0.0, 1.0, 7.0, 100.0, 100.0, 100.0]
    assert returns(reward, TERMINAL, TERMINAL, states=5, steps=3, discount=0.5) == [4.5, 7.0, 0.0, 0.0, 0.0]


def test_a_truncated_record_is_bootstrapped_from() -> None:
    found = returns([0.0, 1.0, 7.0, 100.0, 100.0, 100.0], TERMINAL, NEVER, states=2, steps=3, discount=0.5)
    assert found == [1 + 3.5 + 2.5, 7 + 5.0]


def test_two_players_alternate_in_sign() -> None:
    """The mover of record 2 wins: +1 for it, -1 for the mover before, +1 for the one before that."""
    is_last = torch.tensor([[0, 0, 0, 1, 0, 0]], dtype=torch.bool)
    reward = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert returns(reward, is_last, is_last, states=4, steps=5, discount=-1.0) == [1.0, -1.0, 1.0, 0.0]


@pytest.mark.parametrize("terminal", [True, False])
def test_what_counts_beyond_the_end(terminal: bool) -> None:
    """After a termination value and reward are known to be 0; after a truncation nothing is known."""
    masks = episode_masks(TERMINAL, TERMINAL if terminal else NEVER, 5)
    assert masks.inside[0].tolist() == [1, 1, 1, 0, 0]
    assert masks.decided[0].tolist() == [1, 1, 0, 0, 0]
    assert masks.known[0].tolist() == ([1, 1, 1, 1, 1] if terminal else [1, 1, 0, 0, 0])


def test_shorter_returns_for_some_windows() -> None:
    position = bootstrap_positions(torch.zeros(2, 8, dtype=torch.bool), torch.tensor([1, 4]), 3)
    assert position.tolist() == [[1, 2, 3], [4, 5, 6]]
