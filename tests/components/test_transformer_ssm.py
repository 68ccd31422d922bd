"""The transformer state-space model: whole sequences against single steps, what a step may see, where dreams start."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_lab.components.world_models.base import LatentState, StateSpaceModel
from rl_lab.components.world_models.transformer_ssm import TransformerSSM
from rl_lab.errors import ConfigError

B, T, EMBED, ACTION, DETER, GROUPS, CLASSES, WINDOW = 3, 9, 5, 3, 16, 4, 4, 4


def make_model(**changes) -> TransformerSSM:
    """A small model in float64 whose biases and norms are not at their initial values."""
    torch.manual_seed(0)
    sizes = {"embed_size": EMBED, "action_size": ACTION, "deter": DETER, "hidden": 16, "heads": 2, "window": WINDOW}
    model = TransformerSSM(**sizes | changes, groups=GROUPS, classes=CLASSES).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture
def model() -> TransformerSSM:
    return make_model()


def random_sequence(model: TransformerSSM, *, seed: int = 1, steps: int = T) -> dict[str, Tensor | LatentState]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(B, steps, EMBED, generator=generator, dtype=torch.float64),
        "prev_action": 2.0 * torch.randn(B, steps, ACTION, generator=generator, dtype=torch.float64),
        "is_first": torch.rand(B, steps, generator=generator) < 0.25,
        "initial": model.initial(B),
        "noise": torch.empty(steps, B, GROUPS, CLASSES, dtype=torch.float64).exponential_(generator=generator),
    }


@pytest.fixture
def sequence(model) -> dict[str, Tensor | LatentState]:
    return random_sequence(model)


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("window", [2, 4, 32])
@pytest.mark.parametrize("remembered", [False, True])
def test_whole_sequences_equal_single_steps(window, remembered):
    """States, logits and every gradient: the pass over all steps is the loop over `observe_step`, from an empty memory
    and from one that earlier steps filled, with the window shorter and longer than the sequence."""
    model = make_model(window=window)
    sequence = random_sequence(model)
    if remembered:
        earlier = random_sequence(model, seed=5, steps=3)
        with torch.no_grad():
            sequence["initial"] = model.observe(**earlier)[0].map(lambda part: part[:, -1])
    generator = torch.Generator().manual_seed(2)
    probes = [torch.randn(B, T, n, generator=generator, dtype=torch.float64) for n in (DETER, GROUPS * CLASSES)]
    leaves = [p for name, p in model.named_parameters() if not name.startswith("prior")]
    results = []
    for observe in (StateSpaceModel.observe, TransformerSSM.observe):
        states, logits = observe(model, **sequence)
        loss = (states.deter * probes[0]).sum() + (states.stoch * probes[1]).sum() + logits.square().sum()
        results.append((states.deter, states.stoch, logits, *torch.autograd.grad(loss, leaves)))
    for plain, fast in zip(*results, strict=True):
        close(fast, plain)


class LooksAtH(TransformerSSM):
    """A posterior q(z | h, e), as the recurrent models have."""

    def posterior(self, deter, embed):
        return super().posterior(deter, embed) + 10.0 * deter[..., :1, None]


def test_a_posterior_that_looks_at_h_is_given_h(sequence):
    """Then no pass over all steps stands in for the loop."""
    model = make_model()
    model.__class__ = LooksAtH
    states, logits = model.observe(**sequence)
    plain_states, plain_logits = StateSpaceModel.observe(model, **sequence)
    close(states.deter, plain_states.deter)
    close(logits, plain_logits)


@pytest.mark.parametrize("method", ["advance", "transform", "posterior", "observe_step", "predict_step"])
def test_a_step_that_was_replaced_on_an_instance_is_what_runs(model, sequence, method):
    """In filtering, or in the dreams that start there."""
    calls, plain = [], getattr(model, method)
    setattr(model, method, lambda *arguments: calls.append(method) or plain(*arguments))
    start = model.starts(model.observe(**sequence)[0])
    noise = torch.ones(2, len(start.deter), GROUPS, CLASSES, dtype=torch.float64)
    model.imagine(start, lambda features, noise: noise, latent_noise=noise, action_noise=noise[..., 0, :ACTION])
    assert len(calls) >= (2 if method == "predict_step" else T)


def test_first_flag_cuts_history(model, sequence):
    """What came before an episode start, the action that led to it included, must not change what comes after it."""
    sequence["is_first"] = torch.zeros(B, T, dtype=torch.bool)
    sequence["is_first"][:, 3] = True
    other = dict(sequence, prev_action=sequence["prev_action"].clone(), embed=sequence["embed"].clone())
    other["prev_action"][:, :4] -= sequence["prev_action"][:, :4].sign()
    other["embed"][:, :3] += 1.0
    left, right = model.observe(**sequence)[0], model.observe(**other)[0]
    close(left.deter[:, 3:], right.deter[:, 3:])
    assert not torch.allclose(left.deter[:, 2], right.deter[:, 2])


def test_no_step_sees_the_future_or_beyond_its_layers_windows(model, sequence):
    """A change at step 2 shows from step 2 on; with two layers of window 4 it is out of sight after 2 + 2 · 3."""
    sequence["is_first"] = torch.zeros(B, T, dtype=torch.bool)
    other = dict(sequence, prev_action=sequence["prev_action"].clone())
    other["prev_action"][:, 0] = -sequence["prev_action"][:, 0].sign() * 0.5
    left, right = model.observe(**sequence)[0].deter, model.observe(**other)[0].deter
    changed = (left - right).abs().amax((0, 2)) > 1e-9
    assert changed.tolist() == [t <= 2 * (WINDOW - 1) for t in range(T)]
    other["prev_action"] = sequence["prev_action"].clone()
    other["prev_action"][:, 5] = -sequence["prev_action"][:, 5].sign() * 0.5
    changed = (left - model.observe(**other)[0].deter).abs().amax((0, 2)) > 1e-9
    assert changed.tolist() == [t >= 5 for t in range(T)]


def test_zeros_are_an_empty_memory(model, sequence):
    """The agent's memory is cleared by multiplying it with 0: that must equal a model that has seen nothing."""
    filled = model.observe(**sequence)[0].map(lambda part: part[:, -1])
    action = torch.zeros(B, ACTION, dtype=torch.float64)
    cleared, fresh, filled = (
        model.advance(state, action) for state in (filled.map(lambda part: part * 0.0), model.initial(B), filled)
    )
    close(cleared[0], fresh[0])
    close(cleared[1], fresh[1])
    assert not torch.allclose(filled[0], fresh[0])


