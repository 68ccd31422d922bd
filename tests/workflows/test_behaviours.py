"""Learning in dreams: every version's losses and gradients against a slow reference, written out state by state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from tests.workflows.dreamer_family import make_v1, make_v2, make_v3_2023
from tests.workflows.dreamer_parts import CONTINUOUS, DISCRETE, make_dreamer
from torch import Tensor

from rl_lab.components.world_models.base import Dream, LatentState
from rl_lab.errors import ConfigError
from rl_lab.kernels import graphs
from rl_lab.kernels.dreams import DeferredDream
from rl_lab.workflows.dreamer import Dreamer, frozen
from rl_lab.workflows.world_model import Replayed

STARTS, LAMBDA = 5, 0.95
Reference = Callable[["Dreamed", Tensor], tuple[Tensor, Tensor]]


class Dreamed(NamedTuple):
    """One dream, as lists over its states 0 … H."""

    features: list[Tensor]
    actions: list[Tensor]
    reward: list[Tensor]
    discount: list[Tensor]
    value: list[Tensor]
    slow: list[Tensor] | None


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """The faster forms of a dream, without the compiler."""
    graphs.configure(compiling=False)
    yield
    graphs.configure(compiling=True)


def some_states(workflow: Dreamer) -> LatentState:
    """Any states [1, starts] that the latent space has."""
    rssm, noise = workflow.rssm, torch.randn(1, STARTS, workflow.rssm.deter)
    params = rssm.prior(noise)
    return LatentState(torch.tanh(noise), rssm.sample(params, None, noise.dtype)).detach()


def data_with(states: LatentState, terminal: Tensor) -> Replayed:
    """Records of which a behaviour looks at nothing but whether the episode had ended."""
    none, flags = torch.zeros(1, STARTS), torch.zeros(1, STARTS, dtype=torch.bool)
    return Replayed({}, none.unsqueeze(-1), none, flags, flags, terminal.unsqueeze(0), states)


def dream_by_hand(workflow: Dreamer, states: LatentState) -> Dreamed:
    """Step by step, from the noise that the behaviour draws; the gradient of everything is kept."""
    rssm, actor, horizon = workflow.rssm, workflow.actor, workflow.horizon
    latent_noise = rssm.draw_noise((horizon, STARTS), "cpu")
    action_noise = actor.draw_noise((horizon, STARTS), "cpu")
    state = states.flatten()
    features, actions = [state.features], []
    for t in range(horizon):
        action = actor.distribution(actor(features[-1].detach())).sample(action_noise[t])
        state = rssm.predict_step(state, action, latent_noise[t])
        features.append(state.features)
        actions.append(action)
    reward = [workflow.reward.mean(workflow.reward(f)) for f in features]
    if workflow.continuation is None:
        discount = [torch.full((STARTS,), workflow.discount) for _ in features]
    else:
        discount = [workflow.continuation.mean(workflow.continuation(f)) for f in features]
    value = [workflow.critic.mean(workflow.critic(f)) for f in features]
    slow = None if workflow.critic.slow is None else [workflow.critic.slow_mean(f) for f in features]
    return Dreamed(features, actions, reward, discount, value, slow)


def critic_loss(workflow: Dreamer, feature: Tensor, target: Tensor) -> Tensor:
    return workflow.critic.loss(workflow.critic(feature.detach()), target.detach())


def reference_v1(workflow: Dreamer, dream: Dreamed, terminal: Tensor) -> tuple[Tensor, Tensor]:
    """States 1 … H only; R_t = r_t + γ_t·((1 - λ)·v_{t+1} + λ·R_{t+1}); the actor raises w_t·R_t."""
    last = workflow.horizon
    returns, weight = {last: dream.value[last]}, {1: 1.0 - terminal.float()}
    for t in reversed(range(1, last)):
        following = (1 - LAMBDA) * dream.value[t + 1] + LAMBDA * returns[t + 1]
        returns[t] = dream.reward[t] + dream.discount[t] * following
    for t in range(2, last):
        weight[t] = (weight[t - 1] * dream.discount[t - 1]).detach()
    policy = [-weight[t] * returns[t] for t in range(1, last)]
    value = [weight[t] * critic_loss(workflow, dream.features[t], returns[t]) for t in range(1, last)]
    return torch.stack(policy).mean(), torch.stack(value).mean()


def reference_v2(workflow: Dreamer, dream: Dreamed, terminal: Tensor, gradient: str) -> tuple[Tensor, Tensor]:
    """States 0 … H; the slow critic in returns and baselines; action t is credited with R_{t+1}."""
    last = workflow.horizon
    assert dream.slow is not None
    discount = [workflow.discount * (1.0 - terminal.float()), *dream.discount[1:]]
    returns, weight = {last: dream.slow[last]}, {0: torch.ones(STARTS)}
    for t in reversed(range(last)):
        following = (1 - LAMBDA) * dream.slow[t + 1] + LAMBDA * returns[t + 1]
        returns[t] = dream.reward[t] + discount[t] * following
    for t in range(1, last):
        weight[t] = (weight[t - 1] * discount[t - 1]).detach()
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


def reference_v3(
    workflow: Dreamer, dream: Dreamed, terminal: Tensor, gradient: str, first_discount: str
) -> tuple[Tensor, Tensor]:
    """R_t = r_{t+1} + γ_{t+1}·(…); advantages over a percentile range; two targets for the critic."""
    last = workflow.horizon
    assert dream.slow is not None
    first = dream.discount[0] if first_discount == "predicted" else 1.0 - terminal.float()
    discount = [first, *dream.discount[1:]]
    returns, weight = {last: dream.value[last]}, {0: discount[0].detach()}
    for t in reversed(range(last)):
        following = (1 - LAMBDA) * dream.value[t + 1] + LAMBDA * returns[t + 1]
        returns[t] = dream.reward[t + 1] + discount[t + 1] * following
    for t in range(1, last):
        weight[t] = (weight[t - 1] * discount[t]).detach()
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


def stir(workflow: Dreamer) -> None:
    """Zero-initialised outputs would hide mistakes; the slow critic must differ from the fast one."""
    torch.manual_seed(3)
    with torch.no_grad():
        for head in (workflow.reward.head, workflow.critic.head):
            for output in head.outputs:
                output.weight.add_(0.3 * torch.randn_like(output.weight))
        if workflow.continuation is not None:
            workflow.continuation.head.outputs[0].bias.add_(1.0)


def compare(workflow: Dreamer, reference: Reference) -> None:
    """Both losses, and the gradients of all trained parameters of actor and critic; the model gets none."""
    stir(workflow)
    states = some_states(workflow)
    terminal = torch.zeros(STARTS, dtype=torch.bool)
    terminal[1] = True
    data = data_with(states, terminal)
    torch.manual_seed(5)
    expected_policy, expected_value = reference(dream_by_hand(workflow, states), terminal)
    torch.manual_seed(5)
    losses = workflow.behaviour_losses(states, data).losses
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
    leaves = states.map(lambda part: part.clone().requires_grad_())
    losses = workflow.behaviour_losses(leaves, data).losses
    (losses["policy"] + losses["value"]).backward()
    assert leaves.deter.grad is None
    for name, part in workflow.context.components.items():
        assert all(value.grad is None or not value.grad.any() for value in part.parameters()), name


def defer(workflow: Dreamer) -> None:
    """The dream as a compiled update with gradients through the model has it."""
    workflow._dreams = DeferredDream(workflow.rssm, workflow.actor, torch.float32, Dream.of)


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize("with_continue", [True, False])
@pytest.mark.parametrize("deferred", [False, True])
def test_dreamer_v1(uncompiled, action, with_continue, deferred):
    """Dynamics backpropagation, no baseline, no target network; with and without a predicted discount."""
    workflow = make_v1(action, with_continue=with_continue)
    if deferred:
        defer(workflow)
    compare(workflow, lambda dream, terminal: reference_v1(workflow, dream, terminal))


@pytest.mark.parametrize(
    ("action", "gradient", "deferred"),
    [(DISCRETE, "reinforce", False), (CONTINUOUS, "dynamics", False), (CONTINUOUS, "dynamics", True)]
    + [(action, "mixed", deferred) for action in (DISCRETE, CONTINUOUS) for deferred in (False, True)],
)
def test_dreamer_v2(uncompiled, action, gradient, deferred):
    """Each estimator; `auto` is REINFORCE for discrete and dynamics for continuous actions."""
    workflow = make_v2(action, actor_gradient="mixed" if gradient == "mixed" else "auto")
    assert workflow.gradient == gradient
    with torch.no_grad():
        for value in workflow.critic.slow.parameters():
            value.add_(0.2 * torch.randn_like(value))
    if deferred:
        defer(workflow)
    compare(workflow, lambda dream, terminal: reference_v2(workflow, dream, terminal, gradient))


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_dreamer_v3(uncompiled, action):
    """REINFORCE for all actions; the first state's weight is predicted."""
    workflow = make_dreamer(action=action)
    compare(workflow, lambda dream, terminal: reference_v3(workflow, dream, terminal, "reinforce", "predicted"))


@pytest.mark.parametrize(("action", "gradient"), [(CONTINUOUS, "dynamics"), (DISCRETE, "reinforce")])
def test_dreamer_v3_of_2023(action, gradient):
    """The advantage itself is differentiated for continuous actions; the first state's weight is its true flag."""
    workflow = make_v3_2023(action)
    compare(workflow, lambda dream, terminal: reference_v3(workflow, dream, terminal, gradient, "data"))


def test_frozen_parts_pass_gradients_on():
    """By their inputs, not by their parameters, which require gradients again afterwards."""
    layer, x = torch.nn.Linear(3, 2), torch.ones(1, 3, requires_grad=True)
    with frozen(layer):
        y = layer(x).sum()
    y.backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0, keepdim=True))
    assert layer.weight.requires_grad


def test_a_critic_without_the_copy_that_is_asked_for_is_refused():
    """Rather than found out in the middle of an update."""
    workflow = make_v1()
    workflow.target_critic = "slow"
    with pytest.raises(ConfigError, match="no slow copy"):
        workflow._bind_context(workflow.context)
