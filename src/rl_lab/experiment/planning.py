"""Plays a held-out episode and keeps what the planner considered at its decisions, for pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_lab.components.planners.base import Plan, Planner
from rl_lab.components.planners.diffusion import DiffusionPlan
from rl_lab.components.planners.mcts import MCTS, Search, SearchPlan
from rl_lab.environments import make_vector_env
from rl_lab.environments.base import VectorEnv
from rl_lab.experiment.validation import Settings
from rl_lab.metrics.planning import write_planning
from rl_lab.orchestration.randomness import forked_random, get_random_state, set_random_state
from rl_lab.records import PlannedDecision, PlannedEpisode, SearchedDecision
from rl_lab.simulation.simulator import ModelState
from rl_lab.workflows.base import Workflow

MAX_DECISIONS = 100
MAX_SEARCHES = 500  # a tree search is judged by whole episodes
SHOWN_DECISIONS, SHOWN_CANDIDATES, SHOWN_ELITES = 4, 40, 10
SEED_DOMAIN = 0x504C


def can_plan(workflow: Workflow) -> bool:
    return type(workflow).plan is not Workflow.plan and isinstance(getattr(workflow, "planner", None), Planner)


def write_run_planning(workflow: Workflow, settings: Settings, folder: Path, *, seed: int | None = None) -> list[Path]:
    """Play, plan and draw into `folder`/planning; the files."""
    seed = settings.experiment.seed if seed is None else seed
    envs = make_vector_env(settings.environment, seed=seed, num_envs=1, stream="final")
    try:
        with forked_random(SEED_DOMAIN, seed), torch.no_grad():
            episode = play_planned(workflow, envs)
    finally:
        envs.close()
    return write_planning(episode, folder / "planning")


def play_planned(workflow: Workflow, envs: VectorEnv) -> PlannedEpisode:
    """One episode, or its first decisions."""
    planner = workflow.planner  # type: ignore[attr-defined]
    key = _drawn_key(workflow, planner)
    current, state = envs.reset(), workflow.initial_state(1)
    expected, rewards, seen, fans = [], [], [], {}
    searches, network_values = {}, list[float]()
    is_terminal = False
    for step in range(MAX_SEARCHES if isinstance(planner, MCTS) else MAX_DECISIONS):
        before = get_random_state()
        plan, start = workflow.plan(current.observation, state)
        set_random_state(before)  # so that acting makes this very plan
        action, state = workflow.act(current.observation, state, mode="eval")
        expected.append(float(plan.value[0]))
        if isinstance(plan, SearchPlan):
            network_values.append(float(plan.search.prior_value[0]))
            searches[step] = plan.search
        if key is not None:
            seen.append(current.observation[key][0].reshape(-1))
            if step % (MAX_DECISIONS // (2 * SHOWN_DECISIONS)) == 0:
                fans[step] = _fan(planner, plan, start, key)
        current = envs.step(action)
        rewards.append(float(current.ended.reward[0]) if current.ended is not None else float(current.reward[0]))
        if current.ended is not None:
            is_terminal = bool(current.ended.is_terminal[0])
            if key is not None:
                seen.append(current.ended.observation[key][0].reshape(-1))
            break
    beyond = planner.simulator.has_value and planner.bootstrap != "never"
    received = _received(rewards, expected, planner, beyond=beyond, died=is_terminal)
    chosen = [step for step in fans if step < max(1, len(rewards) - planner.horizon)] or list(fans)
    decisions = [_decision(step, fans[step], np.stack(seen), planner.horizon) for step in _spaced(chosen)]
    episode = PlannedEpisode(planner.horizon, beyond, np.array(expected), received, key, decisions)
    if not isinstance(planner, MCTS):
        return episode
    return replace(
        episode,
        searches=[searched(step, searches[step]) for step in _spaced(list(searches))],
        network_value=np.array(network_values),
        discounted=_discounted(rewards, expected, planner, died=is_terminal),
    )


def _drawn_key(workflow: Workflow, planner: Planner) -> str | None:
    """The first vector of the observation, where the model predicts observations."""
    specs = workflow.context.observation_spec
    keys = [key for key in sorted(specs) if specs[key].kind == "vector"]
    return keys[0] if keys and planner.simulator.has_observation else None


class Fan(NamedTuple):
    """Where some sequences of a plan lead in the model; the first is the chosen one."""

    paths: np.ndarray  # [sequence, horizon + 1, entries]
    is_elite: np.ndarray  # [sequence] bool
    weight: np.ndarray | None  # [sequence] of particles; 0 for the chosen one, which stands among them too
    note: str


def _fan(planner: Planner, plan: Plan, start: ModelState, key: str) -> Fan:
    """Paths of the chosen plan, some elites and some other candidates."""
    elites = plan.elites[0, :SHOWN_ELITES]
    order = plan.returns[0].isfinite().nonzero().flatten()
    others = order[~torch.isin(order, plan.elites[0])]
    others = others[:: max(1, len(others) // SHOWN_CANDIDATES)][:SHOWN_CANDIDATES]
    shown = torch.cat([elites, others])
    sequences = torch.cat([plan.actions[:1], plan.candidates[0, shown]])
    rollout = planner.simulator.rollout(planner.simulator.spread(start, len(sequences)), sequences)
    states: list[Tensor] = [planner.simulator.observation(state)[key] for state in rollout.states]
    paths = torch.stack(states, 1).flatten(2).cpu().numpy()
    is_elite = np.zeros(len(sequences), bool)
    is_elite[1 : 1 + len(elites)] = True
    if not isinstance(plan, DiffusionPlan):
        return Fan(paths, is_elite, None, "")
    weight = np.append(0.0, plan.weights[0, shown].cpu().numpy())
    effective, kl = float(plan.effective_samples[0]), float(plan.kl[0])
    note = f"{effective:.1f} of {plan.weights.shape[1]} effective\n{kl:.1f} nats from the prior"
    return Fan(paths, is_elite, weight, note)


def _decision(step: int, fan: Fan, seen: np.ndarray, horizon: int) -> PlannedDecision:
    weight = None if fan.weight is None else fan.weight[1:]
    real = seen[step : step + horizon + 1]
    return PlannedDecision(step, fan.paths[1:], fan.is_elite[1:], fan.paths[0], real, weight, fan.note)


def _spaced(steps: list[int]) -> list[int]:
    """A few of them, from the first to the last."""
    places = np.linspace(0, len(steps) - 1, min(SHOWN_DECISIONS, len(steps)))
    return [steps[round(place)] for place in places]


def _received(rewards: list[float], expected: list[float], planner: Planner, *, beyond: bool, died: bool) -> np.ndarray:
    """Discounted rewards over the horizon after each decision, to which a plan with a value beyond it adds what was
    promised there. Where an episode died before, its rewards are all."""
    count, horizon = len(rewards), planner.horizon
    weights = _signed_discount(planner) ** np.arange(horizon + 1)
    received = np.full(count, np.nan)
    for step in range(count):
        after = rewards[step : step + horizon]
        end = step + horizon
        if end < count or died or (end == count and not beyond):
            received[step] = float(np.dot(weights[: len(after)], after))
        if beyond and end < count:
            received[step] += float(weights[horizon]) * expected[end]
    return received


def _signed_discount(planner: Planner) -> float:
    """γ, negative where the next decision is the other player's."""
    return -planner.discount if isinstance(planner, MCTS) and planner.players == 2 else planner.discount


