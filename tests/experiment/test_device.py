"""Where a run computes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from rl_lab.experiment.device import keep_freed_memory


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_freed_memory_is_kept_on_the_cpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both limits of the C library are raised, to values that it takes; beside a GPU nothing is changed."""
    calls: list[tuple[int, int, int]] = []
    mallopt = ctypes.CDLL(None).mallopt if hasattr(ctypes.CDLL(None), "mallopt") else lambda *_: 1

    def seen(setting: int, value: int) -> None:
        calls.append((setting, value, mallopt(setting, value)))

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=seen))
    keep_freed_memory(torch.device(device))
    assert calls == ([(-1, 1 << 30, 1), (-3, 32 << 20, 1)] if device == "cpu" else [])


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every one has these settings."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    keep_freed_memory(torch.device("cpu"))
