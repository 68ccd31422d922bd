"""The benchmark that puts every planner on every model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from benchmarks.diffusion_planner import BUDGETS, HORIZON, planned
from benchmarks.planner_matrix import MODELS, OWN, PLANNERS, Model, cell, settings
from hydra.utils import get_class
from omegaconf import OmegaConf

from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.errors import ConfigError
from rl_lab.experiment.config import compose_option
from rl_lab.orchestration.run_directory import RunDirectory

RESULT = Path(__file__).resolve().parents[2] / "results" / "matrix" / "planners.json"
ACTIONS = {"CartPole-v1": ActionLayout(0, (2,)), "Pendulum-v1": ActionLayout(1)}


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_settings_of_every_cell_exist(planner: str) -> None:
    """The planner can be built for each model's actions, but for gradients of discrete ones."""
    node = OmegaConf.to_container(compose_option("controllers/planners", planner), resolve=False)
    assert isinstance(node, dict)
    target = get_class(node.pop("_target_"))
    for model in MODELS:
        given = yaml.safe_load("\n".join(settings(model, planner)).replace("=", ": "))
        assert set(given) <= set(node)
        arguments = node | given | {"action": ACTIONS[model.environment]}
        if planner == "gradient" and model.environment == "CartPole-v1":
            with pytest.raises(ConfigError, match="continuous"):
                target(**arguments)
        else:
            made = target(**arguments)
            assert planner == "mcts" or made.horizon == model.settings["horizon"]  # a tree has no horizon


def test_a_cell_is_a_score_or_a_reason(dreamer_run: Path) -> None:
    """A planner that cannot plan in a model has the reason in its cell, one sentence; the agent itself has a score."""
    model, run = Model("CartPole-v1", "RSSM", "dreamer_v3", {"horizon": 2}), RunDirectory(dreamer_run)
    assert "continuous actions" in cell(model, run, "gradient", 1)["reason"]
    assert cell(model, run, OWN, 1)["return_mean"] > 0.0


def test_the_recorded_matrix_has_no_empty_cell() -> None:
    """Every planner and what the agent does itself, in every model, on both tasks."""
    cells = json.loads(RESULT.read_text())["cells"]
    found = {(entry["environment"], entry["model"], entry["planner"]): entry for entry in cells}
    assert set(found) == {(model.environment, model.name, name) for model in MODELS for name in (OWN, *PLANNERS)}
    for entry in cells:
        assert ("reason" in entry) != ("return_mean" in entry and entry["episodes"] >= 10)


@pytest.mark.parametrize(("samples", "rounds"), BUDGETS)
def test_planners_beside_the_diffusion_planner_take_as_many_model_steps(samples: int, rounds: int) -> None:
    """The settings exist, and candidates × rollouts of each × horizon is the same for all planners of a budget."""
    for planner, chosen in planned(samples, rounds):
        assert planner is not None
        node = OmegaConf.to_container(compose_option("controllers/planners", planner), resolve=False)
        assert isinstance(node, dict)
        assert set(chosen) <= set(node)
        given = node | chosen
        rollouts = given["scored"] if planner == "diffusion" else given["iterations"]
        assert given["samples"] * rollouts * given["horizon"] == samples * rounds * HORIZON