def _discounted(rewards: list[float], expected: list[float], planner: Planner, *, died: bool) -> np.ndarray:
    """The return from each decision on. An episode that was cut off counts as the last search valued it."""
    discount, total = _signed_discount(planner), 0.0
    returns = np.empty(len(rewards))
    for step in reversed(range(len(rewards))):
        total = rewards[step] + discount * total
        if step == len(rewards) - 1 and not died:
            total = expected[step]
        returns[step] = total
    return returns


def searched(step: int, search: Search) -> SearchedDecision:
    """The first tree of a search, as arrays."""
    tree = search.tree
    parent, action, value = (array[0].cpu().numpy() for array in (tree.parent, tree.parent_action, tree.value))
    visits, returns = (array[0].cpu().numpy() for array in (tree.visits, tree.returns))
    count = 1 + visits.sum(-1)
    children, best = tree.child[0].cpu().numpy(), visits.argmax(-1)
    best[0] = int(search.chosen[0])
    line = [0]
    while children[line[-1], best[line[-1]]] > 0:
        line.append(int(children[line[-1], best[line[-1]]]))
    taken = search.actions[0].cpu().numpy()
    is_number, are_classes = taken.shape[1] == 1, taken.shape[0] == taken.shape[1]
    order = taken[:, 0].argsort() if is_number else np.arange(len(taken))
    names = [f"{number:+.2f}" for number in taken[:, 0]] if is_number else [str(place) for place in order]
    along = action[line[1:]] if are_classes else action[line[1:2]]
    of_actions = torch.softmax(tree.logits[0, 0], -1), search.policy[0], search.q[0]
    prior, policy, q = (values.cpu().numpy()[order] for values in of_actions)
    return SearchedDecision(
        step=step, parent=parent, action=action, visits=count, value=(value + returns.sum(-1)) / count,
        line=np.array(line), prior=prior, policy=policy, q=q, names=[names[place] for place in order],
        line_names=[names[place] for place in along],
    )  # fmt: skip
