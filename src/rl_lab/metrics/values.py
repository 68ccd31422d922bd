"""Metric values as workflows return them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

Metrics = Mapping[str, "float | Tensor"]


class TensorMetrics(Mapping[str, Tensor]):
    """Named scalars in one tensor on the device: accumulated with one operation, read with one copy."""

    def __init__(self, names: Sequence[str], values: Tensor) -> None:
        self.names, self.values_vector = tuple(names), values

    @classmethod
    def pack(cls, metrics: Mapping[str, Tensor]) -> TensorMetrics:
        return cls(list(metrics), torch.stack([value.detach().float() for value in metrics.values()]))

    def __getitem__(self, name: str) -> Tensor:
        return self.values_vector[self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