def test_dreams_start_with_the_past_of_their_state(model, sequence):
    """Every (b, t) of a filtered sequence dreams on as the step-by-step filter at that place would, in its own
    episode; its memory carries no gradient."""
    states, _ = model.observe(**sequence)
    start = model.starts(states)
    assert start.memory.shape == (B, T, WINDOW - 1, 2 * 2 * DETER + 1)
    assert not start.memory.requires_grad
    actions = torch.randn(3, B * T, ACTION, dtype=torch.float64)
    noise = torch.empty(3, B * T, GROUPS, CLASSES, dtype=torch.float64).exponential_()
    dream = model.imagine(start, lambda _, action: action, latent_noise=noise, action_noise=actions)
    dreamed = dream.states.deter[1].unflatten(0, (B, T))
    state = model.initial(B)
    for t in range(T):
        keep = (~sequence["is_first"][:, t, None]).double()
        state = state.map(lambda part, keep=keep: part * keep.view(-1, *[1] * (part.ndim - 1)))
        action = sequence["prev_action"][:, t] * keep
        state, _ = model.observe_step(state, action, sequence["embed"][:, t], sequence["noise"][t])
        following, _ = model.advance(state, actions[0].unflatten(0, (B, T))[:, t])
        close(dreamed[:, t], following)


