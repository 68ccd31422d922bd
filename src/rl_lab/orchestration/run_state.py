"""The whole state of a run as one dict, and back. Everything that steers the run is in it."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from rl_lab import ranks
from rl_lab.environments.base import dealt_environments
from rl_lab.errors import CheckpointError
from rl_lab.orchestration.checkpoint import Checkpoint
from rl_lab.orchestration.randomness import get_random_state, set_random_state
from rl_lab.orchestration.recorder import dealt_sums
from rl_lab.orchestration.scheduler import PhaseScheduler
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import WorkflowContext


def agent_state(workflow: Workflow, context: WorkflowContext) -> dict[str, Any]:
    """The state that it takes to act."""
    return {
        "components": {name: module.state_dict() for name, module in context.components.items()},
        "controllers": context.controllers.state_dict(),
        "workflow_state": workflow.state_dict(),
    }


def gather_state(workflow: Workflow, context: WorkflowContext, scheduler: PhaseScheduler) -> dict[str, Any]:
    """Everything but the data sources, which write files of their own."""
    return {
        **agent_state(workflow, context),
        "workflow": workflow.name,
        "global_step": {"env_steps": scheduler.env_steps, "updates": scheduler.updates},
        "phase": scheduler.state_dict(),
        "optimizers": {name: optimizer.state_dict() for name, optimizer in context.optimizers.items()},
        "environment": context.train_envs.state_dict() if context.train_envs is not None else {},
        "random": get_random_state(),
    }


def load_agent(
    checkpoint: Checkpoint, workflow: Workflow, context: WorkflowContext, *, exchanged: Collection[str] = ()
) -> None:
    """Put the weights, and what else the workflow keeps, in place. `exchanged` controllers stay as they were built."""
    _check_names(checkpoint, "components", set(context.components))
    _check_names(checkpoint, "controllers", set(context.controllers), exchanged)
    controllers = dict(checkpoint.state["controllers"])
    controllers |= {role: context.controllers.get(role).state_dict() for role in exchanged}
    with fitting(checkpoint):
        for name, module in context.components.items():
            module.load_state_dict(checkpoint.state["components"][name])
        context.controllers.load_state_dict(controllers)
        workflow.load_state_dict(checkpoint.state["workflow_state"])


def restore_state(
    checkpoint: Checkpoint, workflow: Workflow, context: WorkflowContext, scheduler: PhaseScheduler
) -> None:
    """Bring everything back. The random streams come last: bringing the rest back may draw from them."""
    count = context.train_envs.num_envs if context.train_envs is not None else 0
    own = slice(ranks.rank() * count, (ranks.rank() + 1) * count)
    with fitting(checkpoint):
        if not checkpoint.is_of_these_ranks:
            checkpoint = replace(checkpoint, state=_dealt(checkpoint, workflow, own))
        state = checkpoint.state
        if context.train_envs is not None:
            workflow.restart(context.train_envs.load_state_dict(state["environment"]))
        load_agent(checkpoint, workflow, context)
        _check_names(checkpoint, "optimizers", set(context.optimizers))
        for name, optimizer in context.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        for name, source in context.data_sources.items():
            checkpoint.restore_source(name, source, own)
        scheduler.load_state_dict(state["phase"])
        if not checkpoint.is_of_these_ranks:
            scheduler.look_for_data_again()
        if "random" in state:
            set_random_state(state["random"])


def _dealt(checkpoint: Checkpoint, workflow: Workflow, own: slice) -> dict[str, Any]:
    """The state of this rank, of a checkpoint that another number of ranks made: running episodes and memory go with
    their environments. What all ranks have alike is the first one's. A rank draws as it did, or anew where it is new.
    """
    states = [share.state for share in checkpoint.shares]
    state = dict(states[0])
    state["environment"] = dealt_environments([part["environment"] for part in states], own)
    state["workflow_state"] = workflow.dealt_state([part["workflow_state"] for part in states], own)
    state["loop"] = {**state["loop"], "recorder": dealt_sums([part["loop"]["recorder"] for part in states])}
    if ranks.rank() < len(states):
        return state | {"random": states[ranks.rank()]["random"]}
    return {name: value for name, value in state.items() if name != "random"}


@contextmanager
def fitting(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn the error of a state that does not fit the model, or is of another kind, into one clear line."""
    try:
        yield
    except (RuntimeError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError, AssertionError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        raise CheckpointError(f"{checkpoint.path} does not fit this run ({text}). Use its own config.yaml.") from error


def vary_random_streams(seed: int, attempt: int) -> None:
    """After a rollback: other draws than those that led into the bad update."""
    torch.manual_seed(random.Random(f"{seed}-{attempt}").getrandbits(62))


def _check_names(checkpoint: Checkpoint, group: str, here: set[str], exchanged: Collection[str] = ()) -> None:
    difference = (set(checkpoint.state[group]) ^ here) - set(exchanged)
    if difference:
        raise CheckpointError(
            f"{checkpoint.path} has other {group} than this run: {', '.join(sorted(difference))}. Resume with the run's"
            " own config.yaml."
        )
