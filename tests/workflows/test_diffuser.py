"""Diffuser: what is known of a plan stays known, the critic's returns, who follows a plan, and whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.overrides import QUIET
from tests.packaged import adjusted
from tests.runs import assert_goes_on_exactly

from rl_lab.components.diffusion.guidance import Inpainting
from rl_lab.components.diffusion.limits import LimitsNormalizer
from rl_lab.components.diffusion.schedule import NoiseSchedule
from rl_lab.components.diffusion.trajectories import TrajectoryModel
from rl_lab.components.diffusion.trajectory_value import TrajectoryValue, ValueGuidance
from rl_lab.errors import ConfigError
from rl_lab.experiment.agent import load_run
from rl_lab.experiment.evaluate import evaluate_run
from rl_lab.experiment.train import run_training
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.diffuser import RETURN, Diffuser, waypoint

OBSERVATION = {
    "observation": ObservationSpec("vector", (4,), "float32"),
    "desired_goal": ObservationSpec("vector", (2,), "float32"),
}
ACTION = ActionSpec("continuous", (2,))
TINY_NET = "components.trajectories.network_settings={widths: [8, 16], level_embedding: 8, scale: false}"
TINY = [
    TINY_NET, "components.value.widths=[8, 32]", "components.value.level_embedding=8",
    "components.trajectories.levels=4", "workflow.candidates=2", "workflow.batch_size=4", "evaluation.episodes=1",
    "evaluation.final_episodes=1", *QUIET,
]  # fmt: skip
PENDULUM = [
    "+experiment=diffuser", "environment.id=Pendulum-v1", "environment.time_limit=12", *TINY,
    "data_sources.demos={path: null, expert: {name: pendulum, episodes: 3}}", "components.trajectories.horizon=4",
    "training.phases.1.duration_updates=6",
]  # fmt: skip


def make_trajectories(**further):
    given = {
        "observation": OBSERVATION, "action": ACTION, "goal_key": "desired_goal", "horizon": 4, "stride": 3,
        "levels": 6, "network_settings": {"widths": [8, 16], "level_embedding": 8, "scale": False},
    }  # fmt: skip
    return TrajectoryModel(**adjusted("components/trajectories/diffusion", **given | further))


def make_value(dim: int = 6, horizon: int = 4) -> TrajectoryValue:
    return TrajectoryValue(dim=dim, horizon=horizon, widths=(8, 16), level_embedding=8, groups=4)


def test_the_value_network_of_the_paper_has_its_size() -> None:
    """Hopper: 14 channels, 32 rows; the published network has 2.29 million parameters."""
    value = TrajectoryValue(dim=14, horizon=32, widths=(32, 64, 128, 256), level_embedding=32)
    assert sum(parameter.numel() for parameter in value.parameters()) == 2_296_385


def test_limits_are_minus_one_and_one_and_constants_are_zero() -> None:
    normalizer = LimitsNormalizer(3)
    normalizer.fit(torch.tensor([-2.0, 0.0, 5.0]), torch.tensor([2.0, 10.0, 5.0]))
    unit = normalizer(torch.tensor([[-2.0, 10.0, 5.0], [0.0, 5.0, 5.0]]))
    assert unit.tolist() == [[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(normalizer.inverse(unit), torch.tensor([[-2.0, 10.0, 5.0], [0.0, 5.0, 5.0]]))
    normalizer.fit(torch.zeros(3), torch.ones(3))  # a second time changes nothing
    assert normalizer.high.tolist() == [2.0, 10.0, 5.0]


def test_rows_lie_a_stride_apart_and_actions_stand_first() -> None:
    model = make_trajectories()
    states = torch.arange(2 * 11 * 4).view(2, 11, 4).float() / 100
    action = torch.rand(2, 11, 2)
    rows = model.rows({"observation": states, "desired_goal": torch.zeros(2, 11, 2)}, action)
    assert model.span == 9
    assert rows.shape == (2, 4, 6)
    torch.testing.assert_close(rows[:, :, :2], action[:, [0, 3, 6, 9]])
    torch.testing.assert_close(rows[:, :, 2:], states[:, [0, 3, 6, 9]])


@pytest.mark.parametrize("scale", [0.0, 5.0])
def test_start_and_goal_stay_where_they_are(scale: float) -> None:
    """At every level, under guidance too: the first state is the present one, the last is the goal at rest."""
    torch.manual_seed(0)
    model, value = make_trajectories(), make_value()
    observation = {"observation": torch.rand(3, 4) - 0.5, "desired_goal": torch.rand(3, 2) - 0.5}
    seen: list[torch.Tensor] = []

    class Watched(ValueGuidance):
        def before(self, x, level):
            x = super().before(x, level)
            seen.append(x)
            return x

    guidance = Watched(model.inpainting(observation), value, model.model.schedule, scale=scale, steps=2, stop=1)
    seen.append(model.draw(guidance, 3, sampler="ddpm", steps=None, temperature=1.0))
    assert len(seen) == 7
    for x in seen:
        torch.testing.assert_close(x[:, 0, 2:], observation["observation"])
        torch.testing.assert_close(x[:, -1, 2:], torch.cat([observation["desired_goal"], torch.zeros(3, 2)], 1))


def test_guidance_climbs_the_value_and_leaves_the_last_levels_alone() -> None:
    torch.manual_seed(0)
    value, schedule = make_value(), NoiseSchedule(levels=10)
    nothing = Inpainting(torch.zeros(5, 4, 6), torch.zeros(4, 6, dtype=torch.bool))
    guidance = ValueGuidance(nothing, value, schedule, scale=2.0, steps=1, stop=3)
    x = torch.randn(5, 4, 6)
    levels = torch.full((5,), 6)
    moved = guidance.before(x, 6)
    at = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(at, levels).sum(), at)
    variance = schedule.ddpm_posterior(x, x, 6, 5).std ** 2
    torch.testing.assert_close(moved, x + 2.0 * variance * gradient)
    assert (value(moved, levels) > value(x, levels)).all()
    assert guidance.before(x, 2) is x


def test_known_entries_do_not_count_in_the_loss_and_the_first_action_counts_more() -> None:
    model = make_trajectories(action_weight=10.0)
    called = {}
    model.model.loss = lambda rows, *, weight, known: called.update(weight=weight, known=known) or rows.sum()
    model.loss(torch.zeros(2, 4, 6))
    assert called["known"].sum() == 8
    assert called["known"][0].tolist() == called["known"][3].tolist() == [False] * 2 + [True] * 4
    assert called["weight"][0].tolist() == [10.0] * 2 + [1.0] * 4
    assert (called["weight"][1:] == 1.0).all()


def test_waypoints_between_rows() -> None:
    """A fractional row lies between its neighbours; after the last row the plan stands still."""
    states = torch.tensor([[[0.0], [1.0], [3.0]], [[5.0], [6.0], [7.0]]])
    assert waypoint(states, torch.tensor([0.5, 1.25])).flatten().tolist() == [0.5, 6.25]
    assert waypoint(states, torch.tensor([2.0, 9.0])).flatten().tolist() == [3.0, 7.0]


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_training([*PENDULUM, f"run_root={tmp_path_factory.mktemp('runs')}"]).folder


def test_a_run_on_any_dataset(pendulum: Path) -> None:
    """The critic, the diffusion model and the inverse dynamics learn; the agent loads and plays as it did."""
    rows = [json.loads(line) for line in (pendulum / "metrics.jsonl").read_text().splitlines()]
    losses = {name.rpartition("/")[2] for row in rows for name in row if "loss/" in name}
    assert losses >= {"trajectories", "value", "inverse_dynamics"}
    score = json.loads((pendulum / "summary.json").read_text())["eval/return_mean"]
    assert evaluate_run(pendulum).result.return_mean == score
    pictures = json.loads((pendulum / "imagination" / "illustrations.json").read_text())
    assert [entry["picture"] for entry in pictures] == ["denoising.png", "candidates.png"]


def test_returns_to_the_end_of_an_episode(pendulum: Path, tmp_path: Path) -> None:
    """By hand: the return from a record on counts the rewards after it, discounted, up to its own episode's end."""
    workflow = load_run(pendulum).workflow
    rewards = np.array([0.0, 1.0, 2.0, 0.0, 4.0, 8.0], np.float32)
    written = {}

    class Source:
        def __len__(self):
            return 6

        def scan(self, **asked):
            is_last = np.array([False, False, True, False, False, True])
            fields = {"reward": rewards, "is_last": is_last, "is_terminal": np.array([False] * 5 + [True])}
            return type("Scan", (), {"fields": fields, "indices": np.arange(6)})

        def update(self, indices, fields):
            written.update(fields)

    workflow.discount, workflow.terminal_penalty = 0.5, -100.0
    workflow.context.data_sources["made"] = Source()
    workflow.label_returns(phase=type("Phase", (), {"data_source": "made"}))
    expected = [1.0 + 0.5 * 2.0, 2.0, 0.0, 4.0 + 0.5 * (8.0 - 100.0), 8.0 - 100.0, 0.0]
    np.testing.assert_allclose(written[RETURN], expected)


