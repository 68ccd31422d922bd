"""Fresh on-policy data: steps are packed into rollouts, rollouts are cut into minibatches, and then they are gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab import ranks
from rl_lab.buffers.rollouts import EpochOrder, RolloutPacker
from rl_lab.data_sources.base import DataSource, SourceContext, Wait
from rl_lab.errors import CheckpointError, ConfigError, DataError
from rl_lab.records import BatchSpec, RecordBlock, Rollout, RolloutBatch, VectorStep

SEED_DOMAIN = 3  # keeps this random stream apart from the run's other ones


class StreamSource(DataSource):
    """Collector → packer → batcher: rollouts of `length` decisions per environment, each used for `epochs` passes.

    It is ready when a rollout is full and until its last minibatch is drawn; only then does it take new records, so
    every batch comes from the policy that was collecting. A minibatch is `batch_size` sequences of `sequence_length`
    decisions; the last one of an epoch may be smaller. On the CPU a batch lives until the next record is added.
    """

    def __init__(
        self,
        *,
        length: int,  # decisions of each environment in a rollout
        epochs: int,  # passes over it
        seed: int = 0,  # varies the order without changing the run's seed
    ) -> None:
        if length < 1 or epochs < 1:
            raise ConfigError(f"length={length}, epochs={epochs}: expected at least 1 of each.")
        self._length, self._epochs, self._seed = length, epochs, seed

    # Filling ----------------------------------------------------------------------------------------------------------

    def prepare(self, context: SourceContext) -> None:
        self._context = context
        self._packer = RolloutPacker(context.fields, num_envs=context.num_envs, length=self._length)
        rng = np.random.default_rng(np.random.SeedSequence([context.seed, SEED_DOMAIN, self._seed]))
        self._order = EpochOrder(rng, epochs=self._epochs)
        self._rollout: Rollout | None = None
        self._checked: BatchSpec | None = None

    def add(self, block: RecordBlock) -> None:
        if block.indices is not None:
            self._packer.end(block)
            return
        if self._packer.full:
            raise DataError(
                f"The stream's rollout ({self._length} × {self._context.num_envs} decisions) is full and has "
                "minibatches left, so it takes no more records. Let the update hook follow collect and run once for "
                "every minibatch: {update: {times: N}} with N = epochs × minibatches, as in experiment/ppo."
            )
        self._packer.decide(block.fields)

    def follow(self, step: VectorStep) -> None:
        self._packer.follow(step)

    def __len__(self) -> int:
        return self._packer.filled * self._context.num_envs

    def memory(self) -> dict[str, int]:
        on_gpu = torch.device(self._context.device).type == "cuda"
        return {"ram": self._packer.bytes, "gpu": self._packer.bytes if on_gpu else 0, "disk": 0}

    # Sampling ---------------------------------------------------------------------------------------------------------

    def ready(self, spec: BatchSpec) -> bool:
        return self._packer.full

    def wait(self) -> Wait:
        return Wait(self._length * self._context.num_envs, each_time=True)

    def sample(self, spec: BatchSpec) -> RolloutBatch:
        if not self._packer.full:
            raise DataError(
                f"The stream's rollout has {self._packer.filled} of {self._length} decisions: ready() tells when it is "
                "full. Used rollouts are gone."
            )
        if spec != self._checked:
            self._check(spec)
        if self._rollout is None:
            self._rollout = self._packer.rollout(spec.device)
        rollout, envs, span = self._rollout, self._context.num_envs, spec.sequence_length
        chosen, epoch, final = self._order.draw(spec.batch_size, of=envs * self._length // span)
        if final:
            self.drop()
        starts = chosen if span == 1 else chosen // envs * (span * envs) + chosen % envs
        indices = torch.from_numpy(starts[:, None] + np.arange(span) * envs if span > 1 else starts[:, None])
        return RolloutBatch(rollout, indices.to(spec.device), epoch, final)

    def drop(self) -> None:
        """Give up what is left of the rollout (an early stop): the stream takes records again."""
        self._packer.clear()
        self._packer.number += 1
        self._order.restart()
        self._rollout = None

    def _check(self, spec: BatchSpec) -> None:
        if self._length % spec.sequence_length or spec.context:
            raise DataError(
                f"The stream's rollouts have {self._length} decisions per environment, and a batch asks for sequences "
                f"of {spec.sequence_length} after {spec.context} of context. Set workflow.sequence_length to a divisor "
                "of data_sources.stream.length; streams keep no context."
            )
        self._checked = spec

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self, folder: Path) -> dict[str, Any]:
        shape = {"length": self._length, "num_envs": self._context.num_envs}
        return {**shape, "packer": self._packer.state_dict(folder), "order": self._order.state_dict()}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        for name, value in {"length": self._length, "num_envs": self._context.num_envs}.items():
            if state[name] != value:
                raise CheckpointError(
                    f"The checkpoint's stream has {name}={state[name]}, this run's has {value}. Resume with the run's "
                    "own data_sources.stream and environment.num_envs."
                )
        self._packer.load_state_dict(state["packer"], folder)
        self._order.load_state_dict(state["order"])
        self._rollout = None

    def load_shares(self, shares: Sequence[tuple[dict[str, Any], Path]], own: slice) -> None:
        """The rollout under way is given up: its minibatches were drawn among other decisions. A new one begins."""
        self._packer.number = shares[0][0]["packer"]["number"]
        if ranks.rank() < len(shares):
            self._order.load_state_dict(shares[ranks.rank()][0]["order"])
        self.drop()
