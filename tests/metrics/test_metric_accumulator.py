from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from rl_lab.metrics.accumulator import MetricAccumulator
from rl_lab.metrics.values import TensorMetrics


def test_mean_is_over_the_times_a_metric_was_added():
    """Metrics come at different rates; each mean is over its own count."""
    accumulator = MetricAccumulator()
    accumulator.add("train", {"loss": 1.0, "rare": 7.0})
    accumulator.add("train", {"loss": 2.0})
    accumulator.add("collect", {"loss": 10})
    assert accumulator.flush() == {"train/loss": 1.5, "train/rare": 7.0, "collect/loss": 10.0}
    assert accumulator.flush() == {}


def test_floats_tensors_and_packed_metrics_agree():
    """The same numbers give the same means in each of the three forms, in float64."""
    values = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    means = []
    for form in ("float", "tensor", "packed"):
        accumulator = MetricAccumulator()
        for a, b in values.tolist():
            metrics = {"a": a, "b": b}
            if form != "float":
                metrics = {name: torch.tensor(value) for name, value in metrics.items()}
            accumulator.add("train", TensorMetrics.pack(metrics) if form == "packed" else metrics)
        means.append(accumulator.flush())
    assert means[0] == means[1] == means[2]
    assert means[0]["train/a"] == pytest.approx(values[:, 0].astype(np.float64).mean(), rel=1e-12)


def test_values_are_copied():
    """A captured graph writes its outputs in place; what was added must not change with it."""
    accumulator, values = MetricAccumulator(), torch.tensor([1.0, 2.0])
    accumulator.add("train", TensorMetrics(("a", "b"), values))
    values.fill_(100.0)
    assert accumulator.flush() == {"train/a": 1.0, "train/b": 2.0}


def test_saved_and_restored_sums_go_on_exactly():
    """A checkpoint between two additions changes no bit of the mean; it loads without executing code."""
    generator = torch.Generator().manual_seed(0)
    steps = [torch.rand(3, generator=generator) for _ in range(20)]
    whole, halves = MetricAccumulator(), MetricAccumulator()
    for index, step in enumerate(steps):
        for accumulator in (whole, halves):
            accumulator.add("train", TensorMetrics(("a", "b", "c"), step))
            accumulator.add("collect", {"return": 0.1 * index})
        if index == 9:
            file = io.BytesIO()
            torch.save(halves.state_dict(), file)
            file.seek(0)
            halves = MetricAccumulator()
            halves.load_state_dict(torch.load(file, weights_only=True))
    assert whole.flush() == halves.flush()


def test_same_metric_as_float_and_tensor_is_one_metric():
    """A workflow may return a number now and a tensor later."""
    accumulator = MetricAccumulator()
    accumulator.add("train", {"loss": 1.0})
    accumulator.add("train", {"loss": torch.tensor([3.0], requires_grad=True)})
    assert accumulator.flush() == {"train/loss": 2.0}


def test_a_vector_is_not_a_metric():
    """A tensor of several numbers is refused with its name and shape."""
    with pytest.raises(ValueError, match=r"train/loss.*\(3,\)"):
        MetricAccumulator().add("train", {"loss": torch.zeros(3)})
