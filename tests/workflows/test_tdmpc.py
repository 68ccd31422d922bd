"""TD-MPC: its losses, priorities and targets against a literal loop, the schedule of its planner, whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tdmpc_parts import CONTINUOUS, DISCRETE, make_batch, make_workflow, randomize
from tests.packaged import adjusted

import rl_lab
from rl_lab.errors import ConfigError
from rl_lab.experiment.train import run_training
from rl_lab.records import SequenceBatch
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.tdmpc import TDMPC

PHASE = PhaseView("train", "online", "replay")


def literal(workflow: TDMPC, batch: SequenceBatch, noise: torch.Tensor) -> tuple[dict, list[float]]:
    """Sums over steps with ρ^k, weighted means over windows; the priorities."""
    model, q, count = workflow.model, workflow.q, batch.reward.shape[0]
    losses = {name: torch.zeros(()) for name in ("consistency", "reward", "value", "termination")}
    priorities = []
    for row in range(count):
        vector, error = batch.observation["vector"][row], 0.0
        latent = workflow.encoder({"vector": vector[:1]})
        share = float(batch.weight[row]) / count
        for k in range(workflow.horizon):
            if batch.is_last[row, k]:
                break
            action = workflow.codec.encode(batch.action[row : row + 1, k])
            reward, terminal = batch.reward[row, k + 1], batch.is_terminal[row, k + 1].float()
            with torch.no_grad():
                seen = {"vector": vector[k + 1 : k + 2]}
                slow, following = workflow.slow_encoder.network(seen), workflow.encoder(seen)
                proposal = workflow.policy.sample(following, noise[k, row : row + 1])
                values = q.slow.network(torch.cat([following, proposal], -1))[:, 0, 0]
                target = reward + model.discount * (1 - terminal) * values.min()
            after, predicted = model.step(latent, action)
            outputs = q(latent, action)[:, 0, 0]
            weight = share * 0.5**k
            losses["consistency"] = losses["consistency"] + weight * F.mse_loss(after, slow)
            losses["reward"] = losses["reward"] + weight * (predicted[0, 0] - reward) ** 2
            losses["value"] = losses["value"] + weight * ((outputs - target) ** 2).sum()
            miss = F.binary_cross_entropy_with_logits(model.termination_logit(after)[0], terminal)
            losses["termination"] = losses["termination"] + share * miss
            error += 0.5**k * float((outputs - target).detach().abs().sum())
            latent = after
        priorities.append(0.0 if batch.is_last[row, 0] else error + 1e-6)
    return losses, priorities


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_losses_and_priorities_follow_their_definition(action, monkeypatch) -> None:
    """Consistency to the slow encoder, targets by the online one; nothing past an end; ends are not drawn again."""
    workflow = make_workflow(TDMPC, action)
    randomize(workflow.model, workflow.q, workflow.slow_encoder)
    batch = make_batch(workflow, weighted=True)
    noise = workflow.policy.draw_noise((3, 8))
    monkeypatch.setattr(workflow.policy, "draw_noise", lambda lead: noise)
    losses, _, priority, _ = workflow.model_losses(workflow._window(workflow._inputs(batch)))
    expected, priorities = literal(workflow, batch, noise)
    for name, loss in losses.items():
        torch.testing.assert_close(loss, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    torch.testing.assert_close(priority.detach(), torch.tensor(priorities), rtol=1e-4, atol=1e-6)


def test_priorities_are_bounded() -> None:
    """An error beyond all bounds counts 1e4, so that it does not take over the replay."""
    workflow = make_workflow(TDMPC)
    batch = make_batch(workflow, weighted=True)
    batch.reward.fill_(1e9)
    priority = workflow.model_losses(workflow._window(workflow._inputs(batch)))[2]
    assert float(priority.max()) == pytest.approx(1e4)


def test_policy_maximises_the_smaller_value(monkeypatch) -> None:
    workflow = make_workflow(TDMPC)
    randomize(workflow.q)
    latents, alive = torch.randn(4, 8, 16), torch.ones(4, 8)
    noise = torch.randn(32, 2)
    monkeypatch.setattr(workflow.policy, "draw_noise", lambda lead: noise)
    loss, _ = workflow.policy_loss(latents, alive)
    expected = torch.zeros(())
    for t in range(4):
        action = workflow.policy.sample(latents[t], noise[8 * t : 8 * t + 8])
        expected = expected - 0.5**t * workflow.q(latents[t], action)[..., 0].amin(0).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


def test_slow_copies_move_every_second_update() -> None:
    """Encoder and values alike; the first update leaves them."""
    workflow = make_workflow(TDMPC)
    parts = [(workflow.q.slow.network, workflow.q.online), (workflow.slow_encoder.network, workflow.encoder)]
    before = [[value.clone() for value in slow.parameters()] for slow, _ in parts]
    workflow.update(make_batch(workflow), phase=PHASE)
    for (slow, _), saved in zip(parts, before, strict=True):
        assert all(torch.equal(value, old) for value, old in zip(slow.parameters(), saved, strict=True))
    workflow.update(make_batch(workflow, seed=1), phase=PHASE)
    for (slow, fast), saved in zip(parts, before, strict=True):
        for value, old, new in zip(slow.parameters(), saved, fast.parameters(), strict=True):
            torch.testing.assert_close(value, old + 0.01 * (new - old))


def test_plans_grow_longer_and_surer(monkeypatch) -> None:
    """Horizon 1 → 3 and least deviation 0.5 → 0.05 over the schedule; a restored workflow stands where it was."""
    workflow = make_workflow(TDMPC, schedule_steps=100)
    monkeypatch.setattr(Workflow, "collect_step", lambda self, step, *, phase: None)
    seen = []
    for step in (0, 50, 100, 1000):
        workflow.collect_step(step, phase=PHASE)
        seen.append((workflow.planner.planned, round(float(workflow.planner.std_floor), 4)))
    assert seen == [(1, 0.5), (2, 0.275), (3, 0.05), (3, 0.05)]
    other = make_workflow(TDMPC, schedule_steps=100)
    workflow.collect_step(50, phase=PHASE)
    other.load_state_dict(workflow.state_dict())
    assert other.planner.planned == 2
    chosen, state = other.act({"vector": np.ones((2, 4), np.float32)}, other.initial_state(2), mode="train")
    assert chosen.shape == (2, 2)
    assert state["plan_mean"].shape == (2, 3, 2)


def test_wrong_schedules_are_named() -> None:
    with pytest.raises(ConfigError, match="first_horizon=9"):
        TDMPC(**adjusted("workflow/tdmpc", first_horizon=9))


def test_a_run_trains_saves_and_acts(tmp_path: Path) -> None:
    """From its experiment to a loaded agent, with discrete actions, endings and priorities."""
    phases = (
        "[{name: seed, type: warmup, duration_steps: 24, controller: random, workflow_hooks: [collect]},"
        "{name: train, type: online, duration_steps: 16, workflow_hooks: [collect, {update: {ratio: 0.5}}]}]"
    )
    outcome = run_training([
        "+experiment=tdmpc", "environment.id=CartPole-v1", "environment.num_envs=2", f"run_root={tmp_path}",
        "workflow.batch_size=4", "controllers.planner.samples=8", "controllers.planner.policy_samples=2",
        "controllers.planner.elites=4", "controllers.planner.iterations=1", "components.model.units=16",
        "controllers.policy.units=16", "controllers.q.units=16", "training.total_timesteps=40",
        f"training.phases={phases}", "evaluation.episodes=1", "logging.console=off", "logging.tensorboard=false",
        "evaluation.video=false",
    ])  # fmt: skip
    assert outcome.code == 0
    agent = rl_lab.load(outcome.folder)
    action, _ = agent.act(np.zeros(4, np.float32), agent.initial_state())
    assert int(action) in (0, 1)
