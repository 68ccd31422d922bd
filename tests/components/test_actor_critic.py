"""Learning in dreams: every version's losses and gradients against a slow reference, written out state by state."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from tests.workflows.dreamer_family import make_v1, make_v2, make_v3_2023
from tests.workflows.dreamer_parts import CONTINUOUS, DISCRETE, make_dreamer
from torch import Tensor

from rl_lab.components.behaviours import BehaviourRules
from rl_lab.components.behaviours.actor_critic import RecordedPolicy, frozen
from rl_lab.components.behaviours.recorded_dream import RecordedDream
from rl_lab.components.representation_learners import rssm as rssm_module
from rl_lab.components.representation_learners.base import LatentState
from rl_lab.errors import ConfigError
from rl_lab.nn import host_threads
from rl_lab.nn.fusion import has_numba
from rl_lab.nn.normed_layers import LayerRecord
from rl_lab.specs import ActionSpec

STARTS, LAMBDA = 5, 0.95

needs_numba = pytest.mark.skipif(not has_numba(), reason="needs Numba")


class Dreamed(NamedTuple):
    """One dream, as lists over its states 0 … H."""

    features: list[Tensor]
    actions: list[Tensor]
    reward: list[Tensor]
    live: list[Tensor]
    value: list[Tensor]
    slow: list[Tensor] | None


def start_of(workflow) -> LatentState:
    """Any state that the latent space has."""
    rssm, noise = workflow.rssm, torch.randn(STARTS, workflow.rssm.deter)
    params = rssm.prior(noise)
    return LatentState(torch.tanh(noise), rssm.sample(params, None, noise.dtype)).detach()


def dream_by_hand(workflow, start: LatentState) -> Dreamed:
    """Step by step, from the noise that the behaviour draws; the gradient of everything is kept."""
    rssm, actor, horizon = workflow.rssm, workflow.actor, workflow.horizon
    latent_noise = rssm.draw_noise((horizon, STARTS), "cpu")
    action_noise = actor.draw_noise((horizon, STARTS), "cpu")
    state, features, actions = start, [start.features], []
    for t in range(horizon):
        action = actor.distribution(actor(features[-1].detach())).sample(action_noise[t])
        state = rssm.predict_step(state, action, latent_noise[t])
        features.append(state.features)
        actions.append(action)
    reward = [workflow.reward.mean(workflow.reward(f)) for f in features]
    if workflow.continuation is None:
        live = [torch.full((STARTS,), workflow.discount) for _ in features]
    else:
        live = [workflow.continuation.mean(workflow.continuation(f)) for f in features]
    value = [workflow.critic.mean(workflow.critic(f)) for f in features]
    slow = None if workflow.critic.slow is None else [workflow.critic.slow_mean(f) for f in features]
    return Dreamed(features, actions, reward, live, value, slow)


def critic_loss(workflow, feature: Tensor, target: Tensor) -> Tensor:
    return workflow.critic.loss(workflow.critic(feature.detach()), target.detach())


def reference_v1(workflow, dream: Dreamed, terminal: Tensor) -> tuple[Tensor, Tensor]:
    """States 1 … H only; R_t = r_t + c_t·((1 - λ)·v_{t+1} + λ·R_{t+1}); the actor raises w_t·R_t."""
    last = workflow.horizon
    returns, weight = {last: dream.value[last]}, {1: 1.0 - terminal.float()}
    for t in reversed(range(1, last)):
        mixed = (1 - LAMBDA) * dream.value[t + 1] + LAMBDA * returns[t + 1]
        returns[t] = dream.reward[t] + dream.live[t] * mixed
    for t in range(2, last):
        weight[t] = (weight[t - 1] * dream.live[t - 1]).detach()
    policy = [-weight[t] * returns[t] for t in range(1, last)]
    value = [weight[t] * critic_loss(workflow, dream.features[t], returns[t]) for t in range(1, last)]
    return torch.stack(policy).mean(), torch.stack(value).mean()


def reference_v2(workflow, dream: Dreamed, terminal: Tensor, gradient: str) -> tuple[Tensor, Tensor]:
    """States 0 … H; the slow critic in returns and baselines; action t is credited with R_{t+1}."""
    last = workflow.horizon
    live = [workflow.discount * (1.0 - terminal.float()), *dream.live[1:]]
    returns, weight = {last: dream.slow[last]}, {0: torch.ones(STARTS)}
    for t in reversed(range(last)):
        mixed = (1 - LAMBDA) * dream.slow[t + 1] + LAMBDA * returns[t + 1]
        returns[t] = dream.reward[t] + live[t] * mixed
    for t in range(1, last):
        weight[t] = (weight[t - 1] * live[t - 1]).detach()
    policy = []
    for t in range(last - 1):
        distribution = workflow.actor.distribution(workflow.actor(dream.features[t].detach()))
        advantage = (returns[t + 1] - dream.slow[t]).detach()
        reinforce = distribution.log_prob(dream.actions[t].detach()) * advantage
        objective = {
            "reinforce": reinforce, "dynamics": returns[t + 1], "mixed": 0.1 * returns[t + 1] + 0.9 * reinforce,
        }[gradient]  # fmt: skip
        policy.append(-weight[t] * (objective + workflow.entropy_scale * distribution.entropy()))
    value = [weight[t] * critic_loss(workflow, dream.features[t], returns[t]) for t in range(last)]
    return torch.stack(policy).mean(), torch.stack(value).mean()


def reference_v3(workflow, dream: Dreamed, terminal: Tensor, gradient: str, root: str) -> tuple[Tensor, Tensor]:
    """R_t = r_{t+1} + c_{t+1}·(…); advantages over a percentile range; two targets for the critic."""
    last = workflow.horizon
    live = [dream.live[0] if root == "predicted" else 1.0 - terminal.float(), *dream.live[1:]]
    returns, weight = {last: dream.value[last]}, {0: live[0].detach()}
    for t in reversed(range(last)):
        mixed = (1 - LAMBDA) * dream.value[t + 1] + LAMBDA * returns[t + 1]
        returns[t] = dream.reward[t + 1] + live[t + 1] * mixed
    for t in range(1, last):
        weight[t] = (weight[t - 1] * live[t]).detach()
    every = torch.stack([returns[t] for t in range(last)]).detach().flatten()
    spread = 0.01 * (torch.quantile(every, 0.95) - torch.quantile(every, 0.05))  # both averages begin at 0
    scale = spread.clamp(min=1.0)
    policy, value = [], []
    for t in range(last):
        distribution = workflow.actor.distribution(workflow.actor(dream.features[t].detach()))
        advantage = (returns[t] - dream.value[t]) / scale
        reinforce = distribution.log_prob(dream.actions[t].detach()) * advantage.detach()
        objective = advantage if gradient == "dynamics" else reinforce
        policy.append(-weight[t] * (objective + workflow.entropy_scale * distribution.entropy()))
        both = critic_loss(workflow, dream.features[t], returns[t])
        both = both + critic_loss(workflow, dream.features[t], dream.slow[t])
        value.append(weight[t] * both)
    return torch.stack(policy).mean(), torch.stack(value).mean()


def record(workflow) -> None:
    """The dream as a compiled update has it."""
    behaviour = workflow.behaviour
    behaviour._recorded_dream = RecordedDream(workflow.rssm, workflow.actor, torch.float32)


def stir(workflow) -> None:
    """Zero-initialised outputs would hide mistakes; the slow critic must differ from the fast one."""
    torch.manual_seed(3)
    with torch.no_grad():
        for head in (workflow.reward.head, workflow.critic.head):
            for output in head.outputs:
                output.weight.add_(0.3 * torch.randn_like(output.weight))
        if workflow.continuation is not None:
            workflow.continuation.head.outputs[0].bias.add_(1.0)


def compare(workflow, reference) -> None:
    """Both losses, and the gradients of all trained parameters of actor and critic; the model gets none."""
    stir(workflow)
    start = start_of(workflow)
    terminal = torch.zeros(STARTS, dtype=torch.bool)
    terminal[1] = True
    torch.manual_seed(5)
    expected_policy, expected_value = reference(dream_by_hand(workflow, start), terminal)
    torch.manual_seed(5)
    losses = workflow.behaviour.learn(start, terminal).losses
    torch.testing.assert_close(losses["policy"], expected_policy)
    torch.testing.assert_close(losses["value"], expected_value)
    for module, loss, expected in (
        (workflow.actor, losses["policy"], expected_policy),
        (workflow.critic.head, losses["value"], expected_value),
    ):
        parameters = list(module.parameters())
        wanted = torch.autograd.grad(expected, parameters, retain_graph=True)
        assert sum(gradient.abs().sum() for gradient in wanted) > 0
        result = torch.autograd.grad(loss, parameters, retain_graph=True)
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=3e-5)
    for part in workflow.context.components.values():
        part.zero_grad()
    losses = workflow.behaviour.learn(start, terminal).losses
    (losses["policy"] + losses["value"]).backward()
    for name, part in workflow.context.components.items():
        assert all(value.grad is None or not value.grad.any() for value in part.parameters()), name


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize("with_continue", [True, False])
@pytest.mark.parametrize("recorded", [False, True])
def test_dreamer_v1(action, with_continue, recorded):
    """Dynamics backpropagation, no baseline, no target network; with and without a predicted discount."""
    workflow = make_v1(action, with_continue=with_continue)
    if recorded:
        record(workflow)
    compare(workflow, lambda dream, terminal: reference_v1(workflow, dream, terminal))


@pytest.mark.parametrize(
    ("action", "gradient"),
    [(DISCRETE, "reinforce"), (CONTINUOUS, "dynamics"), (DISCRETE, "mixed"), (CONTINUOUS, "mixed")],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_dreamer_v2(action, gradient, recorded):
    """Each estimator; `auto` is REINFORCE for discrete and dynamics for continuous actions."""
    workflow = make_v2(action, actor_gradient="mixed" if gradient == "mixed" else "auto")
    assert workflow.behaviour.rules.gradient == gradient
    with torch.no_grad():
        for value in workflow.critic.slow.parameters():
            value.add_(0.2 * torch.randn_like(value))
    if recorded and gradient != "reinforce":
        record(workflow)
    compare(workflow, lambda dream, terminal: reference_v2(workflow, dream, terminal, gradient))


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_dreamer_v3(action):
    """REINFORCE for all actions; the first state's weight is predicted."""
    workflow = make_dreamer(action=action)
    compare(workflow, lambda dream, terminal: reference_v3(workflow, dream, terminal, "reinforce", "predicted"))


