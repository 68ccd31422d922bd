"""DreamerV3: sizes, alignment in time, who gets which gradient, and the losses against slow references."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from tests.packaged import adjusted
from tests.workflows.dreamer_parts import (
    CONTINUOUS,
    DISCRETE,
    inputs_of,
    make_batch,
    make_dreamer,
    trainable_counts,
)

from rl_lab.components.world_models.base import DETER, STOCH, Dream, LatentState
from rl_lab.errors import ConfigError
from rl_lab.kernels.copies import WorkingCopies
from rl_lab.nn.layers import NormedLinear
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.dreamer import Behaviour
from rl_lab.workflows.dreamer_v3 import DreamerV3

PHASE = PhaseView("train", "online")
SIZE_1M = {"deter": 512, "hidden": 64, "groups": 32, "classes": 4, "units": 64, "depth": 4}
SIZE_12M = {"deter": 2048, "hidden": 256, "groups": 32, "classes": 16, "units": 256, "depth": 16}


def test_parameter_counts_of_size1m():
    """The seven parts of the original, for a 24-dim vector and 6 continuous actions."""
    workflow = make_dreamer(
        {"vector": ObservationSpec("vector", (24,), "float32")}, ActionSpec("continuous", (6,)), sizes=SIZE_1M
    )
    assert trainable_counts(workflow) == {
        "rssm": 364_416, "encoder": 10_112, "decoder": 51_096, "reward": 57_663, "continue": 41_153,
        "policy": 50_316, "critic": 66_111, "return_normalizer": 0,
    }  # fmt: skip
    assert sum(trainable_counts(workflow).values()) == 640_867


@pytest.mark.parametrize(("actions", "total"), [(6, 10_492_616), (18, 10_498_772)])
def test_parameter_counts_of_size12m(actions, total):
    """64×64×3 images and discrete actions."""
    image = {"image": ObservationSpec("image", (64, 64, 3), "uint8")}
    workflow = make_dreamer(image, ActionSpec("discrete", (1,), (actions,)), sizes=SIZE_12M)
    assert sum(trainable_counts(workflow).values()) == total


def test_starts_without_an_opinion():
    """Rewards and values start at exactly 0, their first losses at ln 255 per target, the policy near uniform."""
    workflow = make_dreamer()
    losses, _, metrics = workflow.losses(workflow._replayed(inputs_of(make_batch(workflow))))
    assert losses["reward"].item() == pytest.approx(math.log(255), rel=1e-5)
    assert metrics["dream/reward"].item() == 0.0
    assert metrics["dream/value"].item() == 0.0
    assert losses["replay_value"].item() == pytest.approx(2 * math.log(255), rel=1e-5)
    assert metrics["policy/entropy"].item() == pytest.approx(math.log(3), rel=1e-3)


def test_free_nats_are_per_step():
    """max(free, KL) of every record and then the mean, not the max of the mean."""
    workflow = make_dreamer()
    data = workflow._replayed(inputs_of(make_batch(workflow)))
    filtered = workflow.filter(data)
    posterior = 0.99 * filtered.posterior.softmax(-1) + 0.01 / 4
    prior = 0.99 * workflow.rssm.prior(filtered.states.deter).softmax(-1) + 0.01 / 4
    kl = (posterior * (posterior / prior).log()).sum((-1, -2))
    workflow.free_nats = kl.median().item()  # half of the records above, half below
    losses, metrics = workflow.world_model_losses(filtered, data)
    torch.testing.assert_close(losses["dynamics"], kl.clamp(min=workflow.free_nats).mean())
    torch.testing.assert_close(metrics["latent/kl"], kl.mean())
    assert losses["dynamics"] > max(workflow.free_nats, kl.mean().item())


def test_trains_on_the_records_after_the_context():
    """Record 0 gives its latent and its action; the model is fed the action of t-1 with the observation of t."""
    workflow = make_dreamer()
    batch = make_batch(workflow)
    data = workflow._replayed(inputs_of(batch))
    torch.testing.assert_close(data.prev_action.argmax(-1), batch.action[:, :-1, 0].long())
    torch.testing.assert_close(data.observation["vector"], batch.observation["vector"][:, 1:])
    torch.testing.assert_close(data.reward, batch.reward[:, 1:])
    torch.testing.assert_close(data.initial.deter, batch.extras[DETER][:, 0].float())
    grid = data.initial.stoch.view(3, 4, 4)
    torch.testing.assert_close(grid.argmax(-1), batch.extras[STOCH][:, 0].long())


@pytest.mark.parametrize("action", [DISCRETE, CONTINUOUS])
def test_actor_and_critic_leave_the_world_model_untouched(action):
    """Policy and value losses reach actor and critic only."""
    workflow = make_dreamer(action=action)
    losses, _, _ = workflow.losses(workflow._replayed(inputs_of(make_batch(workflow))))
    (losses["policy"] + losses["value"]).backward()
    for name, part in workflow.context.components.items():
        assert all(p.grad is None for p in part.parameters()), name
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in workflow.actor.parameters())
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in workflow.critic.head.parameters())
    assert all(p.grad is None for p in workflow.critic.slow.parameters())


def test_replay_value_loss_reaches_the_representation():
    """It trains the encoder, but not through the imagined targets: actor and reward head get nothing."""
    workflow = make_dreamer()
    with torch.no_grad():
        workflow.critic.head.outputs[0].weight.normal_()  # at its zero initialisation nothing flows back
    losses, _, _ = workflow.losses(workflow._replayed(inputs_of(make_batch(workflow))))
    losses["replay_value"].backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in workflow.encoder.parameters())
    assert all(p.grad is None for p in workflow.actor.parameters())
    assert all(p.grad is None for p in workflow.reward.parameters())


def test_replay_value_target_at_ends(monkeypatch):
    """At a termination nothing follows; at a truncation the dreamed return of the last state does; both end the sum."""
    workflow = make_dreamer()
    batch = make_batch(workflow)
    batch.is_last[0, 3] = batch.is_terminal[0, 3] = True  # terminated
    batch.is_last[1, 3] = True  # truncated
    data = workflow._replayed(inputs_of(batch))
    returns, slow = torch.randn(3, 6), torch.zeros(3, 6)
    targets = {}
    monkeypatch.setattr(workflow, "value_loss", lambda logits, target, slow_value: targets.setdefault("t", target) * 0)
    states = LatentState(torch.zeros(3, 6, 32), torch.zeros(3, 6, 16))
    workflow.replay_losses(states, data, Behaviour({}, returns.flatten(), slow.flatten(), {}))
    reward, discount = data.reward, workflow.discount
    for row in range(3):
        expected = returns[row, -1]
        for t in reversed(range(5)):  # data index t is record t + 1
            live = discount * (1.0 - data.is_terminal[row, t + 1].float())
            mix = 0.95 * (1.0 - data.is_last[row, t + 1].float())
            expected = reward[row, t + 1] + live * ((1 - mix) * returns[row, t + 1] + mix * expected)
            torch.testing.assert_close(targets["t"][row, t], expected)
    torch.testing.assert_close(targets["t"][0, 1], reward[0, 2])
    torch.testing.assert_close(targets["t"][1, 1], reward[1, 2] + discount * returns[1, 2])


def test_credit_alignment_in_dreams(monkeypatch):
    """A hand-solved chain: a reward planted on entering dreamed state 2 raises the return of state 1 by exactly 1, of
    state 0 by λ·continue, and the action scored with it is the one taken in state 1."""
    workflow = make_dreamer(entropy_scale=0.0)
    horizon, starts, size = workflow.horizon, 5, workflow.rssm.feature_size
    deter, stoch = torch.randn(horizon + 1, starts, size).split([workflow.rssm.deter, workflow.rssm.stoch_size], -1)
    actions = torch.eye(3)[torch.randint(0, 3, (horizon, starts))]
    dream = Dream.of(deter, stoch, actions)
    features = dream.features
    planted = torch.zeros(horizon + 1, starts)
    planted[2] = 1.0
    cont = 0.9
    monkeypatch.setattr(workflow, "dream", lambda start: dream)
    monkeypatch.setattr(workflow.reward, "mean", lambda logits: planted)
    monkeypatch.setattr(workflow.continuation, "mean", lambda logits: torch.full((horizon + 1, starts), cont))
    states = LatentState(torch.zeros(1, starts, 32), torch.zeros(1, starts, 16))
    data = workflow._replayed(inputs_of(make_batch(workflow, batch=1, time=starts + 1)))
    losses, first_return, _, _ = workflow.behaviour_losses(states, data)
    torch.testing.assert_close(first_return, torch.full((starts,), 0.95 * cont))
    # By hand: advantages are the returns (values start at 0) over a scale of at least 1; weights contain state 0.
    log_prob = workflow.actor.distribution(workflow.actor(features[:-1])).log_prob(actions)
    returns = torch.zeros(horizon, starts)
    returns[1], returns[0] = 1.0, 0.95 * cont
    weight = torch.tensor([cont ** (t + 1) for t in range(horizon)])[:, None]
    torch.testing.assert_close(losses["policy"], -(weight * log_prob * returns).mean())


def test_update_learns_one_batch():
    """Overfitting one batch drives reconstruction and reward loss down, and the slow critic follows the fast one."""
    workflow = make_dreamer(lr=3e-3)
    batch = make_batch(workflow)
    torch.manual_seed(0)
    first = dict(workflow.update(batch, phase=PHASE))
    slow_before = [p.clone() for p in workflow.critic.slow.parameters()]
    for _ in range(100):
        last = dict(workflow.update(batch, phase=PHASE))
    assert last["loss/observation"] < 0.3 * first["loss/observation"]
    assert last["loss/reward"] < 0.5 * first["loss/reward"]
    moved = zip(slow_before, workflow.critic.slow.parameters(), strict=True)
    assert any(not torch.equal(before, now) for before, now in moved)


def test_acting_equals_observing():
    """`act` step by step gives the states that `observe` gives for the whole sequence."""
    workflow = make_dreamer(action=CONTINUOUS)
    batch = make_batch(workflow, batch=2)
    noise = torch.ones(7, 2, 4, 4)  # constant noise makes sampling the mode
    state = workflow.initial_state(2)
    deters = []
    for t in range(7):
        embed = workflow.encoder({"vector": batch.observation["vector"][:, t]})
        latent = LatentState(state["deter"], state["stoch"])
        latent, _ = workflow.rssm.observe_step(latent, state["action"], embed, noise[t])
        state = {"deter": latent.deter, "stoch": latent.stoch, "action": batch.action[:, t]}
        deters.append(latent.deter)
    prev_action = torch.cat([torch.zeros(2, 1, 2), batch.action[:, :-1]], 1)
    embed = workflow.encoder(batch.observation)
    states, _ = workflow.rssm.observe(embed, prev_action, batch.is_first, workflow.rssm.initial(2), noise)
    torch.testing.assert_close(states.deter, torch.stack(deters, 1), rtol=1e-4, atol=1e-5)


def test_imagined_rollout_ignores_what_it_must_predict():
    """Observations after the context change nothing but themselves."""
    workflow = make_dreamer()
    batch = make_batch(workflow)
    torch.manual_seed(0)
    left = workflow.imagine(batch, context=3)
    batch.observation["vector"] = batch.observation["vector"].clone()
    batch.observation["vector"][:, 3:] += 5.0
    torch.manual_seed(0)
    right = workflow.imagine(batch, context=3)
    assert (left.imagined["vector"] == right.imagined["vector"]).all()
    assert (left.real["vector"] != right.real["vector"]).any()


def test_misspelt_loss_scale_is_refused():
    """A scale that scales nothing is a mistake of the configuration."""
    with pytest.raises(ConfigError, match="Did you mean 'dynamics'"):
        DreamerV3(**adjusted("workflow/dreamer_v3", loss_scales={"dynamic": 0.5}))


def test_dreams_copy_the_model_before_it_is_compiled(monkeypatch):
    """A compiled model holds functions and locks, which need not be copyable."""

    def compile_steps(model) -> None:
        model.compiled["observe_step"] = threading.Lock()

    monkeypatch.setattr("rl_lab.workflows.world_model.compile_steps", compile_steps)
    workflow = make_dreamer(action=CONTINUOUS, actor_gradient="dynamics", compile_=True, autocast_dtype=torch.bfloat16)
    twin = workflow._dreams._model
    assert twin is not workflow.rssm
    assert twin.gates.weight.dtype == torch.bfloat16
    assert twin.core_norm.weight.dtype == torch.float32
    assert workflow.rssm.gates.weight.dtype == torch.float32


def test_working_copies_follow_the_weights():
    """The copies are made once; `refresh` brings the present weights, rounded."""
    layer, copies = NormedLinear(3, 4), WorkingCopies(torch.bfloat16)
    twin = copies.add(layer)
    with torch.no_grad():
        layer.linear.weight.fill_(1.2345678)
        layer.norm.weight.fill_(1.2345678)
    copies.refresh()
    assert torch.equal(twin.linear.weight, layer.linear.weight.bfloat16())
    assert torch.equal(twin.norm.weight, layer.norm.weight)
    assert not twin.linear.weight.requires_grad


@pytest.mark.parametrize("sample", [False, True])
def test_evaluation_takes_the_likeliest_action_or_samples(sample: bool) -> None:
    """The published scores are those of an agent that samples."""
    workflow = make_dreamer(action=CONTINUOUS, sample_in_eval=sample)
    latent = LatentState(torch.randn(4, workflow.rssm.deter), torch.randn(4, workflow.rssm.stoch_size))
    first, second = (workflow._choose_action(latent, mode="eval") for _ in range(2))
    assert torch.equal(first, second) != sample
