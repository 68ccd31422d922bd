"""What the user types wins: budgets, offline phases and evaluations; and the plan that says how many updates come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.overrides import QUIET, TINY_DREAMER

from rl_lab.data_sources.base import Wait
from rl_lab.experiment.config import compose
from rl_lab.experiment.train import run_training
from rl_lab.orchestration.expectation import expected_updates
from rl_lab.orchestration.phases import PhaseNames, parse_phases

TDMPC2 = "+experiment=tdmpc2_cartpole"  # 20,000 env steps: 500 random ones, 500 updates offline, then both
ROLLOUT = Wait(32, each_time=True)
NAMES = PhaseNames(update_hooks=("update",), default_ratio=0.5)


def durations(*overrides: str) -> list[int]:
    """The durations of TD-MPC2's three phases: env steps, updates, env steps."""
    seed, pretrain, train = compose([TDMPC2, *overrides]).training.phases
    return [seed.duration_steps, pretrain.duration_updates, train.duration_steps]


def test_a_shorter_budget_shortens_what_does_not_collect() -> None:
    """In proportion; a longer one, and phases that were typed, change nothing."""
    assert durations()[1] == 500
    assert durations("training.total_timesteps=2_000")[1] == 50
    assert durations("training.total_timesteps=300")[1] == 8
    assert durations("training.total_timesteps=1")[1] == 1
    assert durations("training.total_timesteps=40_000")[1] == 500
    assert durations("training.total_timesteps=300", "training.phases.1.duration_updates=77")[1] == 77


def test_a_duration_with_its_unit_is_shortened_too() -> None:
    """`duration: 1_000_updates` as well as `duration_updates: 1_000`."""
    phases = compose(["+experiment=tdmpc2_curriculum"]).training
    short = compose(["+experiment=tdmpc2_curriculum", f"training.total_timesteps={phases.total_timesteps // 10}"])
    assert [phase.duration for phase in short.training.phases[1:3]] == ["100_updates", "100_updates"]


def test_typed_evaluations_reach_the_phases() -> None:
    """An interval in an experiment's phase gives way to the one that was typed, and so does the number at the end."""
    assert compose([TDMPC2]).training.phases[2].workflow_hooks[2] == {"evaluate": {"every": 500}}
    typed = compose([TDMPC2, "evaluation.every=250", "evaluation.episodes=3"])
    assert typed.training.phases[2].workflow_hooks[2] == "evaluate"
    assert (typed.evaluation.every, typed.evaluation.final_episodes) == (250, None)
    both = compose([TDMPC2, "evaluation.episodes=3", "evaluation.final_episodes=7"])
    assert both.evaluation.final_episodes == 7


TWICE = ["collect", {"update": {"times": 2}}]
SIX_TIMES = ["collect", {"update": {"times": 6}}]


@pytest.mark.parametrize(
    ("phases", "wait", "expected"),
    [
        (None, Wait(), {"train": 50}),
        (None, Wait(40), {"train": 30}),
        (None, Wait(200), {"train": 0}),
        ([{"name": "a", "duration_steps": 60, "workflow_hooks": TWICE}], Wait(), {"a": 60}),
        ([{"name": "a", "duration": "7_updates", "workflow_hooks": ["collect", "update"]}], Wait(), {"a": 7}),
        (
            [
                {"name": "fill", "type": "warmup", "duration_steps": 30},
                {"name": "fit", "type": "offline", "duration_updates": 9},
                {"name": "go", "duration_steps": 500, "workflow_hooks": ["collect", {"update": {"every": 10}}]},
            ],
            Wait(),
            {"fill": 0, "fit": 9, "go": 7},
        ),
        ([{"name": "a", "duration_steps": 99, "workflow_hooks": SIX_TIMES}], ROLLOUT, {"a": 18}),
    ],
)
def test_updates_are_reckoned(phases: list | None, wait: Wait, expected: dict[str, int]) -> None:
    """By hand: 100 env steps in two environments."""
    parsed = parse_phases(phases, NAMES)
    assert expected_updates(parsed, total_timesteps=100, num_envs=2, waits={"replay": wait}) == expected


def test_the_plan_agrees_with_the_run(dreamer_run: Path) -> None:
    """The number of updates that it announces is about the number that the run makes."""
    line = next(line for line in (dreamer_run / "plan.txt").read_text().splitlines() if line.startswith("Updates"))
    made = json.loads((dreamer_run / "summary.json").read_text())["updates"]
    assert made > 0
    assert made <= int(line.split()[2].replace(",", "").rstrip(":")) <= 1.6 * made  # it waits for a whole batch


@pytest.mark.parametrize("limit", ["null", "30"])
def test_episodes_without_a_time_limit_are_told(tmp_path: Path, limit: str) -> None:
    """A greedy agent may never end such an episode, and its evaluation neither."""
    overrides = ["+experiment=random", "environment.id=CartPole-v1", "training.total_timesteps=20", *QUIET]
    folder = run_training([*overrides, f"environment.time_limit={limit}", f"run_root={tmp_path}"]).folder
    assert ("environment.time_limit=N" in (folder / "plan.txt").read_text()) == (limit == "null")


def test_a_run_that_will_learn_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before it starts, at its end, and in its report."""
    overrides = [*TINY_DREAMER, *QUIET, "data_sources.replay.start_after=5000", "training.total_timesteps=40"]
    folder = run_training([*overrides, f"run_root={tmp_path}"]).folder
    assert "Updates   NONE: 40 env steps end before the first update" in (folder / "plan.txt").read_text()
    assert "the agent is untrained" in capsys.readouterr().out
    report = (folder / "report.html").read_text()
    assert "untrained because the run made no update" in report
    assert "The trained agent" not in report
