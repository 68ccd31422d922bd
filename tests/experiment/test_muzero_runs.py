"""Whole runs of MuZero: exact resume, and other planners in its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.overrides import QUIET
from tests.runs import run_in_parts

from rl_lab.experiment.agent import load_run
from rl_lab.experiment.build import make_eval_envs
from rl_lab.experiment.evaluate import evaluate_run
from rl_lab.experiment.planning import play_planned
from rl_lab.experiment.train import run_training
from rl_lab.metrics.planning import write_planning
from rl_lab.metrics.search_trees import tree_layout

TINY = [
    "+experiment=muzero_cartpole", "environment.num_envs=2", "workflow.batch_size=4", "workflow.td_steps=3",
    "workflow.unroll=2", "workflow.reanalyze=0.5", "controllers.planner.simulations=3",
    "components.representation.units=8", "data_sources.replay.start_after=30",
    "data_source@data_sources.replay=prioritized_replay", "data_sources.replay.beta_records=100",
    "evaluation.episodes=2", "evaluation.final_episodes=2",
    "evaluation.imagination=false", *QUIET, "logging.every=20",
]  # fmt: skip


def learned(run: Path) -> dict[int, dict]:
    """Rows of metrics about learning, by env step, without the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if k != "wall_s" and not k.startswith("time/")} for row in rows]
    return {row["env_steps"]: row for row in kept if "train/loss/total" in row}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_in_parts([*TINY, f"run_root={tmp_path_factory.mktemp('parts')}"], first=80, total=120)


def test_a_resumed_run_equals_the_run_that_was_never_stopped(run: Path, tmp_path: Path) -> None:
    """With priorities and reanalysis, which write to the replay in every update."""
    whole = run_training([*TINY, "training.total_timesteps=120", f"run_root={tmp_path}"]).folder
    expected = learned(whole)
    assert len(expected) > 2
    assert learned(run) == expected


def test_any_planner_plans_in_muzeros_model(run: Path) -> None:
    """MCTS with other settings, and one that knows nothing of trees."""
    gumbel = evaluate_run(run, episodes=2, planner="mcts", planner_settings=["rule=gumbel", "simulations=4"])
    assert len(gumbel.result.returns) == 2
    small = ["horizon=2", "samples=4", "elites=2", "iterations=1"]
    assert len(evaluate_run(run, episodes=2, planner="cem", planner_settings=small).result.returns) == 2


def test_the_pictures_of_a_search_are_in_the_report(run: Path, tmp_path: Path) -> None:
    """Trees with every node once, policies, values; the report shows them."""
    loaded = load_run(run)
    envs = make_eval_envs(loaded.settings, "final", render=False, episodes=1)
    try:
        episode = play_planned(loaded.workflow, envs)
    finally:
        envs.close()
    tree = episode.searches[0]
    assert tree.visits[0] == 4
    assert tree.parent.tolist()[0] == -1
    assert tree.policy.sum() == pytest.approx(1.0)
    place, depth = tree_layout(tree.parent)
    assert depth[tree.line].tolist() == list(range(len(tree.line)))
    assert len({(x, y) for x, y in zip(place.tolist(), depth.tolist(), strict=True)}) == 4
    assert len(episode.discounted) == len(episode.expected)
    names = {path.name for path in write_planning(episode, tmp_path / "planning")}
    assert {"trees.png", "calibration.png", "values.png"} <= names


def test_tic_tac_toe_is_learned_by_both_sides_and_scored_against_an_opponent(tmp_path: Path) -> None:
    """Self-play in training; in evaluations the agent's moves alone are episodes of at most five decisions."""
    tiny = [
        "+experiment=muzero_tictactoe", "environment.num_envs=2", "workflow.batch_size=4", *QUIET,
        "controllers.planner.simulations=3", "data_sources.replay.start_after=30", "training.total_timesteps=60",
        "evaluation.episodes=4", "evaluation.final_episodes=4", "evaluation.imagination=false",
    ]  # fmt: skip
    folder = run_training([*tiny, f"run_root={tmp_path}"]).folder
    summary = json.loads((folder / "summary.json").read_text())
    assert -1.0 <= summary["eval/return_mean"] <= 0.0  # nobody beats the perfect player
    assert summary["eval/length_mean"] <= 5.0
