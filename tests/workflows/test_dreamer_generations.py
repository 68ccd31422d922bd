"""Dreamer v1, v2 and v3 of 2023: sizes, world-model losses against slow references, exploration, whole updates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.workflows.dreamer_family import make_v1, make_v2, make_v3_2023
from tests.workflows.dreamer_parts import CONTINUOUS, DISCRETE, inputs_of, make_batch, trainable_counts
from torch.distributions import Categorical, Independent, Normal, kl_divergence

from rl_lab.errors import ConfigError
from rl_lab.experiment.config import compose, resolve
from rl_lab.experiment.dims import fill_dims
from rl_lab.experiment.model import build_model
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import PhaseView

PHASE = PhaseView("train", "online")
PIXELS = {"image": ObservationSpec("image", (64, 64, 3), "uint8")}
MAKERS = {"v1": make_v1, "v2": make_v2, "v3_2023": make_v3_2023}


def batch_for(workflow, **settings) -> SequenceBatch:
    """Seven records, without stored latents; an episode that ends in the middle of one sequence."""
    batch = make_batch(workflow, latents=False, **settings)
    batch.is_last[0, 3] = batch.is_terminal[0, 3] = batch.is_first[0, 4] = True
    return batch


def gaussian(params):
    mean, raw = params.chunk(2, -1)
    return Independent(Normal(mean, F.softplus(raw) + 0.1), 1)


def grid(logits, unimix=0.0):
    probs = (1 - unimix) * logits.softmax(-1) + unimix / logits.shape[-1]
    return Independent(Categorical(probs=probs), 1)


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def trunk(inputs: int, units: int, layers: int) -> int:
    return linear(inputs, units) + (layers - 1) * linear(units, units)


def convolutions(widths: list[int], kernels: tuple[int, ...]) -> int:
    return sum(
        kernel * kernel * inputs * outputs + outputs
        for inputs, outputs, kernel in zip(widths[:-1], widths[1:], kernels, strict=True)
    )


def test_parameter_counts_of_v1():
    """h 200, z 30, 64×64×3 images, 6 actions: every layer counted by hand."""
    sizes = {"deter": 200, "hidden": 200, "stoch": 30, "units": 400, "depth": 32}
    workflow = make_v1(ActionSpec("continuous", (6,)), observation=PIXELS, sizes=sizes)
    gru = 3 * 200 * (200 + 200) + 2 * 3 * 200
    assert trainable_counts(workflow) == {
        "encoder": convolutions([3, 32, 64, 128, 256], (4, 4, 4, 4)),
        "rssm": linear(36, 200) + gru + 2 * linear(200, 60) + linear(200, 200) + linear(200 + 1024, 200),
        "decoder": linear(230, 1024) + convolutions([1024, 128, 64, 32, 3], (5, 5, 6, 6)),
        "reward": trunk(230, 400, 2) + linear(400, 1), "continue": trunk(230, 400, 3) + linear(400, 1),
        "policy": trunk(230, 400, 4) + linear(400, 12), "critic": trunk(230, 400, 3) + linear(400, 1),
    }  # fmt: skip


def test_parameter_counts_of_v2():
    """DMC sizes: h 200, 32×32 latents, 64×64×3 images, 6 actions; the slow critic does not count."""
    sizes = {"deter": 200, "hidden": 200, "groups": 32, "classes": 32, "units": 400, "depth": 48}
    workflow = make_v2(ActionSpec("continuous", (6,)), observation=PIXELS, sizes=sizes)
    features, gru = 1224, linear(400, 600) + 2 * 600
    model = linear(1024 + 6, 200) + gru + linear(200, 200) + linear(200 + 1536, 200) + 2 * linear(200, 1024)
    assert trainable_counts(workflow) == {
        "encoder": convolutions([3, 48, 96, 192, 384], (4, 4, 4, 4)), "rssm": model,
        "decoder": linear(features, 1536) + convolutions([1536, 192, 96, 48, 3], (5, 5, 6, 6)),
        "reward": trunk(features, 400, 4) + linear(400, 1), "continue": trunk(features, 400, 4) + linear(400, 1),
        "policy": trunk(features, 400, 4) + 2 * linear(400, 6), "critic": trunk(features, 400, 4) + linear(400, 1),
    }  # fmt: skip


def test_parameter_counts_of_v3_2023():
    """Size S: h 512, 32×32 latents, a 24-dim vector, 6 actions. A hidden layer has a weight, and a norm's scale and
    offset instead of a bias; the learned first h counts; the slow critic does not."""

    def hidden(inputs: int) -> int:
        return inputs * 512 + 2 * 512

    config = compose(["+experiment=dreamer_v3_2023", "size=s"])
    fill_dims(config, {"vector": ObservationSpec("vector", (24,), "float32")}, ActionSpec("continuous", (6,)))
    model = build_model(resolve(config), torch.device("cpu"))
    counts = {
        name: sum(value.numel() for value in part.parameters() if value.requires_grad)
        for name, part in model.modules.items()
    }
    features = 512 + 1024
    gru = 1024 * 1536 + 2 * 1536
    assert counts == {
        "encoder": hidden(24) + hidden(512),
        "rssm": hidden(1024 + 6) + gru + hidden(512) + hidden(512 + 512) + 2 * linear(512, 1024) + 512,
        "decoder": hidden(features) + hidden(512) + linear(512, 24),
        "reward": hidden(features) + hidden(512) + linear(512, 255),
        "continue": hidden(features) + hidden(512) + linear(512, 1),
        "policy": hidden(features) + hidden(512) + 2 * linear(512, 6),
        "critic": hidden(features) + hidden(512) + linear(512, 255),
        "return_normalizer": 0,
    }


@pytest.mark.parametrize("free", [0.1, 50.0])
def test_v1_world_model_losses(free):
    """max(mean KL, free): on the batch's mean. Unit normals with the 1/2, and a soft label for the discount."""
    workflow = make_v1(free_nats=free)
    data = workflow._replayed(inputs_of(batch_for(workflow)))
    filtered = workflow.filter(data)
    states, prior = filtered.states, workflow.rssm.prior(filtered.states.deter)
    losses, metrics = workflow.world_model_losses(filtered, data)
    kl = kl_divergence(gaussian(filtered.posterior), gaussian(prior))
    torch.testing.assert_close(metrics["latent/kl"], kl.mean())
    torch.testing.assert_close(losses["divergence"], torch.clamp(kl.mean(), min=free))
    _check_normal_predictions(workflow, data, states, losses)
    assert workflow.loss_scales["continue"] == 10.0


