"""TD-MPC2: every loss and target against a literal loop, terminations, discrete actions, planning, resume."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tdmpc_parts import CONTINUOUS, DISCRETE, IMAGE, make_batch, make_workflow, randomize
from tests.components.planner_models import make_planner
from tests.packaged import adjusted
from tests.runs import run_in_parts

from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.gradient import GradientPlanner
from rl_lab.components.planners.mppi import MPPI
from rl_lab.errors import ConfigError, DataError
from rl_lab.experiment.train import run_training
from rl_lab.nn.distributions import symexp, symlog
from rl_lab.records import CollectResult, EpisodeSummary, SequenceBatch
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.tdmpc2 import TDMPC2

PHASE = PhaseView("train", "online", "replay")
QUIET = ["logging.console=off", "logging.tensorboard=false", "evaluation.video=false"]


def two_hot_vector(value: float, bins: int = 101, limit: float = 10.0) -> torch.Tensor:
    """The encoding, written out."""
    place = (min(max(float(symlog(torch.tensor(value, dtype=torch.float64))), -limit), limit) + limit) / 0.2
    low = min(math.floor(place), bins - 2)
    vector = torch.zeros(bins)
    vector[low], vector[low + 1] = 1 - (place - low), place - low
    return vector


def decoded(logits: torch.Tensor) -> torch.Tensor:
    return symexp((logits.softmax(-1) * torch.linspace(-10, 10, 101)).sum(-1))


def cross_entropy(logits: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return -(two_hot_vector(float(value)) * logits.log_softmax(-1)).sum()


def literal_losses(workflow: TDMPC2, batch: SequenceBatch, noise: torch.Tensor, pair: torch.Tensor) -> dict:
    """The paper's sums, window by window and step by step, in the records' own order."""
    model, q, rho, horizon = workflow.model, workflow.q, workflow.rho, workflow.horizon
    count = batch.reward.shape[0]
    names = ("consistency", "reward", "value", "termination")
    losses = {name: torch.zeros(()) for name in names}
    for row in range(count):
        vector = batch.observation["vector"][row]
        latent = workflow.encoder({"vector": vector[:1]})
        for k in range(horizon):
            if batch.is_last[row, k]:
                break  # what follows belongs to another episode
            action = workflow.codec.encode(batch.action[row : row + 1, k])
            reward, terminal = batch.reward[row, k + 1], batch.is_terminal[row, k + 1].float()
            with torch.no_grad():
                following = workflow.encoder({"vector": vector[k + 1 : k + 2]})
                proposal = workflow.policy.sample(following, noise[k, row : row + 1])
                values = [decoded(q.slow.network(torch.cat([following, proposal], -1))[j]) for j in pair.tolist()]
                target = reward + model.discount * (1 - terminal) * torch.minimum(*values)[0]
            after, reward_logits = model.step(latent, action)
            share = rho**k / (horizon * count)
            outputs = q(latent, action)
            losses["consistency"] = losses["consistency"] + share * F.mse_loss(after, following)
            losses["reward"] = losses["reward"] + share * cross_entropy(reward_logits[0], reward)
            terms = [cross_entropy(outputs[j, 0], target) for j in range(q.members)]
            losses["value"] = losses["value"] + share * torch.stack(terms).mean()
            miss = F.binary_cross_entropy_with_logits(model.termination_logit(after)[0], terminal)
            losses["termination"] = losses["termination"] + miss / (horizon * count)
            latent = after
    return losses


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_model_losses_follow_their_definition(action, monkeypatch) -> None:
    """Consistency to the online encoder, two-hot reward and values to the masked target, nothing past an end."""
    workflow = make_workflow(action=action)
    randomize(workflow.model, workflow.q, workflow.policy)
    batch = make_batch(workflow)
    noise, pair = workflow.policy.draw_noise((3, 8)), torch.tensor([2, 0])
    monkeypatch.setattr(workflow.policy, "draw_noise", lambda lead: noise)
    monkeypatch.setattr(workflow.q, "draw_pair", lambda: pair)
    losses, _, _ = workflow.model_losses(workflow._window(workflow._inputs(batch)))
    expected = literal_losses(workflow, batch, noise, pair)
    assert set(losses) == set(expected)
    for name, loss in losses.items():
        torch.testing.assert_close(loss, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_policy_loss_follows_its_definition(monkeypatch) -> None:
    """Mean of two frozen online Qs over the running scale, plus the entropy times the action size; z_t counts ρ^t."""
    workflow = make_workflow()
    randomize(workflow.q, workflow.policy)
    latents, alive = torch.rand(4, 8, 16), (torch.rand(4, 8) < 0.8).float()
    noise, pair = torch.randn(32, 2), torch.tensor([1, 2])
    monkeypatch.setattr(workflow.policy, "draw_noise", lambda lead: noise)
    monkeypatch.setattr(workflow.q, "draw_pair", lambda: pair)
    terms, first = torch.zeros(4, 8), []
    values = torch.zeros(4, 8)
    for t in range(4):
        for row in range(8):
            z, eps = latents[t, row : row + 1], noise[t * 8 + row]
            mean, raw = workflow.policy(z)[0].chunk(2)
            log_std = -10 + 6 * (raw.tanh() + 1)
            action = (mean + log_std.exp() * eps).tanh()[None]
            values[t, row] = torch.stack([decoded(workflow.q(z, action)[j, 0]) for j in (1, 2)]).mean()
            gaussian = torch.distributions.Normal(0.0, 1.0).log_prob(eps).sum() - log_std.sum()
            terms[t, row] = 1e-4 * -2 * gaussian
            if t == 0 and alive[0, row]:
                first.append(values[0, row])
    shown = values[0].clone()
    shown[alive[0] == 0] = torch.stack(first).mean()
    spread = float((torch.quantile(shown, 0.95) - torch.quantile(shown, 0.05)).detach())
    scale = 1 + 0.01 * (max(spread, 1.0) - 1)
    expected = -(alive * (terms + values / scale) * 0.5 ** torch.arange(4)[:, None]).mean()
    loss, _ = workflow.policy_loss(latents, alive)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)


def test_discrete_policy_learns_from_every_action(monkeypatch) -> None:
    """Σ_a π(a) Q(z, a) is exact; its gradient prefers the better action."""
    workflow = make_workflow(action=DISCRETE)
    randomize(workflow.q, workflow.policy)
    latent, pair = torch.rand(1, 5, 16), torch.tensor([0, 1])
    monkeypatch.setattr(workflow.q, "draw_pair", lambda: pair)
    value, entropy = workflow.policy_values(latent)
    probs = 0.99 * workflow.policy(latent[0]).softmax(-1) + 0.01 / 3
    q = torch.stack([decoded(workflow.q(latent[0], torch.eye(3)[[a] * 5])[:2]).mean(0) for a in range(3)], -1)
    torch.testing.assert_close(value[0], (probs * q).sum(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy[0], -(probs * probs.log()).sum(-1), rtol=1e-4, atol=1e-5)


def test_gradients_go_where_they_belong() -> None:
    """The value loss reaches the encoder; targets move nothing; the policy's loss leaves values and model alone."""
    workflow = make_workflow()
    randomize(workflow.model, workflow.q)
    window = workflow._window(workflow._inputs(make_batch(workflow)))
    losses, latents, _ = workflow.model_losses(window)
    for name, loss in losses.items():
        reached = torch.autograd.grad(loss, list(workflow.encoder.parameters()), retain_graph=True)
        assert any(bool(gradient.abs().sum() > 0) for gradient in reached), name
    assert all(p.grad is None for p in workflow.policy.parameters())
    workflow.policy_loss(latents.detach(), window.alive)[0].backward()
    assert all(p.grad is None for part in (workflow.q, workflow.model, workflow.encoder) for p in part.parameters())
    assert any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in workflow.policy.parameters())


