"""Legal-action masks in DQN and PPO."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.overrides import QUIET
from tests.workflows.dqn_parts import VECTOR, make_dqn

from rl_lab.components.actions import mask_illegal
from rl_lab.experiment.train import run_training
from rl_lab.specs import ActionSpec, ObservationSpec

MASKED = ActionSpec("discrete", (1,), (3,), "action_mask")
SEEN = VECTOR | {"action_mask": ObservationSpec("vector", (3,), "float32")}


def test_what_is_illegal_has_the_lowest_score() -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    scores = mask_illegal(torch.zeros(2, 3), {"action_mask": mask}, MASKED)
    assert (scores[0] < -1e30).tolist() == [False, True, False]
    assert scores[1].tolist() == [0.0, 0.0, 0.0]


def test_dqn_neither_takes_nor_values_illegal_actions() -> None:
    """Greedy or not; and the bootstrap is the value of the best legal action."""
    workflow = make_dqn(SEEN, action=MASKED, epsilon_start=1.0)
    mask = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 1]], np.float32)
    seen = {"vector": np.zeros((3, 4), np.float32), "action_mask": mask}
    for mode in ("train", "eval"):
        action, _ = workflow.act(seen, workflow.initial_state(3), mode=mode)
        assert action[:, 0].tolist() == [1, 0, 2]
    tensors = {key: torch.from_numpy(value) for key, value in seen.items()}
    with torch.no_grad():
        values = workflow.target.network(tensors)
        expected = values[torch.arange(3), torch.tensor([1, 0, 2])]
        torch.testing.assert_close(workflow.bootstrap_value(tensors), expected)


@pytest.mark.parametrize(
    ("experiment", "extra"),
    [
        ("ppo", ["data_sources.stream.length=16", "workflow.batch_size=16"]),
        ("dqn", ["data_sources.replay.start_after=20", "workflow.batch_size=8"]),
    ],
)
def test_runs_against_an_opponent_never_lose_by_an_illegal_move(experiment: str, extra: list[str], tmp_path) -> None:
    """An illegal move would end a game of tic-tac-toe before three stones of a side could stand in a row."""
    outcome = run_training([
        f"+experiment={experiment}", "environment.id=rl_lab/TicTacToe-v0", "environment.kwargs={opponent: random}",
        "environment.num_envs=2", "training.total_timesteps=96", "evaluation.episodes=6", "evaluation.num_envs=2",
        f"run_root={tmp_path}", "evaluation.imagination=false", *extra, *QUIET,
    ])  # fmt: skip
    assert outcome.code == 0
    rows = (outcome.folder / "metrics.jsonl").read_text()
    assert '"collect/episode_length": 1.0' not in rows
    assert '"collect/episode_length": 2.0' not in rows
