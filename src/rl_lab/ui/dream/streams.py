"""Streams of random numbers that are kept with the moments of a tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

SEED_DOMAIN = 0xD3EA


def seed_of(*words: int) -> int:
    """A seed of its own for each combination of numbers."""
    return int(np.random.SeedSequence([SEED_DOMAIN, *words]).generate_state(1)[0])


@contextmanager
def preserved_random() -> Iterator[None]:
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


@contextmanager
def stream_of(state: torch.Tensor | None) -> Iterator[Callable[[], torch.Tensor]]:
    """Inside, torch draws from this stream; the value is a function that returns where the stream has come to."""
    with preserved_random():
        if state is not None:
            torch.set_rng_state(state)
        yield torch.get_rng_state
