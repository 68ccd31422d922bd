"""Triton's kernels on the CPU too, in its interpreter, for tests."""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.kernels.catalogue import KERNELS
from rl_lab.kernels.registry import Accelerated, full_name, reason_against

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def use_triton(module: nn.Module) -> int:
    """Let every part run on those Triton kernels that suit it, on any device; the number of parts that have one."""
    count = 0
    for part in module.modules():
        if isinstance(part, Accelerated):
            own = [
                kernel for kernel in KERNELS if kernel.backend == "triton" and kernel.target == full_name(type(part))
            ]
            suitable = [k for k in own if reason_against(k, part) is None and k.supports(part) is None]
            part.kernels = {kernel.method: kernel for kernel in suitable}
            count += bool(part.kernels)
    return count
