"""The block RSSM: its size, its reset masks, and the fast scan against the plain recurrence."""

from __future__ import annotations

import copy
import tracemalloc

import pytest
import torch
from torch import Tensor

from rl_lab.components.representation_learners import host_loops
from rl_lab.components.representation_learners import rssm as rssm_module
from rl_lab.components.representation_learners.base import Dream, LatentState, stack_states
from rl_lab.components.representation_learners.host_loops import HostLoops, host_outside_gradients
from rl_lab.components.representation_learners.posterior_scan import ScanFunctions, ScanInputs, StepLoops
from rl_lab.components.representation_learners.rssm import BlockRSSM
from rl_lab.nn import host_threads
from rl_lab.nn.fusion import has_numba

needs_numba = pytest.mark.skipif(not has_numba(), reason="the kernels for the CPU need Numba")
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


def cast(sequence: dict[str, Tensor | LatentState], dtype: torch.dtype) -> dict[str, Tensor | LatentState]:
    def one(part: Tensor) -> Tensor:
        return part.detach().to(dtype) if part.is_floating_point() else part

    return {name: value.map(one) if isinstance(value, LatentState) else one(value) for name, value in sequence.items()}


@pytest.mark.parametrize(
    ("functions", "dtype", "tolerance"),
    [
        (ScanFunctions(StepLoops()), torch.float64, 1e-10),
        pytest.param(ScanFunctions(HostLoops(), host_outside_gradients), torch.float32, 3e-5, marks=needs_numba),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_scan_equals_the_plain_recurrence(rssm, sequence, functions, dtype, tolerance, threads, monkeypatch):
    """States, logits and every gradient are those of the plain steps in float64, to rounding, however many threads
    share the sequences."""
    monkeypatch.setattr(host_threads, "_threads", threads)
    monkeypatch.setattr(host_loops, "SEQUENCES", 1)
    generator = torch.Generator().manual_seed(2)
    probes = [torch.randn(B, T, n, generator=generator, dtype=torch.float64) for n in (DETER, GROUPS * CLASSES)]
    logit_probe = torch.randn(B, T, GROUPS, CLASSES, generator=generator, dtype=torch.float64)
    results = []
    for observe, kind in ((observe_plainly, torch.float64), (BlockRSSM.observe, dtype)):
        model, given = copy.deepcopy(rssm).to(kind), cast(sequence, kind)
        model._scans = [functions]
        embed = given["embed"].requires_grad_()
        leaves = [p for name, p in model.named_parameters() if not name.startswith("prior")] + [embed]
        states, logits = observe(model, **given)
        loss = (states.deter * probes[0]).sum() + (states.stoch * probes[1]).sum() + (logits * logit_probe).sum()
        results.append((*states[:2], logits, *torch.autograd.grad(loss, leaves)))
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast.double(), plain, rtol=tolerance, atol=tolerance)


@needs_numba
@pytest.mark.parametrize(("deter", "suits"), [(512, True), (2048, False)])
def test_large_products_are_left_to_torch(deter, suits):
    """The threads of the kernels' BLAS are not ours to set, so they take only what it computes with one."""
    model = BlockRSSM(embed_size=EMBED, action_size=ACTION, deter=deter, hidden=64, groups=8, classes=8)
    weights, *_ = model._scan_weights(torch.float32)
    state, nothing = model.initial(2), torch.zeros(())
    inputs = ScanInputs(state.deter, state.stoch, nothing, nothing, nothing, nothing)
    assert HostLoops().suit(inputs, weights) == suits


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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 3e-5)])
@pytest.mark.parametrize("threads", [1, 2])
def test_dreams_without_gradients_equal_those_with(rssm, sequence, dtype, tolerance, threads, monkeypatch):
    """In float32 they have a form of their own on the CPU, which threads share: states, features and actions to
    rounding."""
    monkeypatch.setattr(host_threads, "_threads", threads)
    monkeypatch.setattr(rssm_module, "FEW", 1)
    start = cast(sequence, dtype)["initial"]
    rssm.to(dtype)
    noise = torch.empty(5, B, GROUPS, CLASSES, dtype=dtype).exponential_()
    action_noise = 2.0 * torch.randn(5, B, ACTION, dtype=dtype)

    def policy(features: Tensor, step_noise: Tensor) -> Tensor:
        return step_noise + features[:, :ACTION]

    def dream() -> Dream:
        return rssm.imagine(start, policy, latent_noise=noise, action_noise=action_noise)

    plain = dream()
    with torch.no_grad():
        fast = dream()
    assert plain.features.requires_grad
    for name in ("deter", "stoch"):
        torch.testing.assert_close(
            getattr(fast.states, name), getattr(plain.states, name).detach(), rtol=tolerance, atol=tolerance
        )
    torch.testing.assert_close(fast.features, plain.features.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(fast.actions, plain.actions.detach(), rtol=tolerance, atol=tolerance)


@needs_numba
@pytest.mark.parametrize(("deter", "small"), [(512, True), (2048, False)])
def test_only_small_models_lay_weights_out_for_a_dream(deter, small):
    """A copy of the weights in every dream pays only where the kernel then works with them."""
    model = BlockRSSM(embed_size=EMBED, action_size=ACTION, deter=deter, hidden=64, groups=8, classes=8)
    start, noise, actions = model.initial(2), model.draw_noise((1, 2), "cpu"), torch.zeros(1, 2, ACTION)

    def dream() -> Dream:
        return model.imagine(start, lambda features, draw: draw, latent_noise=noise, action_noise=actions)

    expected = dream()
    with torch.no_grad():
        dream()  # what is compiled or loaded once, is so before memory is looked at
        tracemalloc.start()
        try:
            found = dream()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    shared_part = 3 * model.hidden * deter * start.deter.element_size()  # of the core layer: the largest of the copies
    assert (most >= shared_part) == small
    torch.testing.assert_close(found.states.deter, expected.states.deter.detach(), rtol=3e-5, atol=3e-5)
