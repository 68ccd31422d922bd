"""PlaNet: its losses against literal forms, overshooting, planning and exploration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.packaged import adjusted
from tests.workflows.planet_parts import CONTINUOUS, DISCRETE, IMAGE, VECTOR, B, T, make_batch, make_planet
from torch.distributions import Normal, kl_divergence

from rl_lab.components.world_models.base import LatentState
from rl_lab.errors import ConfigError
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.planet import PlaNet

PHASE = PhaseView("train", "online")


def replayed(workflow: PlaNet, batch):
    return workflow._replayed(workflow._inputs(batch))


def prev_actions(batch) -> torch.Tensor:
    return torch.cat([torch.zeros(B, 1, 2), batch.action[:, :-1]], 1)


def step_by_step(workflow: PlaNet, batch, noise: torch.Tensor) -> list[tuple[LatentState, Normal, Normal]]:
    """State, posterior and prior of every step, from a memory that is empty at t = 0 and where an episode starts."""
    rssm, found = workflow.rssm, []
    state, action = rssm.initial(B), prev_actions(batch)
    for t in range(T):
        fresh = batch.is_first[:, t, None] if t else torch.ones(B, 1, dtype=torch.bool)
        h, z = torch.where(fresh, 0.0, state.deter), torch.where(fresh, 0.0, state.stoch)
        deter, _ = rssm.advance(LatentState(h, z), torch.where(fresh, 0.0, action[:, t]))
        embed = workflow.encoder({"vector": batch.observation["vector"][:, t]})
        posterior, prior = (rssm.distribution(p) for p in (rssm.posterior(deter, embed), rssm.prior(deter)))
        state = LatentState(deter, posterior.mean + posterior.std * noise[t])
        found.append((state, Normal(posterior.mean, posterior.std), Normal(prior.mean, prior.std)))
    return found


def test_losses_equal_the_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    """-log N(o | ·, 1) summed over an observation, -log N(r | ·, 1), and max(0, KL - free) for each step, all averaged
    over batch and time (constants aside)."""
    workflow = make_planet(free_nats=0.4)
    batch, noise = make_batch(workflow), torch.randn(T, B, 4)
    monkeypatch.setattr(workflow.rssm, "draw_noise", lambda lead, device: noise)
    losses, _, _ = workflow.losses(replayed(workflow, batch))
    observation, reward, divergence = [], [], []
    for t, (state, posterior, prior) in enumerate(step_by_step(workflow, batch, noise)):
        mean = workflow.decoder(state.deter, state.stoch)["vector"]
        observation.append(0.5 * (mean - batch.observation["vector"][:, t]).square().sum(-1))
        predicted = workflow.reward(state.features)[:, 0]
        reward.append(0.5 * (predicted - batch.reward[:, t]).square())
        divergence.append((kl_divergence(posterior, prior).sum(-1) - 0.4).clamp(min=0.0))
    expected = {"observation": observation, "reward": reward, "divergence": divergence}
    assert losses.keys() == expected.keys()
    for name, terms in expected.items():
        torch.testing.assert_close(losses[name], torch.stack(terms).mean())
    some = torch.stack(divergence)
    assert 0 < (some == 0.0).sum() < some.numel(), "the free nats must matter for some steps and not for all"


def test_the_reward_counts_ten_times() -> None:
    """The scales of the paper's loss; a misspelt one is refused."""
    assert make_planet().loss_scales == {
        "observation": 1.0, "reward": 10.0, "continue": 1.0, "divergence": 1.0, "overshooting": 0.0, "probe": 0.01,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="Did you mean 'reward'"):
        PlaNet(**adjusted("workflow/planet", loss_scales={"rewards": 1.0}))


def overshooting_by_hand(workflow: PlaNet, batch, states: LatentState, params: torch.Tensor, noise: list) -> float:
    """Row by row: from each state roll the prior, and compare while the episode lasts."""
    rssm, action = workflow.rssm, prev_actions(batch)
    totals: dict[int, list[float]] = {}
    for b in range(B):
        for t in range(T):
            state = LatentState(states.deter[b, t][None], states.stoch[b, t][None])
            for distance in range(1, workflow.overshooting_distance + 1):
                ahead = t + distance
                if ahead >= T or batch.is_first[b, ahead]:
                    break
                deter, _ = rssm.advance(state, action[b, ahead][None])
                prior = rssm.distribution(rssm.prior(deter))
                rows = T - distance
                state = LatentState(deter, prior.mean + prior.std * noise[distance - 1][b * rows + t])
                if distance > 1:
                    target = rssm.distribution(params[b, ahead])
                    plain = Normal(target.mean, target.std), Normal(prior.mean[0], prior.std[0])
                    nats = kl_divergence(*plain).sum() - workflow.free_nats
                    totals.setdefault(distance, []).append(max(0.0, float(nats)))
    return float(np.mean([np.mean(values) for values in totals.values()]))


def test_overshooting_equals_rolling_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances 2 … D, never across an episode's start; its gradient reaches the prior and not the posterior."""
    workflow = make_planet(overshooting_distance=4, loss_scales={"overshooting": 1.0}, free_nats=0.2)
    batch = make_batch(workflow)
    data = replayed(workflow, batch)
    filtered = workflow.filter(data)
    noise = [torch.randn(B * (T - distance), 4) for distance in range(1, 5)]
    drawn = iter(noise)
    monkeypatch.setattr(workflow.rssm, "draw_noise", lambda lead, device: next(drawn))
    loss = workflow.overshooting_loss(filtered, data)
    with torch.no_grad():
        expected = overshooting_by_hand(workflow, batch, filtered.states, filtered.posterior, noise)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    loss.backward()
    assert workflow.rssm.prior_head.outputs[0].weight.grad.abs().sum() > 0
    assert workflow.rssm.cell.gates.weight.grad.abs().sum() > 0
    assert all(p.grad is None for part in (workflow.rssm.posterior_head, workflow.encoder) for p in part.parameters())


