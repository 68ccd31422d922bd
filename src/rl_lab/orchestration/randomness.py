"""The global random streams of Python, NumPy and torch: saved, restored, and set aside for a while."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def get_random_state() -> dict[str, Any]:
    """All global streams as plain values and tensors."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert isinstance(keys, np.ndarray)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore `get_random_state`; a run that moved between CPU and GPU keeps the streams that both have."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def seed_random(*words: int) -> None:
    """Seed all global streams from some numbers."""
    first, second, third = np.random.SeedSequence(words).generate_state(3).tolist()
    random.seed(first)
    np.random.seed(second)
    torch.manual_seed(third)


@contextmanager
def forked_random(*words: int) -> Iterator[None]:
    """Inside, the global streams are seeded from `words`; outside, they go on as if nothing had happened."""
    before = get_random_state()
    seed_random(*words)
    try:
        yield
    finally:
        set_random_state(before)
