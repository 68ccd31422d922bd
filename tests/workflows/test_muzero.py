"""MuZero's targets, losses and updates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.workflows.muzero_parts import CONTINUOUS, DISCRETE, IMAGE, VECTOR, make_batch, make_muzero

from rl_lab.errors import ConfigError, DataError
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.muzero_targets import POLICY, VALUE

PHASE = PhaseView("train", "online")
VARIANTS = {
    "plain": {"projection": False},
    "efficientzero": {"value_prefix": True, "correction_interval": 5, "reanalyze": 0.5},
    "gumbel": {"planner": {"rule": "gumbel"}, "reanalyze": 1.0},
    "lambda": {"lambda_": 0.9},
    "search values": {"bootstrap": "search"},
    "continuous": {"action": CONTINUOUS, "reanalyze": 0.5},
    "images": {"observation": IMAGE, "depth": 2, "value_prefix": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns_a_batch(variant: str) -> None:
    """The loss of one batch, seen again and again, goes down; every trained parameter gets a gradient."""
    workflow = make_muzero(**VARIANTS[variant], lr=3e-3)
    batch = make_batch(workflow)
    first = float(workflow.update(batch, phase=PHASE)["loss/total"])
    for optimizer in workflow.optimizers.values():
        assert all(float(value.grad.abs().sum()) > 0.0 for value in optimizer.params[-2:])
    for _ in range(15):
        last = float(workflow.update(batch, phase=PHASE)["loss/total"])
    assert last < first


def test_the_halves_of_an_update_leave_the_other_half_alone() -> None:
    """`update_world_model` moves no policy, `update_controller` moves no model."""
    for hook, still in (("update_world_model", "prediction"), ("update_controller", "dynamics")):
        workflow = make_muzero()
        before = [value.clone() for value in workflow.context.components[still].parameters()]
        getattr(workflow, hook)(make_batch(workflow), phase=PHASE)
        assert all(map(torch.equal, before, workflow.context.components[still].parameters()))


def literal_return(workflow, batch, values, row: int, start: int) -> float | None:
    """The n-step return of one record, step by step; None where it is not known."""
    discount = workflow.target_maker.discount
    total, weight, time = 0.0, 1.0, start
    for _ in range(workflow.td_steps):
        if bool(batch.is_last[row, time]):
            break
        time += 1
        total += weight * float(batch.reward[row, time])
        weight *= discount
    return total if bool(batch.is_terminal[row, time]) else total + weight * float(values[row, time])


@pytest.mark.parametrize("players", [1, 2])
def test_value_targets_equal_a_literal_sum(players: int) -> None:
    """For each window until its episode ends, terminal ends with nothing after them, others with the slow value."""
    workflow = make_muzero(players=players)
    batch = make_batch(workflow)
    targets, _ = workflow.target_maker.make(batch)
    flat = {"vector": batch.observation["vector"].flatten(0, 1)}
    values = workflow.slow.network.value(flat).view(batch.reward.shape)
    for row in range(len(batch.reward)):
        for start in range(workflow.unroll + 1):
            expected = literal_return(workflow, batch, values, row, start)
            assert float(targets.value[row, start]) == pytest.approx(expected, abs=1e-5)
            if bool(batch.is_last[row, start]):
                break


def test_targets_of_a_window_do_not_depend_on_the_others() -> None:
    """One environment or eight: the same records give the same targets, alone or in any batch."""
    workflow = make_muzero(reanalyze=1.0)
    batch = make_batch(workflow)
    together, _ = workflow.target_maker.make(batch)
    for row in (0, 5):
        one = {"extras": {name: value[row : row + 1] for name, value in batch.extras.items()}}
        one["observation"] = {key: value[row : row + 1] for key, value in batch.observation.items()}
        for name in ("action", "reward", "is_first", "is_last", "is_terminal", "indices"):
            one[name] = getattr(batch, name)[row : row + 1]
        alone, _ = workflow.target_maker.make(replace(batch, **one))
        torch.testing.assert_close(alone.value[0], together.value[row])
        torch.testing.assert_close(alone.policy[0], together.policy[row])


def test_reanalysis_with_unchanged_weights_gives_what_was_stored() -> None:
    """The search of acting, stored with the record, is that of a reanalysis by an equal slow copy."""
    workflow = make_muzero(planner={"noise_share": 0.0}, reanalyze=1.0)
    batch = make_batch(workflow)
    shape = batch.reward.shape
    seen = {"vector": batch.observation["vector"].flatten(0, 1).numpy()}
    _, state = workflow.act(seen, workflow.initial_state(len(seen["vector"])), mode="train")
    stored = {name: state[name].view(*shape, *state[name].shape[1:]) for name in (POLICY, VALUE)}
    targets, renewed = workflow.target_maker.make(replace(batch, extras=stored))
    decided = ~batch.is_last[:, : workflow.unroll + 1]
    for name, found in renewed.items():
        torch.testing.assert_close(found[decided], stored[name][:, : workflow.unroll + 1][decided])
    torch.testing.assert_close(targets.policy[decided], stored[POLICY][:, : workflow.unroll + 1][decided])


def test_old_records_have_shorter_returns() -> None:
    workflow = make_muzero(correction_interval=20)
    batch = make_batch(workflow)
    lengths = workflow.target_maker.return_lengths(batch, records=96)
    assert lengths.tolist() == [max(1, 4 - (96 - 8 * row) // 20) for row in range(12)]


def test_value_prefix_rewards_are_differences_along_a_path() -> None:
    """In a search the edge's reward is the prefix of the child less that of its parent, and a new sum every two."""
    workflow = make_muzero(value_prefix=True)
    with torch.no_grad():
        workflow.model.dynamics.head[-1].weight.normal_()
    state = workflow.model.initial({"vector": torch.randn(3, 4)})
    action = torch.eye(3)
    totals, rewards = [], []
    for _ in range(3):
        state, reward, output = workflow.model.step(state, action)
        totals.append(workflow.model.dynamics.support.mean(output))
        rewards.append(reward)
    torch.testing.assert_close(rewards[0], totals[0])
    torch.testing.assert_close(rewards[1], totals[1] - totals[0])
    torch.testing.assert_close(rewards[2], totals[2])
    targets = workflow.model.dynamics.reward_targets(torch.tensor([[1.0], [2.0], [4.0]]), torch.ones(3, 1))
    assert targets[:, 0].tolist() == [1.0, 3.0, 4.0]