def test_the_slow_values_follow_by_one_percent() -> None:
    workflow = make_workflow()
    randomize(workflow.q)
    slow = [value.clone() for value in workflow.q.slow.network.parameters()]
    workflow.update(make_batch(workflow), phase=PHASE)
    pairs = zip(workflow.q.slow.network.parameters(), slow, workflow.q.online.parameters(), strict=True)
    for after, before, online in pairs:
        torch.testing.assert_close(after, before + 0.01 * (online - before))


@pytest.mark.parametrize(("terminal", "value"), [(True, 1.0), (False, 2.0)])
def test_a_chain_of_two_states_has_its_known_value(terminal: bool, value: float) -> None:
    """A → B with reward 1. Where that ends the episode, Q(A) is 1; where it is only cut off, γ = 0.5 makes it 2."""
    workflow = make_workflow(lr=1e-2, discount=0.5, horizon=1, members=2, target_rate=0.3, batch_size=4)
    states = torch.eye(4)
    following = states[1] if terminal else states[0]  # cut off: B looks like A, and its value is A's
    batch = SequenceBatch(
        observation={"vector": torch.stack([states[0], following]).expand(4, 2, 4)},
        action=torch.rand(4, 2, 2) * 2 - 1, reward=torch.tensor([0.0, 1.0]).expand(4, 2),
        is_first=torch.tensor([True, False]).expand(4, 2), is_last=torch.tensor([False, True]).expand(4, 2),
        is_terminal=torch.tensor([False, terminal]).expand(4, 2),
    )  # fmt: skip
    for _ in range(120):
        workflow.update(batch, phase=PHASE)
    with torch.no_grad():
        latent = workflow.encoder({"vector": states[:1]})
        found = workflow.simulator.value(latent)
        step = workflow.simulator.step(latent, torch.zeros(1, 2))
    assert float(found) == pytest.approx(value, rel=0.1)
    assert float(step.reward) == pytest.approx(1.0, rel=0.05)
    assert float(step.continuation) == pytest.approx(0.0 if terminal else 1.0, abs=0.05)