def test_a_dream_without_gradient_records_the_actor():
    """On the CPU what the actor computed while dreaming is not computed again for its loss."""
    pytest.importorskip("numba")
    workflow = make_dreamer(action=DISCRETE)
    with torch.no_grad():
        features, _, record = workflow.behaviour._dream(start_of(workflow))
    assert record is not None
    torch.testing.assert_close(workflow.actor.head(features[:-1], record), workflow.actor(features[:-1]))


@pytest.mark.parametrize(("action", "gradient"), [(CONTINUOUS, "dynamics"), (DISCRETE, "reinforce")])
def test_dreamer_v3_of_2023(action, gradient):
    """The advantage itself is differentiated for continuous actions; the first state's weight is its true flag."""
    workflow = make_v3_2023(action)
    compare(workflow, lambda dream, terminal: reference_v3(workflow, dream, terminal, gradient, "true flag"))


def test_frozen_parts_pass_gradients_on():
    """By their inputs, not by their parameters, which require gradients again afterwards."""
    layer, x = torch.nn.Linear(3, 2), torch.ones(1, 3, requires_grad=True)
    with frozen(layer):
        y = layer(x).sum()
    y.backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0, keepdim=True))
    assert layer.weight.requires_grad


def test_rules_that_contradict_are_refused():
    """A start that cannot be dropped, and a critic without the copy that is asked for."""
    with pytest.raises(ConfigError, match="drop_start"):
        BehaviourRules(drop_start=True)
    workflow = make_v1()
    workflow.behaviour_rules = lambda: BehaviourRules(target_critic="slow")
    with pytest.raises(ConfigError, match="no slow copy"):
        workflow._bind_context(workflow.context)


