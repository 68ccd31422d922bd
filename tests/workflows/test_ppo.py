"""PPO: credit across episode ends, the losses against slow references, memory, normalisers, early stop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ppo_parts import CONTINUOUS, DISCRETE, MULTI, PHASE, make_ppo, make_rollout, whole
from torch.distributions import Categorical, Normal

from rl_lab.errors import ConfigError
from rl_lab.records import Rollout
from rl_lab.specs import ObservationSpec

ACTIONS = {"discrete": DISCRETE, "continuous": CONTINUOUS, "multi_discrete": MULTI}
IMAGE = {"image": ObservationSpec("image", (36, 40, 1), "uint8"), "vector": ObservationSpec("vector", (2,), "float32")}


def slow_gae(rollout: Rollout, reward, value, following, cut, discount, lambda_):
    """The recursion as it is written in the literature, one environment and one step at a time."""
    time, envs = reward.shape
    advantage = torch.zeros(time, envs)
    cuts = dict(zip(rollout.cut_indices.tolist(), cut, strict=True))
    for env in range(envs):
        running = 0.0
        for t in reversed(range(time)):
            terminated, ended = bool(rollout.is_terminal[t, env]), bool(rollout.is_last[t, env])
            if ended and not terminated:
                next_value = float(cuts[t * envs + env])
            else:
                next_value = float(value[t + 1, env]) if t + 1 < time else float(following[env])
            delta = float(reward[t, env]) + discount * next_value * (not terminated) - float(value[t, env])
            running = delta + discount * lambda_ * (not ended) * running
            advantage[t, env] = running
    return advantage


def two_states(*, terminal: bool) -> Rollout:
    """s₀ → s₁ → end, twice, with rewards 1 and 2; the observation is the value that the critic gives to it."""
    shape, flags = (4, 1), torch.tensor([[False], [True], [False], [True]])
    return Rollout(
        number=0, observation={"vector": torch.tensor([[[10.0]], [[20.0]], [[10.0]], [[20.0]]])},
        action=torch.zeros(*shape, 1, dtype=torch.int32), is_first=~flags,
        reward=torch.tensor([[1.0], [2.0], [1.0], [2.0]]), is_last=flags,
        is_terminal=flags if terminal else torch.zeros_like(flags),
        following={"vector": torch.tensor([[10.0]])}, following_first=torch.tensor([True]),
        cut={"vector": torch.full((0 if terminal else 2, 1), 30.0)},
        cut_indices=torch.tensor([] if terminal else [1, 3], dtype=torch.int64),
    )  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False], ids=["terminated", "truncated"])
@pytest.mark.parametrize("lambda_", [0.0, 1.0])
def test_two_state_chain(terminal, lambda_):
    """Beyond a termination there is nothing; a truncation is worth what its last observation is worth (30)."""
    ppo = make_ppo(observation={"vector": ObservationSpec("vector", (1,), "float32")}, discount=0.5, lambda_=lambda_)
    ppo.critic = lambda features: features[..., 0]
    target = ppo.estimate(two_states(terminal=terminal)).target
    last = 2.0 if terminal else 2.0 + 0.5 * 30.0
    first = 1.0 + 0.5 * (20.0 if lambda_ == 0.0 else last)
    assert target.tolist() == [first, last, first, last]


@pytest.mark.parametrize("recurrent", [False, True])
def test_advantages_equal_the_slow_recursion(recurrent):
    """Over rollouts that hold a termination and a truncation and stop in the middle of episodes."""
    ppo = make_ppo(recurrent=recurrent)
    rollout = make_rollout(ppo)
    _, value, advantage, target = ppo.estimate(rollout)
    with torch.no_grad():
        next_value = ppo._next_values(rollout, ppo._features(rollout), value.view(6, 2))
    following, cut = next_value[-1], next_value.view(-1)[rollout.cut_indices]
    expected = slow_gae(rollout, rollout.reward, value.view(6, 2), following, cut, 0.9, 0.8)
    torch.testing.assert_close(advantage.view(6, 2), expected)
    torch.testing.assert_close(target, advantage + value)


def literal_losses(ppo, rollout, old, *, clip, value_clip):
    """The objective with torch's own distributions, one decision at a time."""
    params, value = (head(ppo._features(rollout)) for head in (ppo.policy, ppo.critic))
    advantage = (old.advantage - old.advantage.mean()) / (old.advantage.std() + 1e-8)
    gains, errors, entropies = [], [], []
    for i, action in enumerate(rollout.action.flatten(0, 1)):
        if ppo.policy.action_kind == "continuous":
            parts = [Normal(m, s.exp()) for m, s in zip(params[i], ppo.policy.log_std, strict=True)]
        else:
            parts = [Categorical(logits=logits) for logits in params[i].split(ppo.policy.spec.classes)]
        log_prob = sum(part.log_prob(a) for part, a in zip(parts, action, strict=True))
        entropies.append(sum(part.entropy() for part in parts))
        ratio = torch.exp(log_prob - old.log_prob[i])
        gains.append(min(ratio * advantage[i], torch.clip(ratio, 1 - clip, 1 + clip) * advantage[i]))
        near = old.value[i] + torch.clip(value[i] - old.value[i], -value_clip, value_clip)
        errors.append(max((value[i] - old.target[i]) ** 2, (near - old.target[i]) ** 2))
    policy, error, entropy = (sum(terms) / len(terms) for terms in (gains, errors, entropies))
    return {"policy": -policy, "value": error, "entropy": -entropy}


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_losses_equal_the_literal_ones(action):
    """After the policy has moved, so that some ratios are clipped; gradients too."""
    ppo = make_ppo(action, clip=0.05, value_clip=0.1, entropy_scale=0.01, lr=0.01)
    rollout = make_rollout(ppo)
    for _ in range(3):
        metrics = ppo.update(whole(rollout, is_final=False), phase=PHASE)
    assert 0.0 < float(metrics["policy/clipped"]) < 1.0
    losses = ppo.batch_losses(whole(rollout))
    expected = literal_losses(ppo, rollout, ppo._estimates[1], clip=0.05, value_clip=0.1)
    parameters = [*ppo.policy.parameters(), *ppo.critic.parameters()]
    for name, value in expected.items():
        torch.testing.assert_close(losses[name], value, rtol=1e-4, atol=1e-6)
        found, literal = (
            torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
            for loss in (losses[name], value)
        )
        torch.testing.assert_close(found, literal, rtol=1e-4, atol=1e-6)
    before = [parameter.detach().clone() for parameter in parameters]
    metrics = ppo.update(whole(rollout, is_final=False), phase=PHASE)
    total = expected["policy"] + 0.5 * expected["value"] + 0.01 * expected["entropy"]
    assert metrics["loss/total"] == pytest.approx(total.item(), rel=1e-4)
    assert not torch.equal(before[0], parameters[0])


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_actions_come_from_the_policy(action):
    """Stored form and dtype; `eval` is the mode and repeats; samples have the policy's frequencies."""
    ppo = make_ppo(action)
    observation = {"vector": np.tile(np.array([[0.3, -1.0]], np.float32), (4000, 1))}
    greedy, _ = ppo.act(observation, {}, mode="eval")
    sampled, _ = ppo.act(observation, {}, mode="train")
    for actions in (greedy, sampled):
        assert actions.shape == (4000, *action.shape)
        assert actions.dtype == np.dtype(action.dtype)
    assert (ppo.act(observation, {}, mode="eval")[0] == greedy).all()
    np.testing.assert_allclose(greedy, np.broadcast_to(greedy[0], greedy.shape), rtol=1e-5)  # BLAS may round by row
    params = ppo.policy(torch.from_numpy(observation["vector"][:1]))[0].detach()
    if action.kind == "continuous":
        np.testing.assert_allclose(greedy[0], params.numpy(), rtol=1e-5)
        np.testing.assert_allclose(sampled.mean(0), params.numpy(), atol=0.08)
        np.testing.assert_allclose(sampled.std(0), 1.0, atol=0.05)
        assert np.abs(sampled).max() > 1.0, "only the environment clips"
        return
    for column, logits in enumerate(params.split(action.classes)):
        frequencies = np.bincount(sampled[:, column], minlength=len(logits)) / 4000
        np.testing.assert_allclose(frequencies, logits.softmax(-1).numpy(), atol=0.04)
        assert greedy[0, column] == int(logits.argmax())