@pytest.mark.parametrize("free", [0.0, 50.0])
def test_v2_world_model_losses(free):
    """0.8·KL(sg post || prior) + 0.2·KL(post || sg prior), each with the free nats of the batch's mean."""
    workflow = make_v2(DISCRETE, free_nats=free, kl_scale=0.1)
    data = workflow._replayed(inputs_of(batch_for(workflow)))
    filtered = workflow.filter(data)
    states, prior = filtered.states, workflow.rssm.prior(filtered.states.deter)
    losses, _ = workflow.world_model_losses(filtered, data)
    kl = kl_divergence(grid(filtered.posterior), grid(prior)).mean().clamp(min=free)
    torch.testing.assert_close(losses["dynamics"], kl)
    torch.testing.assert_close(losses["representation"], kl)
    assert workflow.loss_scales["dynamics"] == pytest.approx(0.08)
    assert workflow.loss_scales["representation"] == pytest.approx(0.02)
    _check_normal_predictions(workflow, data, states, losses)


def test_v2_prior_learns_from_the_larger_term():
    """The dynamics term has no gradient by the posterior's own layer, the representation term none by the prior's."""
    workflow = make_v2()
    data = workflow._replayed(inputs_of(batch_for(workflow)))
    losses, _ = workflow.world_model_losses(workflow.filter(data), data)
    posterior = list(workflow.rssm.posterior_head.outputs.parameters())
    prior = list(workflow.rssm.prior_head.outputs.parameters())

    def size(loss, parameters):
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        return sum(float(g.abs().sum()) for g in gradients if g is not None)

    assert size(losses["dynamics"], prior) > 0 == size(losses["representation"], prior)
    assert size(losses["representation"], posterior) > 0
    # What reaches the posterior of the dynamics term comes through later states alone: of the last step nothing does.
    single = data._replace(**{name: getattr(data, name)[:, :1] for name in data._fields if name.startswith("is_")})
    single = single._replace(
        observation={"vector": data.observation["vector"][:, :1]}, prev_action=data.prev_action[:, :1],
        reward=data.reward[:, :1],
    )  # fmt: skip
    losses, _ = workflow.world_model_losses(workflow.filter(single), single)
    assert size(losses["dynamics"], posterior) == 0


