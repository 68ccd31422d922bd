"""Scalar transforms."""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.nn.fusion import has_numba

SHORT_AXIS = 16  # below one vector register of float32, torch's softmax on the CPU goes element by element


def symlog(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """sign(x) ln(1 + |x|): compresses large values, is the identity near 0."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The inverse of `symlog`."""
    return torch.sign(x) * torch.expm1(torch.abs(x))


def at_least_float32(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Leave half precision: losses and probabilities are computed in float32 (float64 stays float64)."""
    return x if x.dtype == torch.float64 else x.float()


def in_full_on_host(x: Tensor) -> bool:
    """Whether this is computed with on the CPU and without rounding to half precision, and not being compiled: there
    NumPy can do so too."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return False
    return not (torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())


def in_float32_on_host(x: Tensor) -> bool:
    """Whether the kernels of `rl_lab.nn.host_kernels` can work on it."""
    return x.dtype == torch.float32 and in_full_on_host(x) and has_numba()


def softmax(logits: Float[Tensor, "*lead classes"]) -> Float[Tensor, "*lead classes"]:
    """Over the last axis. On the CPU torch's own takes several times as long where that axis is short."""
    if logits.device.type != "cpu" or logits.shape[-1] >= SHORT_AXIS:
        return torch.softmax(logits, -1)
    weights = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


@cache
@torch.inference_mode(False)
def constant(value: float, dtype: torch.dtype) -> Float[Tensor, ""]:
    """A number as a tensor on the CPU."""
    return torch.tensor(value, dtype=dtype)


@cache
@torch.inference_mode(False)
def identity(size: int, dtype: torch.dtype) -> Float[Tensor, "size size"]:
    """On the CPU."""
    return torch.eye(size, dtype=dtype)


def one_hot(index: Tensor, classes: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*lead classes"]:
    """One-hot vectors of integer `index` [*lead]; unlike `F.one_hot` it never reads a value back to the host."""
    if index.device.type == "cpu" and classes <= SHORT_AXIS:
        return torch.embedding(identity(classes, dtype), index.long())
    zeros = torch.zeros(*index.shape, classes, dtype=dtype, device=index.device)
    return zeros.scatter_(-1, index.long().unsqueeze(-1), 1.0)


def compute_dtype(device: torch.device) -> torch.dtype:
    """What matrix products run in: the autocast dtype where autocast is on, float32 elsewhere."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