def test_the_critic_counts_the_rewards_within_a_window(pendulum: Path) -> None:
    """`returns: window`: the rewards that followed each record but the last, discounted for each env step."""
    workflow = load_run(pendulum).workflow
    workflow.returns, workflow.discount, workflow.inverse = "window", 0.5, None
    seen = {}
    workflow.value.loss = lambda schedule, clean, rows, returns: seen.update(returns=returns) or returns.sum()
    reward = torch.tensor([[9.0, 1.0, 2.0, 4.0, 9.0]])
    no = torch.zeros(1, 5, dtype=torch.bool)
    batch = SequenceBatch({"vector": torch.zeros(1, 5, 3)}, torch.zeros(1, 5, 1), reward, no, no, no)
    workflow.controller_losses(batch, torch.zeros(1, 4, 4))
    assert seen["returns"].tolist() == [1.0 + 0.5 * 2.0 + 0.25 * 4.0]


def test_a_plan_is_followed_until_it_is_over(pendulum: Path) -> None:
    """The memory keeps the plan in the environment's units; environments whose plan is over get another one."""
    workflow = load_run(pendulum).workflow
    workflow.replan_every = None
    observation = {"vector": np.array([[1.0, 0.0, 0.1], [0.0, 1.0, -0.2]], np.float32)}
    action, first = workflow.act(observation, workflow.initial_state(2))
    assert action.shape == (2, 1)
    assert (np.abs(action) <= 1.0).all()
    assert first["age"].tolist() == [1, 1]
    torch.testing.assert_close(first["plan"][:, 0, 1:], torch.from_numpy(observation["vector"]), atol=1e-5, rtol=1e-5)
    _, second = workflow.act(observation, first)
    torch.testing.assert_close(second["plan"], first["plan"])
    over = second | {"age": torch.tensor([3, 2])}
    _, third = workflow.act(observation, over)
    assert third["age"].tolist() == [1, 3]
    assert not torch.equal(third["plan"][0], first["plan"][0])
    torch.testing.assert_close(third["plan"][1], first["plan"][1])
    cleared = workflow.reset_state(third, np.array([False, True]))
    assert cleared["planned"].tolist() == [1.0, 0.0]


