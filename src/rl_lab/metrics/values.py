"""Metric values as workflows return them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Metrics = Mapping[str, "float | Tensor"]


@dataclass(frozen=True, eq=False)
class TensorMetrics(Mapping[str, Tensor]):
    """Named scalars in one tensor on the device: accumulated with one operation, read with one copy."""

    names: tuple[str, ...]
    values_vector: Tensor

    @classmethod
    def pack(cls, metrics: Mapping[str, Tensor]) -> TensorMetrics:
        return cls(tuple(metrics), torch.stack([value.detach().float() for value in metrics.values()]))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self.values_vector[self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def pack(metrics: Mapping[str, Any]) -> Metrics:
    """One tensor where they are on a GPU, whose numbers are not to be waited for; else plain numbers."""
    first = next(iter(metrics.values()))
    if isinstance(first, Tensor) and not first.is_cpu:
        return TensorMetrics.pack(metrics)
    return {name: float(value) for name, value in metrics.items()}
