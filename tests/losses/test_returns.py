"""Returns against slow references that follow one episode at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_lab.losses.returns import (
    first_n_step_return,
    lambda_returns,
    masked_discount,
    recursive_returns,
)

DISCOUNT, MIX = 0.9, 0.8


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Sequences that cross episode ends, some terminal and some truncated."""
    generator = torch.Generator().manual_seed(3)
    is_last = torch.rand(6, 12, generator=generator) < 0.25
    is_terminal = is_last & (torch.rand(6, 12, generator=generator) < 0.5)
    reward, value = torch.randn(6, 12, generator=generator), torch.randn(6, 12, generator=generator)
    assert (is_last & ~is_terminal).any()
    assert is_terminal.any()
    return {"reward": reward, "is_last": is_last, "is_terminal": is_terminal, "value": value}


def n_step(batch: dict[str, Tensor], row: int, start: int, n: int) -> float:
    """The definition, walking forward: n rewards, or fewer at an end; then the value, or nothing if terminal."""
    total, factor, t = 0.0, 1.0, start
    for _ in range(n):
        t += 1
        total += factor * batch["reward"][row, t].item()
        if batch["is_terminal"][row, t]:
            return total
        factor *= DISCOUNT
        if batch["is_last"][row, t] or t == batch["reward"].shape[1] - 1:
            break
    return total + factor * batch["value"][row, t].item()


def steps_to_end(batch: dict[str, Tensor], row: int, start: int) -> int:
    for t in range(start + 1, batch["reward"].shape[1]):
        if batch["is_last"][row, t]:
            return t - start
    return batch["reward"].shape[1] - 1 - start


def lambda_return(batch: dict[str, Tensor], row: int, start: int) -> float:
    """(1 - λ) Σ λ^{n-1} G^(n), with the rest of the weight on the longest return."""
    longest = steps_to_end(batch, row, start)
    total = sum((1 - MIX) * MIX ** (n - 1) * n_step(batch, row, start, n) for n in range(1, longest))
    return total + MIX ** (longest - 1) * n_step(batch, row, start, longest)


def check(got: Tensor, batch: dict[str, Tensor], reference: object) -> None:
    """Everywhere but at last records, whose successor belongs to another episode."""
    rows, columns = torch.nonzero(~batch["is_last"][:, :-1], as_tuple=True)
    expected = torch.tensor([reference(r, t) for r, t in zip(rows.tolist(), columns.tolist(), strict=True)])
    torch.testing.assert_close(got[rows, columns], expected, rtol=1e-4, atol=1e-5)


def test_lambda_mixes_n_step_returns(batch: dict[str, Tensor]) -> None:
    """At truncations the return bootstraps from the last record's value; at terminations from nothing."""
    live = masked_discount(batch["is_terminal"], DISCOUNT)
    cut = MIX * (1.0 - batch["is_last"].float())
    check(
        lambda_returns(batch["reward"], live, batch["value"], cut), batch, lambda row, t: lambda_return(batch, row, t)
    )


def test_imagined_lambda_returns_by_hand() -> None:
    """DreamerV3: R_t = r_{t+1} + c_{t+1}·((1-λ)·v_{t+1} + λ·R_{t+1}), R_H = v_H."""
    reward, live = torch.tensor([[9.0, 1.0, 2.0]]), torch.tensor([[0.1, 0.5, 0.25]])
    value = torch.tensor([[7.0, 4.0, 8.0]])
    last = 2.0 + 0.25 * 8.0
    first = 1.0 + 0.5 * (0.2 * 4.0 + 0.8 * last)
    torch.testing.assert_close(lambda_returns(reward, live, value, 0.8), torch.tensor([[first, last]]))


def test_a_reward_raises_only_the_returns_before_it() -> None:
    """Credit: one more reward at record 3 adds 1 to the return of state 2, live·λ to that of 1, nothing later."""
    live, value = torch.full((1, 6), 0.9), torch.zeros(1, 6)
    plain, bumped = torch.zeros(1, 6), torch.zeros(1, 6)
    bumped[0, 3] = 1.0
    change = lambda_returns(bumped, live, value, 0.5) - lambda_returns(plain, live, value, 0.5)
    torch.testing.assert_close(change, torch.tensor([[0.2025, 0.45, 1.0, 0.0, 0.0]]))


def test_recursive_form_covers_the_older_convention() -> None:
    """Dreamer V1 and V2: R_t = r_t + d_t·((1-λ)·v_{t+1} + λ·R_{t+1})."""
    reward, discount, value = torch.randn(4, 5), torch.rand(4, 5), torch.randn(4, 5)
    got = recursive_returns(reward[:, :-1], discount[:, :-1], value[:, 1:], 0.95, value[:, -1])
    following = value[:, -1]
    for t in (3, 2, 1, 0):
        following = reward[:, t] + discount[:, t] * (0.05 * value[:, t + 1] + 0.95 * following)
        torch.testing.assert_close(got[:, t], following)


def test_time_major_equals_batch_first(batch: dict[str, Tensor]) -> None:
    live = masked_discount(batch["is_terminal"], DISCOUNT)
    arguments = (batch["reward"], live, batch["value"])
    swapped = tuple(x.T for x in arguments)
    torch.testing.assert_close(lambda_returns(*swapped, dim=0).T, lambda_returns(*arguments))


@pytest.mark.parametrize("n", [1, 2, 5, 11])
def test_the_n_step_return_of_the_first_state(batch: dict[str, Tensor], n: int) -> None:
    """One value is enough: that of the record where the return ends."""
    batch = {name: values[:, : n + 1] for name, values in batch.items()}
    live = masked_discount(batch["is_terminal"], DISCOUNT)
    ends = batch["is_last"][:, 1:].clone()
    ends[:, -1] = True
    bootstrap = batch["value"].gather(1, 1 + ends.int().argmax(1, keepdim=True))[:, 0]
    returns = first_n_step_return(batch["reward"], live, batch["is_last"], bootstrap)
    torch.testing.assert_close(returns, torch.tensor([n_step(batch, row, 0, n) for row in range(len(returns))]))


@pytest.mark.parametrize("dim", [0, 1])
def test_recursive_returns_without_a_gradient_are_the_same(dim: int) -> None:
    """They take a way of their own."""
    generator = torch.Generator().manual_seed(0)
    reward, live, value, mix = torch.rand(4, 6, 5, generator=generator)
    last = value.select(dim, -1)
    expected = recursive_returns(reward.clone().requires_grad_(), live, value, mix, last, dim=dim)
    assert expected.requires_grad
    torch.testing.assert_close(recursive_returns(reward, live, value, mix, last, dim=dim), expected.detach())