def test_v3_2023_world_model_losses():
    """One free nat per step, unimix in both, the dynamics scale 0.5, symlog'd two-hot targets, a hard label."""
    workflow = make_v3_2023(DISCRETE)
    data = workflow._replayed(inputs_of(batch_for(workflow)))
    filtered = workflow.filter(data)
    states, prior = filtered.states, workflow.rssm.prior(filtered.states.deter)
    losses, _ = workflow.world_model_losses(filtered, data)
    kl = kl_divergence(grid(filtered.posterior, 0.01), grid(prior, 0.01))
    torch.testing.assert_close(losses["dynamics"], kl.clamp(min=1.0).mean())
    assert (workflow.loss_scales["dynamics"], workflow.loss_scales["representation"]) == (0.5, 0.1)
    features = states.features
    alive = 1.0 - data.is_terminal.float()
    logits = workflow.continuation(features)
    torch.testing.assert_close(losses["continue"], F.binary_cross_entropy_with_logits(logits, alive))
    likely = torch.where(logits > 0, 1.0 - 1.0 / 333.0, 0.0)
    torch.testing.assert_close(workflow.continuation.mean(logits), likely)
    assert set(workflow.losses(data)[0]).isdisjoint({"replay_value"})
    prediction = workflow.decoder(states.deter, states.stoch)["vector"]
    squashed = torch.sign(data.observation["vector"]) * torch.log1p(data.observation["vector"].abs())
    torch.testing.assert_close(losses["observation"], (prediction - squashed).square().sum(-1).mean())


def _check_normal_predictions(workflow, data, states, losses) -> None:
    features = states.features
    half_error = 0.5 * (
        workflow.decoder(states.deter, states.stoch)["vector"] - data.observation["vector"]
    ).square().sum(-1)
    torch.testing.assert_close(losses["observation"], half_error.mean())
    reward = workflow.reward(features).squeeze(-1)
    torch.testing.assert_close(losses["reward"], 0.5 * (reward - data.reward).square().mean())
    label = workflow.discount * (1.0 - data.is_terminal.float())
    expected = F.binary_cross_entropy_with_logits(workflow.continuation(features), label)
    torch.testing.assert_close(losses["continue"], expected)


@pytest.mark.parametrize("version", MAKERS)
def test_sequences_start_from_nothing(version):
    """Without stored latents the first record is taken as an episode's start, with no action before it."""
    workflow = MAKERS[version]()
    batch = batch_for(workflow)
    data = workflow._replayed(inputs_of(batch))
    assert workflow.record_specs() == {}
    assert data.is_first[:, 0].all()
    assert not data.prev_action[:, 0].any()
    assert not data.initial.deter.any()
    torch.testing.assert_close(data.prev_action[:, 1:], batch.action[:, :-1])
    torch.testing.assert_close(data.reward, batch.reward)


@pytest.mark.parametrize(("version", "action"), [("v1", CONTINUOUS), ("v2", DISCRETE), ("v3_2023", CONTINUOUS)])
def test_updates_learn_one_batch(version, action):
    """Three optimisers, one backward pass: every part moves, and the model comes to explain the batch."""
    workflow = MAKERS[version](action)
    workflow.context.optimizers["model"].param_groups[0]["lr"] = 3e-3
    batch = batch_for(workflow)
    parts = {**workflow.context.components, **dict(workflow.context.controllers.items())}
    before = {name: [p.detach().clone() for p in part.parameters() if p.requires_grad] for name, part in parts.items()}
    first = dict(workflow.update(batch, phase=PHASE))
    for name, part in parts.items():
        now = [p for p in part.parameters() if p.requires_grad]
        assert not now or any(not torch.equal(a, b) for a, b in zip(before[name], now, strict=True)), name
    for _ in range(30):
        last = dict(workflow.update(batch, phase=PHASE))
    assert last["loss/observation"] < 0.8 * first["loss/observation"]
    assert {"optimizer/model_grad_norm", "optimizer/actor_grad_norm", "optimizer/critic_grad_norm"} <= set(last)
    assert all(torch.isfinite(value) for value in last.values())


