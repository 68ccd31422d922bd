"""Averages metrics between two log times without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_lab.metrics.values import Metrics, TensorMetrics


class _DeviceSum:
    """The running sum of one vector of metrics. It stays where the values are until somebody asks."""

    __slots__ = ("count", "total")

    def __init__(self, total: Tensor, count: int) -> None:
        self.total, self.count = total, count

    def add(self, values: Tensor) -> None:
        if self.total.device != values.device:  # a restored sum follows the first values that arrive
            self.total = self.total.to(values.device)
        self.total.add_(values)
        self.count += 1


class MetricAccumulator:
    """Sums of everything added since the last `flush`, in float64; floats on the host, tensors on their device.

    A metric's mean is over the times it was added, so metrics may come at different rates.
    """

    def __init__(self) -> None:
        self._floats: dict[str, dict[str, list[Any]]] = {}  # prefix -> name -> [sum, count]
        self._tensors: dict[tuple[str, tuple[str, ...]], _DeviceSum] = {}

    def add(self, prefix: str, metrics: Metrics) -> None:
        """Count every metric once, under `prefix/name`. Tensors must be scalars."""
        if isinstance(metrics, TensorMetrics):
            self._add_tensor(prefix, metrics.names, metrics.values_vector)
            return
        group = self._floats.get(prefix)
        if group is None:
            group = self._floats[prefix] = {}
        for name, value in metrics.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise ValueError(
                        f"Metric '{prefix}/{name}' has the shape {tuple(value.shape)}; a metric is one number: "
                        "return its mean, or one entry per number."
                    )
                self._add_tensor(prefix, (name,), value.reshape(1))
                continue
            entry = group.get(name)
            if entry is None:
                group[name] = [float(value), 1]
            else:
                entry[0] += float(value)
                entry[1] += 1

    def flush(self) -> dict[str, float]:
        """The means since the last flush, under `prefix/name`; then start anew."""
        sums: dict[str, tuple[float, int]] = {}
        for prefix, group in self._floats.items():
            for name, (total, count) in group.items():
                sums[f"{prefix}/{name}"] = (total, count)
        for (prefix, names), entry in self._tensors.items():
            for name, total in zip(names, entry.total.tolist(), strict=True):
                before, count = sums.get(f"{prefix}/{name}", (0.0, 0))
                sums[f"{prefix}/{name}"] = (before + total, count + entry.count)
        self._floats, self._tensors = {}, {}
        return {name: total / count for name, (total, count) in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "floats": {p: {name: list(entry) for name, entry in group.items()} for p, group in self._floats.items()},
            "tensors": [
                {"prefix": prefix, "names": list(names), "total": entry.total.cpu().clone(), "count": entry.count}
                for (prefix, names), entry in self._tensors.items()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._floats = {p: {name: list(entry) for name, entry in group.items()} for p, group in state["floats"].items()}
        self._tensors = {
            (entry["prefix"], tuple(entry["names"])): _DeviceSum(entry["total"].clone(), entry["count"])
            for entry in state["tensors"]
        }

    def _add_tensor(self, prefix: str, names: tuple[str, ...], values: Tensor) -> None:
        entry = self._tensors.get((prefix, names))
        if entry is None:
            # A copy: the caller may overwrite its own tensor in the next step (a captured graph does).
            total = values.detach().to(torch.float64, copy=True)
            self._tensors[(prefix, names)] = _DeviceSum(total, 1)
        else:
            entry.add(values.detach())