def test_windows_stop_at_the_end_of_an_episode() -> None:
    """Changing what lies beyond an end changes no loss."""
    workflow = make_workflow()
    batch = make_batch(workflow, ends=0.4)
    beyond = batch.is_last.cumsum(1) - batch.is_last.int() > 0
    other = dataclasses.replace(
        batch,
        observation={"vector": torch.where(beyond[..., None], 7.0, batch.observation["vector"])},
        reward=torch.where(beyond, 100.0, batch.reward),
        action=torch.where((beyond | batch.is_last)[..., None], -1.0, batch.action),
    )
    assert bool(beyond.any())
    results = []
    for given in (batch, other):
        torch.manual_seed(3)
        results.append({name: loss.item() for name, loss in workflow.batch_losses(given).items()})
    assert results[0] == results[1]


# Acting ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_acting_keeps_a_plan_for_each_environment(action, mode) -> None:
    """The memory is the plan of the decision before; zeros are none; resetting one environment leaves the others."""
    workflow = make_workflow(action=action)
    observation = {"vector": np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)}
    chosen, state = workflow.act(observation, workflow.initial_state(5), mode=mode)
    assert chosen.shape == (5, *action.shape)
    assert chosen.dtype == action.dtype
    if action.kind == "continuous":
        assert np.abs(chosen).max() <= 1.0
    assert all(len(value) == 5 for value in state.values())
    cleared = workflow.reset_state(state, np.array([True, False, False, False, False]))
    assert all(not value[0].any() and torch.equal(value[1:], state[name][1:]) for name, value in cleared.items())


def test_planning_finds_the_better_discrete_action() -> None:
    """A model that rewards action 2 alone makes the planner choose it everywhere."""
    workflow = make_workflow(action=DISCRETE, lr=5e-3, planner={"samples": 32, "policy_samples": 4, "elites": 8})
    states, actions = torch.randn(8, 4, 4), torch.randint(0, 3, (8, 4, 1), dtype=torch.int32)
    flags = torch.zeros(8, 4, dtype=torch.bool)
    for _ in range(80):
        actions = torch.randint(0, 3, (8, 4, 1), dtype=torch.int32)
        reward = torch.cat([torch.zeros(8, 1), (actions[:, :-1, 0] == 2).float()], 1)
        batch = SequenceBatch({"vector": states}, actions, reward, flags, flags, flags)
        workflow.update(batch, phase=PHASE)
    chosen, _ = workflow.act({"vector": states[:, 0].numpy()}, workflow.initial_state(8), mode="eval")
    assert (chosen == 2).mean() >= 0.75


@pytest.mark.parametrize("planner", [CEM, MPPI, GradientPlanner])
def test_any_planner_plans_in_the_latent(planner) -> None:
    """Its simulator steps, values and differentiates like any other."""
    workflow = make_workflow()
    randomize(workflow.model, workflow.q)
    other = make_planner(planner, action=CONTINUOUS, horizon=2, discount=0.9)
    other.attach(workflow.simulator)
    latent = workflow.simulator.observe({"vector": torch.randn(3, 4)})
    plan = other.plan(latent.detach(), other.initial_memory(3))
    assert plan.action.shape == (3, 2)
    assert bool(plan.value.isfinite().all())


def test_plans_with_short_weights_follow_the_updates(monkeypatch) -> None:
    """The copies that plans are computed with are those of the weights when the observation was seen."""
    monkeypatch.setattr("rl_lab.simulation.tdmpc.compile_block", lambda function, **_: function)
    workflow = make_workflow()
    simulator, batch = workflow.simulator, make_batch(workflow)
    simulator.compile_blocks(torch.bfloat16)
    simulator.observe({"vector": torch.ones(2, 4)})
    assert simulator.model is not workflow.model
    for _ in range(3):
        workflow.update(batch, phase=PhaseView("train", "online"))
    plan, _ = workflow.plan({"vector": np.ones((2, 4), np.float32)}, workflow.initial_state(2))
    assert plan.is_finite.all()
    latent_output = workflow.model.latent_output.linear.weight
    assert torch.equal(simulator.model.latent_output.linear.weight, latent_output.bfloat16())
    first = workflow.policy.network[0].linear.weight
    assert torch.equal(simulator.prior.network[0].linear.weight, first.bfloat16())
    weight = workflow.q.online.layers[0].linear.weight
    assert torch.equal(simulator.q.online.layers[0].linear.weight[:, : weight.shape[1]], weight.bfloat16())


