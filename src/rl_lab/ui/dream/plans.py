"""The candidates of a planner at one moment, as lines to draw over the dream, and a picture of where the plan leads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.components.planners.base import Plan, Planner
from rl_lab.components.planners.mcts import SearchPlan
from rl_lab.simulation.simulator import ModelState
from rl_lab.ui.dream.model import DreamModel
from rl_lab.ui.dream.painter import Painter, packed
from rl_lab.ui.dream.tape import Moment
from rl_lab.ui.dream.worker import Message

CANDIDATES, ELITES, ENTRIES, TREE_NODES = 24, 8, 8, 80
GHOSTS = 4  # frames of the chosen plan that are laid over each other


def plan_message(model: DreamModel, state: ModelState, moment: Moment, name: str, painter: Painter | None) -> Message:
    """The plan that a planner makes from a state, as a message for the page, with the picture of where it leads."""
    plan, planner = model.plan(state, moment.plan_memory, name)
    description, ghost = describe_plan(model, plan, planner, state, painter)
    header, picture = {"type": "plan", "moment": moment.number, **description}, packed(ghost)
    return (header, []) if picture is None else ({**header, "pictures": {"ghost": picture[0]}}, [picture[1]])


@torch.no_grad()
def describe_plan(
    model: DreamModel, plan: Plan, planner: Planner, state: Any, painter: Painter | None
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Paths of some candidates, some elites and the chosen plan: of every entry of the observation where the model
    shows it, else of the reward that adds up. And a picture of the chosen plan's future, where one can be drawn."""
    elites = plan.elites[0, :ELITES]
    order = plan.returns[0].isfinite().nonzero().flatten()
    others = order[~torch.isin(order, plan.elites[0])]
    others = others[:: max(1, len(others) // CANDIDATES)][:CANDIDATES]
    sequences = torch.cat([plan.actions[:1], plan.candidates[0, elites], plan.candidates[0, others]])
    simulator = planner.simulator
    rollout = simulator.rollout(simulator.spread(state, len(sequences)), sequences)
    kinds = ["chosen", *["elite"] * len(elites), *["candidate"] * len(others)]
    finite = plan.returns[0][order]
    description: dict[str, Any] = {
        "planner": type(planner).__name__,
        "horizon": planner.horizon,
        "expected": float(plan.value[0].nan_to_num()),
        "best": float(finite.max()) if len(finite) else None,
        "worst": float(finite.min()) if len(finite) else None,
        "kinds": kinds,
        "paths": {
            "reward so far": _rounded(torch.cat([torch.zeros(len(kinds), 1), rollout.reward.cpu().cumsum(1)], 1))
        },
        "first_actions": _first_actions(model, sequences),
    }
    if isinstance(plan, SearchPlan):
        description["tree"] = _tree(plan)
    shown = [_vectors(model, one) for one in rollout.states]
    for name in shown[0]:
        description["paths"][name] = _rounded(torch.stack([part[name] for part in shown], 1))
    return description, _ghost(model, rollout.states, painter)


def _tree(plan: SearchPlan) -> dict[str, Any]:
    """The nodes of a search tree that were visited most: parent, action, visits and mean return of the edge to each."""
    tree = plan.search.tree
    root: dict[str, Any] = {
        "parent": None,
        "action": -1,
        "visits": tree.size,
        "value": float(tree.value[0, 0].nan_to_num()),
    }
    nodes, numbers = [root], {0: 0}
    parents, taken = tree.parent[0].tolist(), tree.parent_action[0].tolist()
    edges = [(int(tree.visits[0, parents[node], taken[node]]), node) for node in range(1, tree.size)]
    for visits, node in sorted(edges, key=lambda edge: (-edge[0], edge[1]))[:TREE_NODES]:  # parents before children
        parent, action = parents[node], taken[node]
        if parent not in numbers:
            continue
        numbers[node] = len(nodes)
        value = float(tree.returns[0, parent, action].nan_to_num()) / max(visits, 1)
        nodes.append({"parent": numbers[parent], "action": action, "visits": visits, "value": value})
    return {"nodes": nodes}


def _vectors(model: DreamModel, state: Any) -> dict[str, Tensor]:
    """Entries of the observation's vectors, [rows] by name."""
    if model.decode is None:
        return {}
    found: dict[str, Tensor] = {}
    for key, value in model.decode(state).items():
        if value.ndim == 2:
            found |= {f"{key} {entry}": value[:, entry].float().cpu() for entry in range(min(ENTRIES, value.shape[1]))}
    return found


def _first_actions(model: DreamModel, sequences: Tensor) -> list[Any]:
    return [np.asarray(model.decode_action(row[None])).reshape(-1).tolist() for row in sequences[:, 0]]


def _ghost(model: DreamModel, states: list[Any], painter: Painter | None) -> np.ndarray | None:
    """The chosen plan's frames, later ones fainter, in one picture."""
    if painter is None or model.decode is None:
        return None
    places = np.unique(np.linspace(0, len(states) - 1, GHOSTS + 1).round().astype(int))
    frames = [painter.paint(model.observation(states[place])) for place in places]
    drawn = [frame.astype(np.float32) for frame in frames if frame is not None]
    if len(drawn) < 2:
        return None
    weights = np.array([0.5 ** (0.7 * position) for position in range(len(drawn))])
    blended = sum(weight * frame for weight, frame in zip(weights / weights.sum(), drawn, strict=True))
    return np.asarray(blended).clip(0, 255).astype(np.uint8)


def _rounded(values: Tensor) -> list[list[float]]:
    return [[float(f"{number:.5g}") for number in row] for row in values.nan_to_num().tolist()]
