"""The block RSSM: its size, its reset masks, its loops over time against single steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_lab.components.world_models.base import LatentState, stack_states
from rl_lab.components.world_models.rssm import BlockRSSM

B, T, EMBED, ACTION, DETER, GROUPS, CLASSES = 3, 7, 5, 3, 32, 4, 4


@pytest.fixture
def rssm() -> BlockRSSM:
    """A small model in float64 whose biases and norms are not at their initial values."""
    torch.manual_seed(0)
    sizes = {"embed_size": EMBED, "action_size": ACTION, "deter": DETER, "hidden": 16}
    model = BlockRSSM(**sizes, groups=GROUPS, classes=CLASSES).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture
def sequence() -> dict[str, Tensor | LatentState]:
    generator = torch.Generator().manual_seed(1)
    choice = torch.randint(0, CLASSES, (B, GROUPS), generator=generator)
    return {
        "embed": torch.randn(B, T, EMBED, generator=generator, dtype=torch.float64),
        "prev_action": 2.0 * torch.randn(B, T, ACTION, generator=generator, dtype=torch.float64),
        "is_first": torch.rand(B, T, generator=generator) < 0.25,
        "initial": LatentState(
            0.3 * torch.randn(B, DETER, generator=generator, dtype=torch.float64),
            torch.eye(CLASSES, dtype=torch.float64)[choice].flatten(1),
        ),
        "noise": torch.empty(T, B, GROUPS, CLASSES, dtype=torch.float64).exponential_(generator=generator),
    }


def observe_plainly(model, embed, prev_action, is_first, initial, noise):
    """The recurrence as the paper writes it, one step after the other."""
    state, states, logits = initial, [], []
    for t in range(embed.shape[1]):
        keep = (~is_first[:, t, None]).to(embed.dtype)
        state = LatentState(state.deter * keep, state.stoch * keep)
        state, step_logits = model.observe_step(state, prev_action[:, t] * keep, embed[:, t], noise[t])
        states.append(state)
        logits.append(step_logits)
    return stack_states(states, 1), torch.stack(logits, 1)


def test_parameter_count_of_size1m():
    """The count that the original has for 24-dim vectors and 6 continuous actions."""
    model = BlockRSSM(embed_size=64, action_size=6, deter=512, hidden=64, groups=32, classes=4)
    assert sum(parameter.numel() for parameter in model.parameters()) == 364_416


def test_observing_a_sequence_is_observing_step_by_step(rssm, sequence):
    """States, logits and every gradient."""
    generator = torch.Generator().manual_seed(2)
    probes = [torch.randn(B, T, n, generator=generator, dtype=torch.float64) for n in (DETER, GROUPS * CLASSES)]
    results = []
    leaves = [p for name, p in rssm.named_parameters() if not name.startswith("prior")]
    leaves.append(sequence["embed"].requires_grad_())
    for observe in (observe_plainly, BlockRSSM.observe):
        states, logits = observe(rssm, **sequence)
        loss = (states.deter * probes[0]).sum() + ((states.stoch + logits.flatten(2)) * probes[1]).sum()
        results.append((*states[:2], logits, *torch.autograd.grad(loss, leaves)))
    for plain, found in zip(*results, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)


def test_first_flag_cuts_history(rssm, sequence):
    """What came before an episode start, the action that led to it included, must not change what comes after it."""
    sequence["is_first"] = torch.zeros(B, T, dtype=torch.bool)
    sequence["is_first"][:, 3] = True
    other = dict(sequence, prev_action=sequence["prev_action"].clone(), embed=sequence["embed"].clone())
    other["prev_action"][:, :4] += 10.0
    other["embed"][:, :3] += 1.0
    left, right = rssm.observe(**sequence)[0], rssm.observe(**other)[0]
    torch.testing.assert_close(left.deter[:, 3:], right.deter[:, 3:])
    assert not torch.allclose(left.deter[:, 2], right.deter[:, 2])


def test_first_step_uses_the_stored_latent_unless_an_episode_starts(rssm, sequence):
    """Replay context: the carry matters at step 0, except where step 0 is a reset."""
    sequence["is_first"] = torch.zeros(B, T, dtype=torch.bool)
    sequence["is_first"][0, 0] = True
    other = dict(sequence, initial=LatentState(sequence["initial"].deter + 1.0, sequence["initial"].stoch))
    left, right = rssm.observe(**sequence)[0].deter[:, 0], rssm.observe(**other)[0].deter[:, 0]
    torch.testing.assert_close(left[0], right[0])
    assert not torch.allclose(left[1:], right[1:])


def test_large_actions_are_scaled_down(rssm, sequence):
    """The model sees a / max(1, |a|): beyond ±1 only the sign is left."""
    state = sequence["initial"]
    action = torch.full((B, ACTION), 3.0, dtype=torch.float64)
    torch.testing.assert_close(rssm.advance(state, action)[0], rssm.advance(state, torch.ones_like(action))[0])


def test_imagination_follows_the_prior(rssm, sequence):
    """One imagined step is f, then a sample of the prior; the policy sees the features of the state before it."""
    start, seen = sequence["initial"], []
    noise = torch.empty(2, B, GROUPS, CLASSES, dtype=torch.float64).exponential_()

    def policy(features: Tensor, action_noise: Tensor) -> Tensor:
        seen.append(features)
        return action_noise

    action_noise = torch.rand(2, B, ACTION, dtype=torch.float64)
    dream = rssm.imagine(start, policy, latent_noise=noise, action_noise=action_noise)
    deter = rssm.advance(start, action_noise[0])[0]
    torch.testing.assert_close(seen[0], start.features)
    torch.testing.assert_close(dream.states.deter[1], deter)
    expected = rssm.distribution(rssm.prior(deter)).sample(noise[0]).flatten(-2)
    torch.testing.assert_close(dream.states.stoch[1], expected)
    torch.testing.assert_close(dream.actions, action_noise)
