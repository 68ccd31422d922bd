"""Pictures of what a planner considered."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.workflows.test_mpc import make_mpc

from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.diffusion import DiffusionPlanner
from rl_lab.components.planners.icem import ICEM
from rl_lab.environments import make_vector_env
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.experiment.planning import can_plan, play_planned
from rl_lab.metrics.planning import _fan, write_planning
from rl_lab.metrics.report import write_report
from rl_lab.records import PlannedEpisode
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.mpc import MPC


@pytest.fixture(scope="module")
def episode() -> PlannedEpisode:
    """Thirty decisions on a pendulum, exactly as evaluation would make them."""
    workflow = make_mpc("Pendulum-v1", ICEM, horizon=8, samples=16, elites=4, iterations=1)
    settings = EnvironmentSettings(id="Pendulum-v1", time_limit=30, backend="sync")
    envs = make_vector_env(settings, seed=0, num_envs=1, stream="final")
    try:
        return play_planned(workflow, envs)
    finally:
        envs.close()


def test_a_perfect_model_keeps_its_word(episode):
    """With the true equations the path that a plan begins with is the one that is taken, for the step it is followed;
    what was promised comes about, as plans only get better."""
    assert len(episode.expected) == len(episode.received) == 30
    for decision in episode.decisions:
        np.testing.assert_allclose(decision.chosen[:2], decision.real[:2], atol=1e-4)
        assert decision.paths.shape[1:] == (9, 3)
        assert decision.is_elite.sum() == 4
    known = np.isfinite(episode.received)
    assert known.sum() == 30 - 8 + 1  # the last ones were cut off by the time limit
    assert np.corrcoef(episode.received[known], episode.expected[known])[0, 1] > 0.8


def test_the_pictures_are_in_the_report(episode, tmp_path):
    """plans.png, values.png and the numbers; the report shows them and says how to read them."""
    paths = write_planning(episode, tmp_path / "planning")
    assert [path.name for path in paths] == ["plans.png", "values.png", "planning.json"]
    numbers = json.loads(paths[-1].read_text())
    assert numbers["decisions"] == 30
    assert numbers["expected_mean"] < 0.0
    page = write_report(tmp_path).read_text()
    assert "What the planner considered" in page
    assert "On average a plan promised" in page


def test_a_model_without_observations_still_has_its_promises(episode, tmp_path):
    """Latent models show values alone."""
    bare = PlannedEpisode(8, True, episode.expected, np.full(30, np.nan))
    assert [path.name for path in write_planning(bare, tmp_path)] == ["values.png", "planning.json"]
    assert json.loads((tmp_path / "planning.json").read_text())["received_mean"] is None


def test_only_workflows_that_plan_are_asked():
    """A workflow says so by its `plan`."""
    assert can_plan(make_mpc("Pendulum-v1", CEM))
    assert not can_plan(Workflow())
    assert issubclass(MPC, Workflow)


def test_particles_are_drawn_by_their_weights(tmp_path):
    """The decisions of a diffusion planner carry weights, effective samples and the price in nats; the heaviest line is
    drawn last and thickest."""
    workflow = make_mpc("Pendulum-v1", DiffusionPlanner, horizon=4, samples=12, steps=2, scored=1, beta=5.0)
    settings = EnvironmentSettings(id="Pendulum-v1", time_limit=8, backend="sync")
    envs = make_vector_env(settings, seed=0, num_envs=1, stream="final")
    try:
        episode = play_planned(workflow, envs)
    finally:
        envs.close()
    decision = episode.decisions[0]
    assert decision.weight.shape == (len(decision.paths),)
    assert 0.0 < decision.weight.sum() <= 1.0 + 1e-5
    assert "of 12 effective" in decision.note
    assert "nats from the prior" in decision.note
    *lines, chosen, _ = _fan(decision, 0)
    assert len(lines) == len(decision.paths)
    assert lines[-1].width == max(line.width for line in lines)
    np.testing.assert_array_equal(lines[-1].y, decision.paths[decision.weight.argmax(), :, 0])
    assert chosen.label == "the chosen plan"
    assert write_planning(episode, tmp_path)[0].name == "plans.png"
