"""One text for NumPy and torch.

On the CPU a small update costs its calls, and NumPy's are a third of torch's price; on a GPU it has to be torch. Where
an algorithm's arithmetic is written with operators, indices and functions that both libraries have under one name, it
runs on either: arrays in, arrays out; tensors in, tensors out. Flags are numbers there (0 or 1), for the libraries do
not agree on arithmetic with bools.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.nn.distributions import NoiseKind, draw_noise

Array = Any  # np.ndarray or Tensor: all of a call are one or the other


def library(x: Array) -> Any:
    """The module whose functions take it: numpy or torch."""
    return np if isinstance(x, np.ndarray) else torch


def flags(x: Array) -> Array:
    """Bools as numbers."""
    return x.astype(np.float32) if isinstance(x, np.ndarray) else x.float()


def row_numbers(x: Array) -> Array:
    """0, 1, …, one for each row."""
    return np.arange(len(x)) if isinstance(x, np.ndarray) else torch.arange(len(x), device=x.device)


def noise_like(x: Array, kind: NoiseKind) -> Array:
    """From torch's generator in either case."""
    if isinstance(x, np.ndarray):
        return draw_noise(kind, x.shape, "cpu").numpy()
    return draw_noise(kind, x.shape, x.device, x.dtype)


def mean(x: Array) -> Array:
    """Over everything. NumPy's own method costs three times as much."""
    return np.add.reduce(x, None) / np.float32(x.size) if isinstance(x, np.ndarray) else x.mean()


def means(*rows: Array) -> Array:
    """The mean of each of several vectors of one length, as one vector."""
    if isinstance(rows[0], np.ndarray):
        return np.add.reduce(np.array(rows), 1) / np.float32(len(rows[0]))
    return torch.stack(rows).mean(1)


def row_maximum(x: Array) -> Array:
    """[rows, columns] → [rows]"""
    return np.maximum.reduce(x, 1) if isinstance(x, np.ndarray) else x.amax(1)


def clip(x: Array, low: float, high: float) -> Array:
    """NumPy's own method costs four times as much."""
    return np.minimum(np.maximum(x, low), high) if isinstance(x, np.ndarray) else x.clamp(low, high)


def as_tensor(x: Array) -> Tensor:
    """On the same memory."""
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def as_array(x: Array) -> np.ndarray:
    """In host memory; of a tensor there, on the same memory."""
    return x if isinstance(x, np.ndarray) else x.cpu().numpy()
