"""The core stays easy to see: how far one DreamerV3 update walks through the code, and how much code there is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "update_trace.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_trace", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_update_walks_through_few_files(benchmark: ModuleType) -> None:
    """A helper that stands in one more file, or one more call on the deepest path, is found here."""
    trace = benchmark.traced(["training.kernels=off", "training.compile=off"])
    assert trace["files"] <= 15, sorted(trace["by_file"])
    assert trace["depth"] <= 12, trace["deepest"]


def test_packages_and_functions_stay_small(benchmark: ModuleType) -> None:
    size = benchmark.source_size()
    assert size["packages"]["nn"]["files"] <= 16
    assert size["packages"]["nn"]["lines"] <= 2_500
    assert size["packages"]["kernels"]["lines"] <= 3_000
    assert size["median_lines"] <= 150
    assert not size["long_functions"]