def test_the_critic_chooses_among_the_candidates(pendulum: Path) -> None:
    workflow = load_run(pendulum).workflow
    workflow.candidates = 5
    drawn = workflow.draw({"vector": torch.rand(3, 3)})
    assert drawn.rows.shape == (3, 5, 4, 4)
    assert torch.equal(drawn.chosen, drawn.value.argmax(1))
    workflow.select = "first"
    assert workflow.draw({"vector": torch.rand(3, 3)}).chosen.tolist() == [0, 0, 0]


def test_a_pd_controller_heads_for_the_next_state(pendulum: Path) -> None:
    """a = stiffness·(position' - position) + damping·(velocity' - velocity)."""
    workflow = load_run(pendulum).workflow
    workflow.trajectories, workflow.execution = make_trajectories(), "pd"
    workflow.stiffness, workflow.damping = 2.0, 0.5
    plan = torch.zeros(1, 4, 6)
    plan[0, 1, 2:] = torch.tensor([3.0, 6.0, 9.0, 0.0])
    state = torch.tensor([[0.5, 1.0, 1.0, 2.0]])
    action = workflow._follow(plan, torch.tensor([0]), state)  # a third of the way to row 1
    torch.testing.assert_close(action, torch.tensor([[2.0 * 0.5 + 0.5 * 2.0, 2.0 * 1.0 - 0.5 * 2.0]]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["workflow.execution=pd"], "execution=pd needs states of positions"),
        (["workflow.execution=actions", "components.trajectories.stride=2"], "lie 2 env steps apart"),
        (["components.trajectories.goal_key=desired"], "'desired' is not a vector of the observation"),
        (["components.trajectories.horizon=5"], "horizon=5"),
        (["components.value.widths=[8, 16]"], "can be divided by 32"),
        (["components.trajectories.horizon=400"], "needs windows of 400 records"),
        (["workflow.candidates=0"], "candidates=0"),
        (["workflow.replan_every=0"], "replan_every=0"),
        (["training.phases.0.workflow_hooks=[update_world_model]"], "label_returns"),
    ],
)
def test_what_does_not_fit_is_told_before_the_first_update(overrides: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        run_training([*PENDULUM, *overrides, f"run_root={tmp_path}"])


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    """The labelled returns, the averages and the limits are in the checkpoint: the metrics are those of a whole run."""
    base = [*PENDULUM, "logging.every=2", "checkpoint.every=3", "evaluation.imagination=false"]
    assert_goes_on_exactly(base, Diffuser, "update_controller", killed_at=3, root=tmp_path)