def recorded_dream(workflow) -> tuple[Tensor, LayerRecord]:
    """Features of a dream on the CPU and the record of its actor; features and actions are those of single steps."""
    start = start_of(workflow)
    torch.manual_seed(1)
    expected = dream_by_hand(workflow, start)
    torch.manual_seed(1)
    with torch.no_grad():
        features, actions, record = workflow.behaviour._dream(start)
    torch.testing.assert_close(features, torch.stack(expected.features).detach(), rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(actions, torch.stack(expected.actions).detach(), rtol=3e-5, atol=3e-5)
    assert record is not None
    return features, record


@needs_numba
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("action", [DISCRETE, CONTINUOUS])
def test_a_dream_in_one_kernel_equals_its_steps(action, threads, monkeypatch):
    """The actor's layers, its samples and the model, step by step; threads share the starts."""
    monkeypatch.setattr(host_threads, "_threads", threads)
    monkeypatch.setattr(rssm_module, "FEW", 1)
    workflow = make_dreamer(action=action)
    features, record = recorded_dream(workflow)
    assert RecordedPolicy(workflow.actor, record).arrays() is not None
    seen = features[:-1]
    torch.testing.assert_close(workflow.actor.head(seen, record), workflow.actor.head(seen), rtol=3e-5, atol=3e-5)


@needs_numba
def test_actors_without_a_kernel_dream_step_by_step():
    """Several discrete actions at once: each component has a sample of its own."""
    workflow = make_dreamer(action=ActionSpec(kind="discrete", shape=(2,), classes=(3, 2)))
    _, record = recorded_dream(workflow)
    assert RecordedPolicy(workflow.actor, record).arrays() is None
