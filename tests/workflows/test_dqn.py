"""DQN: its targets against a literal reference, its gradient against autograd, exploration, priorities, resume."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dqn_parts import IMAGE, VECTOR, make_batch, make_dqn
from tests.runs import rows, run_in_parts

from rl_lab.errors import ConfigError
from rl_lab.experiment.train import run_training
from rl_lab.records import SequenceBatch
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.dqn import DQN

ONLINE = PhaseView("train", "online", "replay")
QUIET = ["logging.console=off", "logging.tensorboard=false", "evaluation.video=false"]


def seen_at(workflow: DQN, batch: SequenceBatch, row: int, time: int) -> dict[str, torch.Tensor]:
    """One observation with its frames, put together one by one."""
    result = {}
    for key, value in batch.observation.items():
        frames = []
        for age in range(workflow.frames.depth):
            at = time
            for _ in range(age):
                at = at if batch.is_first[row, at] else at - 1
            frames.append(value[row, at])
        stacked = torch.cat(frames[::-1], -1)
        result[key] = stacked[None]
    return result


@torch.no_grad()
def literal_target(workflow: DQN, batch: SequenceBatch, row: int) -> float:
    """The definition, step by step."""
    time, total, discount = workflow.frames.context, 0.0, 1.0
    for _ in range(workflow.n_step):
        time += 1
        total += discount * float(batch.reward[row, time])
        discount *= workflow.discount
        if batch.is_terminal[row, time]:
            return total
        if batch.is_last[row, time]:
            break
    seen = seen_at(workflow, batch, row, time)
    values = workflow.target.network(seen)[0]
    chooser = workflow.q(seen)[0] if workflow.double else values
    return total + discount * float(values[chooser.argmax()])


@pytest.mark.parametrize("n_step", [1, 2, 5])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("observation", "depth"), [(VECTOR, 1), (VECTOR, 3), (IMAGE, 4)], ids=["1", "3", "image"])
def test_targets_follow_their_definition(n_step: int, double: bool, observation: dict, depth: int) -> None:
    """n rewards, cut off at the episode's end; a bootstrap after truncation and after n steps, none after an end."""
    workflow = make_dqn(observation, depth=depth, n_step=n_step, double=double, discount=0.9)
    with torch.no_grad():
        for value in workflow.target.parameters():
            value += 0.1 * torch.randn(value.shape)
    batch = make_batch(workflow)
    alive = [row for row in range(24) if not batch.is_last[row, workflow.frames.context]]
    expected = torch.tensor([literal_target(workflow, batch, row) for row in alive])
    torch.testing.assert_close(workflow.targets(batch)[alive], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
def test_the_gradient_is_that_of_the_loss(loss: str, weighted: bool, dueling: bool) -> None:
    """Of the chosen actions' values alone, weighted; last records of episodes count for nothing."""
    workflow = make_dqn(loss=loss, dueling=dueling, n_step=2)
    batch = make_batch(workflow, weighted=weighted)
    start = workflow.frames.context
    values = workflow.q({"vector": batch.observation["vector"][:, start]})
    chosen = values.gather(1, batch.action[:, start].long())[:, 0]
    losses = (F.huber_loss if loss == "huber" else F.mse_loss)(chosen, workflow.targets(batch), reduction="none")
    weight = (~batch.is_last[:, start]).float() * (1.0 if batch.weight is None else batch.weight)
    expected = (weight * losses).mean()
    trained = [value for value in workflow.q.parameters() if value.requires_grad]
    gradients = torch.autograd.grad(expected, trained)
    result = workflow.td_loss(batch)
    torch.testing.assert_close(result.loss, expected)
    alive = ~batch.is_last[:, start]
    torch.testing.assert_close((result.value - result.target)[alive], (chosen - workflow.targets(batch))[alive])
    assert not result.target.requires_grad
    for found, gradient in zip(torch.autograd.grad(result.loss, trained), gradients, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("terminal", "value"), [(False, 10.0), (True, 1.0)])
@pytest.mark.parametrize("n_step", [1, 3])
def test_a_chain_of_two_states_has_its_known_value(terminal: bool, value: float, n_step: int) -> None:
    """A → B → A …, reward 1 a step, γ 0.9, episodes of one step: worth 10 where they are cut off, 1 where they end."""
    workflow = make_dqn(lr=1e-2, n_step=n_step, discount=0.9, target=(1.0, 5), loss="mse", batch_size=8)
    states = torch.eye(4)[:2]
    time = n_step + 1
    order = (torch.arange(8)[:, None] + torch.arange(time)) % 2  # records 0 and 1 are one episode, 2 and 3 the next
    is_last = (torch.arange(time) % 2 == 1).expand(8, -1)
    batch = SequenceBatch(
        observation={"vector": states[order]},
        action=torch.zeros(8, time, 1, dtype=torch.int32) + torch.arange(8, dtype=torch.int32)[:, None, None] // 2 % 3,
        reward=is_last.float(),
        is_first=~is_last,
        is_last=is_last,
        is_terminal=is_last & terminal,
    )
    for _ in range(800):
        workflow.update(batch, phase=ONLINE)
    with torch.no_grad():
        best = workflow.q({"vector": states}).amax(1)
    torch.testing.assert_close(best, torch.full((2,), value), rtol=0.05, atol=0.05)


def test_epsilon_falls_linearly() -> None:
    """From start to end over the given env steps, then it stays."""
    workflow = make_dqn(epsilon_start=0.9, epsilon_end=0.1, epsilon_steps=100)
    assert [workflow.epsilon(step) for step in (0, 50, 100, 1000)] == pytest.approx([0.9, 0.5, 0.1, 0.1])


def test_exploration_has_its_own_saved_stream() -> None:
    """ε of the actions are random; the stream goes on exactly, whatever torch's global one does; eval is greedy."""
    workflow = make_dqn(epsilon_start=0.5, epsilon_end=0.5)
    observation = {"vector": np.random.default_rng(0).normal(size=(4000, 4)).astype(np.float32)}
    best, _ = workflow.act(observation, {}, mode="eval")
    state = workflow.state_dict()
    first, _ = workflow.act(observation, {}, mode="train")
    torch.rand(3)
    workflow.load_state_dict(state)
    again, _ = workflow.act(observation, {}, mode="train")
    np.testing.assert_array_equal(first, again)
    assert first.dtype == np.int32
    assert first.shape == (4000, 1)
    assert (first == best).mean() == pytest.approx(0.5 + 0.5 / 3, abs=0.03)
    np.testing.assert_array_equal(best, workflow.act(observation, {}, mode="eval")[0])


def test_evaluation_may_explore_too() -> None:
    """From torch's stream, which evaluation seeds, and not from that of training."""
    workflow = make_dqn(eval_epsilon=1.0)
    observation = {"vector": np.zeros((3000, 4), np.float32)}
    before = workflow.state_dict()["exploration"]
    torch.manual_seed(1)
    first, _ = workflow.act(observation, {}, mode="eval")
    torch.manual_seed(1)
    second, _ = workflow.act(observation, {}, mode="eval")
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(np.bincount(first[:, 0]) / 3000, 1 / 3, atol=0.04)
    assert workflow.state_dict()["exploration"] == before


@pytest.mark.parametrize(("every", "rate"), [(3, 1.0), (1, 0.1)])
def test_the_target_moves_when_due(every: int, rate: float) -> None:
    """A hard copy each so many updates, or a small step after each."""
    workflow = make_dqn(target=(rate, every))
    batch = make_batch(workflow)
    for update in range(1, 7):
        before = [value.clone() for value in workflow.target.parameters()]
        workflow.update(batch, phase=ONLINE)
        moved = update % every == 0
        for old, new, online in zip(before, workflow.target.parameters(), workflow.q.parameters(), strict=True):
            torch.testing.assert_close(new, old + rate * (online.detach() - old) if moved else old)


def td_error(workflow: DQN, batch: SequenceBatch) -> torch.Tensor:
    _, value, target = workflow.td_loss(batch)
    return (value - target).abs().detach()


class Priorities:
    """Notes what it is told."""

    def update(self, indices: torch.Tensor, fields: dict[str, torch.Tensor]) -> None:
        self.indices, self.priority = indices, fields["priority"]


def test_priorities_are_the_sizes_of_the_errors() -> None:
    """Of the trained record; 0 for the last record of an episode, which nothing follows."""
    source = Priorities()
    workflow = make_dqn(depth=3, n_step=2, sources={"replay": source}, priority_floor=0.01)  # type: ignore[dict-item]
    batch = make_batch(workflow, weighted=True)
    error = td_error(workflow, batch)
    workflow.update(batch, phase=ONLINE)
    assert batch.indices is not None
    torch.testing.assert_close(source.indices, batch.indices[:, 2])
    torch.testing.assert_close(source.priority, torch.where(batch.is_last[:, 2], 0.0, error + 0.01))


def test_the_step_to_capture_is_the_plain_update() -> None:
    """Fed from a flat dict it gives the same metrics, priorities and parameters, for stacked images too."""
    results = []
    for flat in (False, True):
        source = Priorities()
        workflow = make_dqn(IMAGE, depth=4, n_step=3, dueling=True, sources={"replay": source})  # type: ignore[dict-item]
        if flat:
            workflow._captured = workflow._train_step  # type: ignore[assignment]
        for seed in range(2):
            metrics = workflow.update(make_batch(workflow, seed=seed, weighted=True), phase=ONLINE)
        values = torch.tensor([float(value) for value in metrics.values()])
        results.append(
            [
                values,
                source.priority,
                source.indices,
                *workflow.q.state_dict().values(),
                *workflow.target.state_dict().values(),
            ]
        )
    torch.testing.assert_close(*results, rtol=0.0, atol=0.0)


def test_late_priorities_are_those_of_the_update_before() -> None:
    """As on a GPU, where the host does not wait for the update that it has just begun; a checkpoint keeps them."""
    source = Priorities()
    first = make_dqn(sources={"replay": source}, seed=3)  # type: ignore[dict-item]
    first._priorities.late = True
    batch = make_batch(first, seed=1, weighted=True)
    error = td_error(first, batch)
    first.update(batch, phase=ONLINE)
    assert not hasattr(source, "priority")
    resumed = make_dqn(sources={"replay": source})  # type: ignore[dict-item]
    resumed._priorities.late = True
    resumed.load_state_dict(first.state_dict())
    resumed.update(make_batch(resumed, seed=2, weighted=True), phase=ONLINE)
    assert batch.indices is not None
    torch.testing.assert_close(source.indices, batch.indices[:, 0])
    torch.testing.assert_close(source.priority, torch.where(batch.is_last[:, 0], 0.0, error + 1e-6))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"n_step": 0}, "n_step=0"), ({"loss": "l1"}, "huber or mse"), ({"epsilon_end": 1.5}, "epsilon_end=1.5")],
)
def test_wrong_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_dqn(**settings)