def test_the_first_minibatch_has_ratio_one():
    """Estimates and predictions agree before the first step, also through memory and normalisers."""
    for settings in ({}, {"recurrent": True}, {"normalized": True}):
        ppo = make_ppo(**settings)
        rollout = make_rollout(ppo)
        log_ratio = ppo.predict(ppo._minibatch(whole(rollout))).log_ratio
        if not settings.get("recurrent"):  # there the random memories of later sequences are not the scanned ones
            torch.testing.assert_close(log_ratio, torch.zeros(12), rtol=0.0, atol=1e-5)


def test_memory_is_cleared_where_episodes_begin():
    """The scan over a rollout is what acting step by step gave, and sequences start from the stored memory."""
    ppo = make_ppo(recurrent=True, sequence_length=3)
    rollout = make_rollout(ppo)
    state, features = ppo.initial_state(2), []
    for t in range(6):
        state = ppo.reset_state(state, rollout.is_first[t].numpy())
        _, state = ppo.act({"vector": rollout.observation["vector"][t].numpy()}, state, mode="train")
        rollout.extras["memory"][t] = torch.from_numpy(ppo.record_fields(state)["memory"])
        features.append(state["memory"].clone())
    assert not rollout.extras["memory"][2, 0].any()
    assert rollout.extras["memory"][2, 1].any()
    with torch.no_grad():
        torch.testing.assert_close(ppo._features(rollout).view(6, 2, -1), torch.stack(features))
        log_ratio = ppo.predict(ppo._minibatch(whole(rollout, sequence=3))).log_ratio
    assert log_ratio.abs().max() < 1e-5

    other = make_rollout(ppo)
    other.observation["vector"][:2, 0] += 10.0  # the episode that ended before
    with torch.no_grad():
        left, right = (ppo._features(each).view(6, 2, -1) for each in (make_rollout(ppo), other))
    torch.testing.assert_close(left[2:, 0], right[2:, 0])
    assert not torch.allclose(left[1, 0], right[1, 0])


