"""Where a run computes: device, precision, threads and the memory of the host."""

from __future__ import annotations

import ctypes

import torch

from rl_lab import ranks
from rl_lab.errors import ConfigError, nearest

# Settings of the GNU C library's `mallopt`, and the largest value that it takes for the second.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_KEPT = 1 << 30, 32 << 20


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device that is really there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        hint = (
            " Did you mean 'cuda'?" if kind in ("gpu", "nvidia") else nearest(name, ["auto", "cpu", "cuda", "cuda:0"])
        )
        raise ConfigError(f"experiment.device={name} is not a device.{hint}")
    if not torch.cuda.is_available():
        why = "this build of PyTorch has no CUDA" if torch.version.cuda is None else "PyTorch sees no GPU"
        raise ConfigError(f"experiment.device={name}: {why}. Use experiment.device=cpu or auto, or see: rl-lab doctor.")
    if index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"experiment.device={name}: there are {torch.cuda.device_count()} GPUs, numbered from 0.")
    return torch.device("cuda", ranks.local_rank()) if ranks.count() > 1 else torch.device(name)


def resolve_precision(name: str, device: torch.device) -> torch.dtype | None:
    """The autocast type; None means float32. With `tf32`, a GPU multiplies float32 matrices with short mantissas."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        torch.backends.cudnn.benchmark = True  # image networks see few sizes: measure which convolution is fastest
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else None
    return torch.bfloat16 if name == "bfloat16" else None


def set_threads(threads: int | str, device: torch.device) -> None:
    """`auto` on the CPU is one: small operations gain nothing from more, and threads that wait for a core that an
    environment or another run holds cost many times what they save."""
    if threads != "auto":
        torch.set_num_threads(int(threads))
    elif device.type == "cpu":
        torch.set_num_threads(1)


def keep_freed_memory(device: torch.device) -> None:
    """On the CPU, memory that is freed stays with the process, up to a gigabyte, in pieces of up to 32 MB: an update
    takes as much as the one before it, and new pages from the system cost more than what small networks compute in
    them. Where the C library is another one, all stays as it is."""
    if device.type != "cpu":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