@pytest.mark.parametrize("wrong", [{"overshooting_distance": 3}, {"loss_scales": {"overshooting": 1.0}}])
def test_overshooting_needs_a_distance_and_a_scale(wrong: dict) -> None:
    """One without the other would do nothing."""
    with pytest.raises(ConfigError, match="overshooting"):
        PlaNet(**adjusted("workflow/planet", **wrong))


@pytest.mark.parametrize("observation", [VECTOR, IMAGE], ids=["state", "pixels"])
def test_updates_learn_one_batch(observation: dict) -> None:
    """Overfitting one batch drives the losses down; the optimiser changes every part."""
    workflow = make_planet(observation, lr=1e-2)
    batch = make_batch(workflow)
    parameters = [p for part in workflow.context.components.values() for p in part.parameters()]
    before = [p.detach().clone() for p in parameters]
    first = dict(workflow.update_world_model(batch, phase=PHASE))
    for _ in range(60):
        last = dict(workflow.update_world_model(batch, phase=PHASE))
    assert last["loss/reward"] < 0.5 * first["loss/reward"]
    assert last["loss/observation"] < first["loss/observation"]
    assert all(not torch.equal(old, new) for old, new in zip(before, parameters, strict=True))


def test_five_bit_images_are_seen_and_explained_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draw of the noise for encoder and decoder."""
    workflow = make_planet(IMAGE)
    seen = {}
    encode, losses = workflow.encoder.forward, workflow.decoder.losses
    monkeypatch.setattr(workflow.encoder, "forward", lambda x: (seen.update(encoder=x["image"]), encode(x))[1])
    monkeypatch.setattr(
        workflow.decoder, "losses", lambda s, e, x: (seen.update(decoder=x["image"]), losses(s, e, x))[1]
    )
    workflow.losses(replayed(workflow, make_batch(workflow)))
    assert seen["encoder"].is_floating_point()
    assert torch.equal(seen["encoder"], seen["decoder"])


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_collection_explores_and_evaluation_does_not(action) -> None:
    """Actions of the same plan: noise of 0.3, clipped to the box; for classes, now and then another one."""
    workflow = make_planet(action=action)
    chosen = torch.zeros(4000, action.encoded_size)
    chosen[:, 0] = 1.0 if action is DISCRETE else 0.5
    explored = workflow._explored(chosen)
    if action is CONTINUOUS:
        assert explored.abs().max() <= 1.0
        assert explored[:, 1].std().item() == pytest.approx(0.3, rel=0.05)
        assert (explored[:, 0] == 1.0).any(), "what leaves the box is clipped"
    else:
        assert (explored.sum(-1) == 1.0).all()
        assert (explored[:, 0] == 1.0).float().mean().item() == pytest.approx(0.7 + 0.1, abs=0.03)
    observation = {"vector": np.zeros((2, 3), np.float32)}
    decided = []
    for mode in ("eval", "eval", "train"):
        torch.manual_seed(1)
        decided.append(workflow.act(observation, workflow.initial_state(2), mode=mode)[0])
    assert (decided[0] == decided[1]).all()
    assert (decided[0] != decided[2]).any() or action is DISCRETE


@pytest.mark.parametrize("warm_start", [False, True])
def test_the_agents_state_is_the_filtered_latent(warm_start: bool) -> None:
    """`act` follows the posterior with the action that was really taken, and keeps the plan where it is wanted."""
    workflow = make_planet(warm_start=warm_start)
    state, first = workflow.initial_state(2), {"vector": np.ones((2, 3), np.float32)}
    assert any(name.startswith("plan.") for name in state) == warm_start
    action, following = workflow.act(first, state, mode="train")
    assert following.keys() == state.keys()
    np.testing.assert_allclose(following["action"], action)
    embed = workflow.encoder({"vector": torch.ones(2, 3)})
    expected, _ = workflow.rssm.advance(workflow.rssm.initial(2), torch.zeros(2, 2))
    torch.testing.assert_close(following["deter"], expected)
    _, last = workflow.act(first, following, mode="eval")
    expected, _ = workflow.rssm.advance(LatentState(following["deter"], following["stoch"]), following["action"])
    torch.testing.assert_close(last["deter"], expected)
    assert embed.shape == (2, 16)


def test_imagined_rollout_ignores_what_it_must_predict() -> None:
    """Observations after the context change nothing but themselves."""
    workflow = make_planet()
    batch = make_batch(workflow)
    torch.manual_seed(0)
    left = workflow.imagine(batch, context=3)
    batch.observation["vector"][:, 3:] += 5.0
    torch.manual_seed(0)
    right = workflow.imagine(batch, context=3)
    assert (left.imagined["vector"] == right.imagined["vector"]).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_updates_and_actions_equal_plain_ones() -> None:
    """On a GPU, from the same random stream: the same losses and, but for rounding, the same plans."""
    histories = []
    for compile_ in (False, True):
        workflow = make_planet(device="cuda", compile_=compile_)
        batch = make_batch(workflow, device="cuda")
        torch.cuda.manual_seed(0)
        history = [workflow.update_world_model(batch, phase=PHASE).values_vector.clone() for _ in range(3)]
        torch.cuda.manual_seed(0)
        action, _ = workflow.act({"vector": np.ones((2, 3), np.float32)}, workflow.initial_state(2), mode="train")
        histories.append([*history, torch.as_tensor(action, device="cuda")])
    for plain, captured in zip(*histories, strict=True):
        torch.testing.assert_close(captured, plain, rtol=1e-3, atol=2e-3)