def test_a_memory_with_a_step_of_its_own_learns_by_it():
    """Acting and learning remember alike."""
    ppo = make_ppo(recurrent=True)
    memory = ppo.memory
    plain = memory.step
    memory.step = lambda features, state: 0.5 * plain(features, state)
    features, first = torch.randn(3, 2, memory.cell.input_size), torch.zeros(3, 2, dtype=torch.bool)
    state, states = memory.initial(2), []
    for features_t in features:
        state = memory.step(features_t, state)
        states.append(state)
    torch.testing.assert_close(memory.scan(features, memory.initial(2), first), torch.stack(states))


def test_sequences_need_a_memory():
    """The message says how to get one."""
    with pytest.raises(ConfigError, match="ppo_recurrent"):
        make_ppo(sequence_length=4)


def test_learning_moves_towards_good_actions():
    """A few passes raise the probability of the actions with positive advantage; images and vectors together."""
    ppo = make_ppo(observation=IMAGE, normalize_advantage=False)
    rollout = make_rollout(ppo)
    metrics = [ppo.update(whole(rollout, is_final=False), phase=PHASE) for _ in range(4)]
    assert float(metrics[-1]["loss/policy"]) < float(metrics[0]["loss/policy"])
    assert float(metrics[-1]["loss/value"]) < float(metrics[0]["loss/value"])
    assert math.isfinite(float(metrics[-1]["value/explained_variance"]))


def test_too_large_a_move_ends_the_rollout():
    """Beyond 1.5 × target_kl the parameters stay as they are and the stream drops the rest."""
    ppo = make_ppo(target_kl=1e-4, lr=0.1)
    dropped = []
    ppo.context.data_sources["stream"].drop = lambda: dropped.append(True)
    rollout = make_rollout(ppo)
    ppo.update(whole(rollout, is_final=False), phase=PHASE)
    assert not dropped
    before = [p.clone() for p in ppo.policy.parameters()]
    ppo.update(whole(rollout, is_final=False), phase=PHASE)
    assert dropped
    assert all(torch.equal(a, b) for a, b in zip(before, ppo.policy.parameters(), strict=True))


def test_observation_statistics_change_between_rollouts():
    """They are those of acting as long as the rollout is used, and take it in with its last minibatch."""
    ppo = make_ppo(normalized=True)
    rollout = make_rollout(ppo)
    statistics = ppo.observation_normalizer.statistics[0]
    ppo.update(whole(rollout, is_final=False), phase=PHASE)
    assert float(statistics.count) == 0.0
    ppo.update(whole(rollout), phase=PHASE)
    torch.testing.assert_close(statistics.mean, rollout.observation["vector"].flatten(0, 1).mean(0))
    torch.testing.assert_close(statistics.variance, rollout.observation["vector"].flatten(0, 1).var(0, unbiased=False))


def test_rewards_are_scaled_by_the_spread_of_returns():
    """The discounted return runs on through rollouts and starts anew with each episode; the mean is not taken out."""
    ppo = make_ppo(normalized=True)
    rollouts = [make_rollout(ppo, seed=seed, number=seed) for seed in range(2)]
    returns, running = [], [0.0, 0.0]
    for rollout in rollouts:
        ppo.estimate(rollout)
        for t in range(6):
            for env in range(2):
                running[env] += float(rollout.reward[t, env])
                returns.append(running[env])
                running[env] *= 0.0 if rollout.is_last[t, env] else 0.9
    spread = float(np.std(returns))
    torch.testing.assert_close(ppo.reward_normalizer(rollouts[1].reward), rollouts[1].reward / spread)
    torch.testing.assert_close(ppo._running_return, torch.tensor(running))