def test_acting_with_the_policy_is_greedy_in_evaluation() -> None:
    workflow = make_workflow(act_with="policy")
    observation = {"vector": np.ones((2, 4), np.float32)}
    chosen, _ = workflow.act(observation, workflow.initial_state(2), mode="eval")
    latent = workflow.encoder({"vector": torch.ones(2, 4)})
    torch.testing.assert_close(torch.from_numpy(chosen), workflow.policy.mode(latent).detach())


def test_pixels_train_and_act() -> None:
    """64×64 images need a latent of a multiple of 16; random shifts draw in acting as in learning."""
    workflow = make_workflow(observation=IMAGE, latent=32, batch_size=2)
    metrics = workflow.update(make_batch(workflow), phase=PHASE)
    assert bool(torch.isfinite(metrics.values_vector).all())
    image = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    chosen, _ = workflow.act({"image": image}, workflow.initial_state(2), mode="train")
    assert chosen.shape == (2, 2)


# Errors and runs ------------------------------------------------------------------------------------------------------


def test_an_ending_is_refused_where_the_model_knows_none(monkeypatch) -> None:
    """Silently bootstrapping past a termination would teach a wrong value."""
    workflow = make_workflow(episodic=False)
    result = CollectResult([], 1, episodes=[EpisodeSummary(0, 1.0, 1, True)])
    monkeypatch.setattr(Workflow, "collect_step", lambda self, step, *, phase: result)
    with pytest.raises(DataError, match=r"components\.model\.episodic"):
        workflow.collect_step(0, phase=PHASE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rho": 0.0}, "rho=0"),
        ({"horizon": 0}, "horizon=0"),
        ({"act_with": "luck"}, "planner or policy"),
        ({"class_noise": 2.0}, "class_noise=2"),
        ({"loss_scales": {"valu": 1.0}}, "value"),
    ],
)
def test_wrong_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TDMPC2(**adjusted("workflow/tdmpc2", **settings))


TINY = [
    "+experiment=tdmpc2_cartpole", "environment.num_envs=2", "workflow.batch_size=4", "size=tiny",
    "controllers.planner.samples=8", "controllers.planner.policy_samples=2", "controllers.planner.elites=4",
    "controllers.planner.iterations=1", "evaluation.episodes=1", "evaluation.final_episodes=1",
    "evaluation.select=last", "checkpoint.best=null",
]  # fmt: skip
SHORT = [
    {"name": "seed", "type": "warmup", "duration_steps": 24, "controller": "random", "workflow_hooks": ["collect"]},
    {"name": "pretrain", "type": "offline", "duration_updates": 4, "workflow_hooks": ["update"]},
    {
        "name": "train",
        "type": "online",
        "duration_steps": 40,
        "workflow_hooks": ["collect", {"update": {"ratio": 0.5}}],
    },
]


def test_resumed_run_equals_uninterrupted_run(tmp_path: Path) -> None:
    """Plans, replay, optimisers, the running scale and the random streams all go on where they stopped."""
    rows = []
    phases = json.dumps(SHORT).replace('"', "")
    common = [*TINY, *QUIET, "checkpoint.every=40", "logging.every=10", f"training.phases={phases}"]
    whole = run_training([*common, f"run_root={tmp_path}/whole", "training.total_timesteps=64"])
    assert whole.code == 0
    for folder in (whole.folder, run_in_parts([*common, f"run_root={tmp_path}/parts"], first=44, total=64)):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows.append([
            {key: value for key, value in line.items() if key.startswith("train/")}
            for line in lines if line["env_steps"] > 44 and "train/loss/total" in line
        ])  # fmt: skip
    assert rows[0]
    assert rows[0] == rows[1]


@pytest.mark.learning
def test_cartpole_is_solved(tmp_path: Path) -> None:
    """The tuned experiment keeps its gate: discrete actions, and episodes that end."""
    outcome = run_training(["+experiment=tdmpc2_cartpole", *QUIET, f"run_root={tmp_path}"])
    assert outcome.code == 0
    assert json.loads((outcome.folder / "summary.json").read_text())["eval/return_mean"] >= 475.0