def test_masked_actions_are_not_taken() -> None:
    observation = VECTOR | {"action_mask": ObservationSpec("vector", (3,), "float32")}
    workflow = make_muzero(observation, ActionSpec("discrete", (1,), (3,), "action_mask"))
    mask = np.array([[0, 1, 0], [1, 0, 1]], np.float32)
    seen = {"vector": np.zeros((2, 4), np.float32), "action_mask": mask}
    for mode in ("train", "eval"):
        action, state = workflow.act(seen, workflow.initial_state(2), mode=mode)
        assert mask[np.arange(2), action[:, 0]].all()
        assert (state[POLICY].numpy()[mask == 0] == 0.0).all()
    assert "action_mask" not in workflow.model.representation.wiring()


def test_returns_beyond_the_bins_are_reported_with_the_setting() -> None:
    workflow = make_muzero(limit=1.0)
    batch = make_batch(workflow)
    batch = replace(batch, reward=batch.reward + 50.0)
    with pytest.warns(UserWarning, match=r"components\.prediction\.limit=1 is too small"):
        workflow.update(batch, phase=PHASE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"players": 3}, "players=3"),
        ({"discount": 0.0}, "discount=0"),
        ({"unroll": 0}, "unroll=0"),
        ({"reanalyze": 1.5}, "reanalyze=1.5"),
        ({"simulations": 0}, "simulations=0"),
        ({"temperature": [[10, 1.0]]}, "begins at step 0"),
        ({"loss_scales": {"valu": 1.0}}, "value"),
        ({"players": 2, "planner": {"players": 1}}, "the same number"),
        ({"action": CONTINUOUS, "planner": {"sampled_actions": None}}, "sampled_actions"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_muzero(**({"action": DISCRETE} | settings))


def test_records_without_searches_can_be_learned_from_by_searching_them_all() -> None:
    """Data that somebody else collected; the values then come from the network alone."""
    workflow = make_muzero(reanalyze=1.0)
    batch = replace(make_batch(workflow), extras={}, indices=None)
    assert float(workflow.update(batch, phase=PHASE)["loss/policy"]) > 0.0
    with pytest.raises(DataError, match=r"workflow\.reanalyze=1\.0"):
        make_muzero(reanalyze=0.5).update(batch, phase=PHASE)
