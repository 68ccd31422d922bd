"""The codes of V that are stored beside the frames, and the first ones of episodes, with which dreams begin."""

from __future__ import annotations

from typing import Any

import torch

from rl_lab.components.representations.base import Encoding, Representation
from rl_lab.data_sources.base import DataSource
from rl_lab.records import OBSERVATION_PREFIX, FieldSpec, SequenceBatch, split_observation

MEAN, LOG_VARIANCE = "latent.mean", "latent.log_variance"  # fields of the records
STARTS = 1000  # first frames that are kept


class Codes:
    """Writes the mean and log-variance of every stored frame, not a sample, so that M sees another draw each time."""

    def __init__(self, representation: Representation, *, keys: list[str], device: torch.device) -> None:
        self.representation, self.device = representation, device
        self.fields = [OBSERVATION_PREFIX + key for key in keys]
        self.starts = Encoding(*torch.zeros(2, 0, representation.latent_size, device=device))
        self.written = 0  # records that the running pass has encoded

    @property
    def specs(self) -> dict[str, FieldSpec]:
        code = FieldSpec((self.representation.latent_size,), "float16")
        return {MEAN: code, LOG_VARIANCE: code}

    @torch.no_grad()
    def write(self, source: DataSource, *, count: int) -> bool:
        """Encode the next `count` records of a pass over all; says whether the pass is complete."""
        if self.written == 0:
            self.starts = self.starts.at(slice(0))
        part = source.scan(start=self.written, count=count, fields=[*self.fields, "is_first"])
        seen, _ = split_observation(part.fields)
        tensors = {key: torch.as_tensor(value, device=self.device) for key, value in seen.items()}
        encoding = self.representation.encode(tensors)
        source.update(part.indices, {MEAN: encoding.mean, LOG_VARIANCE: encoding.log_variance})
        first = encoding.at(torch.as_tensor(part.fields["is_first"], device=self.device))
        known = zip(self.starts, first, strict=True)
        self.starts = Encoding(*(torch.cat([old, new])[:STARTS] for old, new in known))
        self.written += len(part.indices)
        complete = self.written >= len(source)
        if complete:
            self.written = 0
        return complete

    @staticmethod
    def of(batch: SequenceBatch) -> Encoding:
        """The stored codes of a batch, [batch, time, latent]."""
        return Encoding(batch.extras[MEAN].float(), batch.extras[LOG_VARIANCE].float())

    def state_dict(self) -> dict[str, Any]:
        return {"starts": list(self.starts), "encoded": self.written}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.starts = Encoding(*(part.to(self.device) for part in state["starts"]))
        self.written = state["encoded"]
