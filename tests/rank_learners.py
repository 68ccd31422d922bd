"""Learners that are fed the same batches by one process or, half by half, by two ranks: as a module it is a rank, which
then takes part in the runs that it is told of."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.overrides import QUIET
from torch import Tensor

from rl_lab import ranks
from rl_lab.experiment import shares
from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.experiment.train import run_training
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.records import Batch, Rollout, RolloutBatch, SequenceBatch
from rl_lab.workflows.context import PhaseView

BATCH, ENVS, STEPS = 8, 4, 8
COMMON = [*QUIET, "training.kernels=off", f"environment.num_envs={ENVS}", f"workflow.batch_size={BATCH}"]
LEARNERS = {
    "dreamer_v3": [
        *("+experiment=dreamer_v3", "environment.id=CartPole-v1", "size=tiny", "workflow.sequence_length=6"),
        *("workflow.horizon=4", "workflow.stored_latents=false", "optimizers.main.warmup=0"),
    ],
    "tdmpc2": ["+experiment=tdmpc2", "environment.id=Pendulum-v1", "size=1m", "training.total_timesteps=1000"],
    "ppo": ["+experiment=ppo", "environment.id=Pendulum-v1", "workflow.entropy_scale=0.01"],
    "dqn": ["+experiment=dqn", "environment.id=CartPole-v1", "data_sources.replay.sampling=prioritized"],
    "muzero": ["+experiment=muzero", "environment.id=CartPole-v1"],
}


@contextlib.contextmanager
def steady_noise() -> Iterator[None]:
    """Random draws that are the same for every row of a batch, and others at every call: a row must not get another
    draw because it stands in another rank's share."""
    turns = itertools.count(1)

    def level() -> float:
        return (next(turns) * 0.618034) % 0.9 + 0.05

    def fill(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor.fill_(level())

    def like(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.full_like(tensor, level())

    def sized(*size: Any, **options: Any) -> Tensor:
        shape = size[0] if size and isinstance(size[0], tuple | list | torch.Size) else size
        return torch.full(tuple(shape), level(), device=options.get("device"))

    with contextlib.ExitStack() as stack:
        for name in ("uniform_", "normal_", "exponential_"):
            stack.enter_context(mock.patch.object(Tensor, name, fill))
        stack.enter_context(mock.patch.object(Tensor, "bernoulli_", lambda tensor, p: tensor.fill_(1.0)))
        for name in ("rand_like", "randn_like"):
            stack.enter_context(mock.patch.object(torch, name, like))
        for name in ("rand", "randn"):
            stack.enter_context(mock.patch.object(torch, name, sized))
        yield


def learn(name: str, folder: Path, updates: int) -> dict[str, Any]:
    """The losses of every update, and the agent at the end: of the whole batches, or of this rank's share of them."""
    prepared = prepare([*LEARNERS[name], *COMMON])
    shares.check(prepared)
    run = RunDirectory.create(folder / f"{ranks.rank()}-of-{ranks.count()}", name, 0, config=prepared.to_yaml())
    orchestrator = build(shares.share(prepared), run).orchestrator
    workflow, phase = orchestrator.workflow, PhaseView("train", "online")
    losses = []
    with steady_noise():
        for number in range(updates):
            metrics = workflow.update(batch(name, number, orchestrator), phase=phase)  # type: ignore[attr-defined]
            losses.append({key: float(value) for key, value in dict(metrics).items() if key.startswith("loss/")})
    state = {f"{part}.{key}": v for part, m in orchestrator.modules.items() for key, v in m.state_dict().items()}
    orchestrator.close()
    return {"losses": losses, "state": {key: value.clone() for key, value in state.items()}}


def batch(name: str, number: int, orchestrator: Any) -> Batch:
    """A made-up batch, or this rank's rows of it."""
    context = orchestrator.context
    if name == "ppo":
        return minibatch(number, context)
    draws, spec = torch.Generator().manual_seed(number), orchestrator.workflow.batch_spec()
    lead = (BATCH, spec.window)
    observation = {
        key: torch.randn(*lead, *part.shape, generator=draws) for key, part in context.observation_spec.items()
    }
    ended = torch.rand(lead, generator=draws) < 0.1
    whole = {
        "action": action(context, lead, draws),
        "reward": torch.randn(lead, generator=draws),
        "is_first": torch.cat([torch.zeros(BATCH, 1, dtype=torch.bool), ended[:, :-1]], 1),
        "is_last": ended,
        "is_terminal": ended & (torch.rand(lead, generator=draws) < 0.5),
    }
    extras = {
        key: torch.rand(*lead, *part.shape, generator=draws)
        for key, part in orchestrator.workflow.record_specs().items()
    }
    weight = torch.rand(BATCH, generator=draws) if name == "dqn" else None
    share = slice(ranks.rank() * BATCH // ranks.count(), (ranks.rank() + 1) * BATCH // ranks.count())
    return SequenceBatch(
        observation={key: value[share] for key, value in observation.items()},
        **{key: value[share] for key, value in whole.items()},
        extras={key: value[share] for key, value in extras.items()},
        indices=torch.arange(BATCH * spec.window).view(lead)[share],
        weight=None if weight is None else weight[share],
    )


def minibatch(number: int, context: Any) -> RolloutBatch:
    """A quarter of a made-up rollout, or this rank's environments of it."""
    rollout_number, part = divmod(number, 4)
    draws = torch.Generator().manual_seed(rollout_number)
    lead, own = (STEPS, ENVS), ENVS // ranks.count()
    share = slice(ranks.rank() * own, (ranks.rank() + 1) * own)
    vector = {
        key: (torch.randn(*lead, *part.shape, generator=draws), torch.randn(ENVS, *part.shape, generator=draws))
        for key, part in context.observation_spec.items()
    }
    ended = torch.rand(lead, generator=draws) < 0.1
    actions, rewards = action(context, lead, draws), torch.randn(lead, generator=draws)
    rollout = Rollout(
        number=rollout_number,
        observation={key: value[0][:, share] for key, value in vector.items()},
        action=actions[:, share],
        is_first=torch.zeros(STEPS, own, dtype=torch.bool),
        reward=rewards[:, share],
        is_last=ended[:, share],
        is_terminal=ended[:, share],
        following={key: value[1][share] for key, value in vector.items()},
        following_first=torch.zeros(own, dtype=torch.bool),
        cut={key: torch.zeros(0, *part.shape) for key, part in context.observation_spec.items()},
        cut_indices=torch.zeros(0, dtype=torch.int64),
    )
    time = torch.randperm(STEPS, generator=draws)[2 * part : 2 * part + 2]  # the same decisions of every environment
    indices = (time[:, None] * own + torch.arange(own)).reshape(-1, 1)
    return RolloutBatch(rollout, indices, epoch=0, is_final=part == 3)


def action(context: Any, lead: tuple[int, ...], draws: torch.Generator) -> Tensor:
    spec = context.action_spec
    if spec.kind == "discrete":
        return torch.randint(spec.classes[0], (*lead, *spec.shape), generator=draws, dtype=torch.int32)
    return torch.rand(*lead, *spec.shape, generator=draws) * 2.0 - 1.0


def main(folder: Path, updates: int, runs: list[list[str]]) -> None:
    """Learn as one of two ranks, all algorithms in turn; then train by these overrides."""
    torch.set_num_threads(1)
    ranks.join()
    COMMON.append(f"training.devices={ranks.count()}")
    if updates:
        results = {name: learn(name, folder, updates) for name in LEARNERS}
        torch.save(results, folder / f"rank-{ranks.rank()}.pt")
    for words in runs:
        assert run_training(words).code == 0
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # as `rl_lab.cli.rank`, and for its reason