def test_v2_copies_its_critic():
    """The slow critic stays for `slow_every` updates, then equals the fast one."""
    workflow = make_v2(slow_every=3)
    batch, features = batch_for(workflow), torch.randn(4, workflow.rssm.feature_size)
    start = workflow.critic.slow_mean(features)
    for update in (1, 2, 3):
        workflow.update(batch, phase=PHASE)
        slow, fast = workflow.critic.slow_mean(features), workflow.critic.mean(workflow.critic(features))
        assert torch.equal(slow, start) == (update < 3)
        assert torch.equal(slow, fast) == (update == 3)
    assert make_v1().critic.slow is None


@pytest.mark.parametrize(("version", "stepped"), [("v1", False), ("v2", True), ("v3_2023", True)])
def test_v2_and_v3_2023_dream_in_the_model_that_has_made_its_step(version, stepped, monkeypatch):
    """As the originals do; v1 takes all its gradients before any step."""
    workflow = MAKERS[version]()
    weight = next(workflow.rssm.parameters())
    before, seen, dream = weight.detach().clone(), [], workflow.dream
    monkeypatch.setattr(workflow, "dream", lambda start: (seen.append(weight.detach().clone()), dream(start))[1])
    workflow.update(batch_for(workflow), phase=PHASE)
    assert not torch.equal(before, weight)
    assert torch.equal(seen[0], weight if stepped else before)


@pytest.mark.parametrize(
    ("experiment", "squash"),
    [("dreamer_v2", "tanh"), ("dreamer_v2_atari", "tanh"), ("dreamer_v2_walker_walk", "none"), ("dreamer_v1", "none")],
)
def test_rewards_of_v2_are_squashed_but_for_control_tasks(experiment, squash):
    """The original's default is tanh; its settings for DeepMind Control and Dreamer v1 take rewards as they are."""
    reward = compose([f"+experiment={experiment}"]).components.reward
    assert reward.get("squash", "none") == squash


def test_v1_explores_with_noise():
    """N(0, 0.3) on continuous actions, cut at ±1; a random action in 30 % of the discrete ones; none in evaluation."""
    torch.manual_seed(0)
    workflow = make_v1(CONTINUOUS)
    still = torch.zeros(20_000, 2)
    assert workflow._explore(still).std().item() == pytest.approx(0.3, rel=0.02)
    assert workflow._explore(torch.ones(1000, 2)).max() <= 1.0
    workflow = make_v1(DISCRETE)
    chosen = torch.eye(3)[torch.zeros(20_000, dtype=torch.long)]
    explored = workflow._explore(chosen)
    torch.testing.assert_close(explored.sum(-1), torch.ones(20_000))
    share = (explored.argmax(-1) != 0).float().mean().item()
    assert share == pytest.approx(0.3 * 2 / 3, abs=0.01)
    observation = {"vector": torch.zeros(4, 4).numpy()}
    workflow._explore = lambda action: pytest.fail("an evaluation must not explore")
    workflow.act(observation, workflow.initial_state(4), mode="eval")


def test_settings_that_mean_nothing_are_refused():
    """Shares outside 0..1, negative noise, scales of losses that a version does not have."""
    with pytest.raises(ConfigError, match="kl_balance"):
        make_v2(kl_balance=1.2)
    with pytest.raises(ConfigError, match="exploration"):
        make_v1(exploration=-0.1)
    with pytest.raises(ConfigError, match=r"loss_scales\.replay_value"):
        make_v1(loss_scales={"replay_value": 1.0})