@pytest.mark.parametrize("window", [2, 4, 32])
def test_dreams_that_share_a_past_equal_dreams_with_a_memory_each(window):
    """States, actions and the gradient through the policy, for dreams that outlast the window and dreams that do not,
    with episode starts inside the sequences and a memory from before them."""
    model = make_model(window=window)
    sequence = random_sequence(model)
    with torch.no_grad():
        earlier = random_sequence(model, seed=5, steps=3)
        sequence["initial"] = model.observe(**earlier)[0].map(lambda part: part[:, -1])
    start = model.starts(model.observe(**sequence)[0])
    noise = torch.empty(6, B * T, GROUPS, CLASSES, dtype=torch.float64).exponential_()
    action_noise = torch.rand(6, B * T, ACTION, dtype=torch.float64)
    weight = torch.randn(model.feature_size, ACTION, dtype=torch.float64, requires_grad=True)
    policy = lambda features, noise: torch.tanh(features @ weight) + noise  # noqa: E731
    results = []
    for begin in (start, start._replace(memory=start.memory.flatten(0, 1))):
        dream = model.imagine(begin, policy, latent_noise=noise, action_noise=action_noise)
        loss = dream.states.deter.square().sum() + (dream.states.stoch * dream.states.stoch.detach().cumsum(0)).sum()
        gradients = torch.autograd.grad(loss, [weight, model.distance_bias, *model.blocks.parameters()])
        results.append((dream.states.deter, dream.states.stoch, dream.actions, *gradients))
    for shared, own in zip(*results, strict=True):
        close(shared, own)


def test_imagination_remembers(model, sequence):
    """A dream of several steps is the filter whose posterior is replaced by the prior: its memory grows with it."""
    start = model.starts(model.observe(**sequence)[0])
    noise = torch.empty(5, B * T, GROUPS, CLASSES, dtype=torch.float64).exponential_()
    action_noise = torch.rand(5, B * T, ACTION, dtype=torch.float64)
    dream = model.imagine(start, lambda _, noise: noise, latent_noise=noise, action_noise=action_noise)
    state = start
    for t in range(5):
        deter, memory = model.advance(state, action_noise[t])
        stoch = model.distribution(model.prior(deter)).sample(noise[t]).flatten(-2)
        state = LatentState(deter, stoch, memory)
        close(dream.states.deter[t + 1], deter)
        close(dream.states.stoch[t + 1], stoch)
    assert dream.states.memory is None
    forgetful = start._replace(memory=torch.zeros_like(start.memory))
    other = model.imagine(forgetful, lambda _, noise: noise, latent_noise=noise, action_noise=action_noise)
    assert not torch.allclose(other.states.deter[1], dream.states.deter[1])


def test_the_posterior_needs_the_observation_only(model, sequence):
    """q(z_t | e_t): neither the past nor the action moves it; that is what lets all steps be encoded at once."""
    _, logits = model.observe(**sequence)
    other = dict(sequence, prev_action=-sequence["prev_action"], is_first=~sequence["is_first"])
    close(model.observe(**other)[1], logits)


def test_later_losses_reach_earlier_observations(model, sequence):
    """The gradient of h_t flows through attention and straight-through samples into the embeddings before t, and not
    across an episode's start."""
    sequence["is_first"] = torch.zeros(B, T, dtype=torch.bool)
    sequence["is_first"][:, 4] = True
    sequence["embed"].requires_grad_()
    states, _ = model.observe(**sequence)
    states.deter[:, 6].sum().backward()
    reached = sequence["embed"].grad.abs().amax((0, 2)) > 0
    assert reached.tolist() == [t in (4, 5) for t in range(T)]


def test_episode_start_inside_a_full_memory(model, sequence):
    """After a reset within a sequence the memory's old slots stay out of sight, however full it was."""
    sequence["is_first"] = torch.zeros(B, T, dtype=torch.bool)
    sequence["is_first"][:, 7] = True
    states, _ = model.observe(**sequence)
    state = states.map(lambda part: part[:, 7])
    blank = state._replace(memory=state.memory.clone())
    blank.memory[:, :-1] = 0.0
    action = torch.ones(B, ACTION, dtype=torch.float64)
    close(model.advance(state, action)[0], model.advance(blank, action)[0])


@pytest.mark.parametrize("window", [1, 257])
def test_windows_that_cannot_be_are_refused(window):
    """A window of one step has no past; beyond 256 half precision cannot count the steps."""
    with pytest.raises(ConfigError, match=f"window={window}"):
        make_model(window=window)


def test_heads_must_share_the_width():
    with pytest.raises(ConfigError, match="3 heads"):
        make_model(heads=3)