TINY = [
    "+experiment=dqn", "environment.id=CartPole-v1", "environment.num_envs=2", "workflow.batch_size=8",
    "controllers.q.units=16", "data_sources.replay.start_after=20", "workflow.epsilon_steps=60", "logging.every=10",
    "checkpoint.every=30", "evaluation.every=50", "evaluation.episodes=2", "components.target.every=5", *QUIET,
]  # fmt: skip
PRIORITIZED = ["data_sources.replay.sampling=prioritized", "workflow.n_step=3", "workflow.double=true"]
STACKED = ["components.frame_stack.depth=3", "controllers.q.dueling=true", "workflow.loss=mse"]


@pytest.mark.parametrize("variant", [[], PRIORITIZED + STACKED], ids=["plain", "everything"])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, variant: list[str]) -> None:
    """To the last metric: network, target, optimiser, replay with priorities, frames, exploration.

    The other run has no checkpoint where this one stopped: making one must leave no trace.
    """
    base = [*TINY, *variant]
    whole = run_training([*base, "training.total_timesteps=160", f"run_root={tmp_path}/a"]).folder
    part = run_in_parts([*base, f"run_root={tmp_path}/b"], first=94, total=160)
    expected = {row["env_steps"]: row for row in rows(whole) if "train/loss/td" in row}
    assert len(expected) > 5
    assert {row["env_steps"]: row for row in rows(part) if "train/loss/td" in row} == expected
    assert (whole / "report.html").is_file()
    assert json.loads((whole / "summary.json").read_text())["eval/episodes"] == 2


def test_continuous_actions_are_refused(tmp_path: Path) -> None:
    """Before the first step, with a message that says what DQN needs."""
    with pytest.raises(ConfigError, match="one discrete action"):
        run_training(["+experiment=dqn", "environment.id=Pendulum-v1", *QUIET, f"run_root={tmp_path}"])
