"""From moves in an environment to MuZero's targets, through collection and replay."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.overrides import QUIET

from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.records import SequenceBatch, split_observation
from rl_lab.workflows.context import PhaseView

TINY = [
    "+experiment=muzero_tictactoe",
    "environment.kwargs.random_moves=0",
    "components.representation.units=8",
    "controllers.planner.simulations=2",
    *QUIET,
]
FIRST_WINS, SECOND_WINS, DRAW = [0, 3, 1, 4, 2], [0, 3, 1, 4, 8, 5], [0, 1, 2, 4, 3, 5, 7, 6, 8]
GAMES = [FIRST_WINS, SECOND_WINS, DRAW, DRAW, SECOND_WINS, FIRST_WINS, DRAW, FIRST_WINS]


def targets_of_games(folder: Path, num_envs: int) -> list[SimpleNamespace]:
    """Targets of all windows of each of GAMES, which are played by that many environments in turn."""
    overrides = [*TINY, f"environment.num_envs={num_envs}", f"run_root={folder}"]
    experiment = build(prepare(overrides), RunDirectory.create(folder, f"games{num_envs}", 0))
    workflow, source = experiment.orchestrator.workflow, experiment.orchestrator.context.data_sources["replay"]
    # Each environment plays its share, then draws until all windows are long enough.
    moves = [chain.from_iterable(GAMES[number::num_envs] + [DRAW] * 16) for number in range(num_envs)]
    workflow.explore = lambda observation, state, phase: (np.array([[next(own)] for own in moves], np.int32), state)
    for _ in range(sum(map(len, GAMES)) // num_envs + 40):
        for block in workflow.collect_step(0, phase=PhaseView("train", "online", "replay")).blocks:
            source.add(block)
    names = ["observation.board", "observation.action_mask", "action", "reward", "is_first", "is_last", "is_terminal"]
    names += workflow.record_specs()
    fields = source.scan(start=0, count=10_000, fields=names).fields
    starts = np.flatnonzero(fields["is_first"])
    found = {}
    for number in range(num_envs):  # streams come one after another
        own = starts[number * len(starts) // num_envs :][: len(GAMES) // num_envs]
        found |= {number + num_envs * game: windows(workflow, fields, start) for game, start in enumerate(own)}
    experiment.orchestrator.close()
    return [found[game] for game in range(len(GAMES))]


def windows(workflow, fields: dict[str, np.ndarray], start: int) -> SimpleNamespace:
    """The targets of the windows that begin at each record of a game."""
    records = int(np.argmax(fields["is_last"][start:])) + 1
    rows = start + np.arange(records)[:, None] + np.arange(workflow.batch_spec().window)
    observation, rest = split_observation({name: torch.as_tensor(value[rows]) for name, value in fields.items()})
    extras = {name: rest.pop(name) for name in workflow.record_specs()}
    targets, _ = workflow.target_maker.make(SequenceBatch(observation=observation, extras=extras, **rest))
    return SimpleNamespace(targets=targets, observation=observation)


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> list[SimpleNamespace]:
    return targets_of_games(tmp_path_factory.mktemp("one"), 1)


def test_values_of_a_game_are_its_outcome_for_the_player_to_move(games: list[SimpleNamespace]) -> None:
    """1 for the winner, -1 for the loser, in turns up to the end, then 0; the reward is that of the last move."""
    for moves, game in zip(GAMES, games, strict=True):
        won, count = 0.0 if moves == DRAW else 1.0, len(moves)
        outcome = [won * (-1.0) ** (count - 1 - move) for move in range(count)] + [0.0]
        assert game.targets.value[:, 0].tolist() == outcome
        steps = [*[0.0] * (count - 1), won]
        decided = game.targets.masks.decided[:, 0].tolist()
        assert decided == [1.0] * count + [0.0]
        assert game.targets.reward[:count, 0].tolist() == steps
        # Each window sees the same future, one move later, and nothing of the next game.
        for start, window in enumerate(game.targets.value):
            expected = (outcome[start:] + [0.0] * len(window))[: len(window)]
            assert window.tolist() == expected


def test_one_environment_and_eight_give_the_same_targets(games: list[SimpleNamespace], tmp_path: Path) -> None:
    for one, other in zip(games, targets_of_games(tmp_path, 8), strict=True):
        assert torch.equal(one.observation["board"][:, 0], other.observation["board"][:, 0])
        for name in ("value", "policy"):
            assert torch.equal(getattr(one.targets, name), getattr(other.targets, name))
        for mine, theirs in zip(one.targets.masks, other.targets.masks, strict=True):
            assert torch.equal(mine, theirs)
