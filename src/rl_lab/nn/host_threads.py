"""Rows shared among threads on the CPU.

torch spreads one operation after the other over its threads, which small ones gain nothing by. Here every thread takes
its part of the rows through many operations: all layers of a network, or all steps of a dream. Which rows a thread gets
follows from their number alone, and what threads give is put together in the order of the rows, so results do not
depend on timing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

# Rows of a part for which it pays to wake a thread: if they go through a network, through many steps, through little.
MANY = 512
FEW = 32
VERY_MANY = 4096
TILE = 8  # a part has a multiple of so many rows, where there are many
SMALL = 1 << 16  # numbers of a weight up to which torch's own threads gain little

Result = TypeVar("Result")


class _Here(threading.local):
    sharing = False  # whether this thread works on a part already


def _start_sharing() -> None:
    _here.sharing = True


_here = _Here()
_threads = 1
_others = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="rows", initializer=_start_sharing)


def only_small(modules: Iterable[nn.Module]) -> bool:
    """Whether these compute on the CPU, and have neither large layers nor convolutions: threads better share rows."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return all(
        value.device.type == "cpu" and value.ndim < 4 and value.shape[-2:].numel() <= SMALL for value in parameters
    )


@contextmanager
def rows_shared() -> Iterator[None]:
    """Meanwhile the threads that torch has share rows, and torch itself takes one."""
    global _threads
    _threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_threads)
        _threads = 1


def share_rows(work: Callable[[int, int], Result], rows: int, *, least: int | None = None) -> list[Result]:
    """work(first, end) for parts of at least so many rows, each in a thread of its own; what they give, in order."""
    parts = 1 if _here.sharing else min(_threads, rows // (least or MANY))
    if parts <= 1:
        return [work(0, rows)]
    tile = TILE if rows >= TILE * parts * 2 else 1
    bounds = [rows * part // parts // tile * tile for part in range(parts)] + [rows]
    others = [_others.submit(work, *bounds[part : part + 2]) for part in range(1, parts)]
    _here.sharing = True
    try:
        own = work(*bounds[:2])
    finally:
        _here.sharing = False
        for other in others:
            other.exception()  # waits: no thread writes to what the caller may have given up
    return [own, *(other.result() for other in others)]
