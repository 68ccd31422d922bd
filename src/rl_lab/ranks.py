"""Several processes ("ranks") that train one agent together: what must be equal on all of them goes through here.

Each rank has its share of the environments, of the replay and of every batch. Gradients are averaged, statistics of a
batch are taken over the shares of all ranks, and what a rank decides by itself (a signal, an evaluation) is agreed on.
A process alone takes no part in any of this: every function hands back what it was given.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rl_lab.errors import RLLabError

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = timedelta(days=1)  # an evaluation on the first rank may take long; a rank that dies is noticed at once
_count, _rank = 1, 0
several = False  # whether there are others; what runs in every update looks here before it calls


class RankLostError(RLLabError):
    """Another rank has ended, so this one cannot go on."""


def count() -> int:
    """The number of ranks that train together; 1 for a process alone."""
    return _count


def rank() -> int:
    """The number of this one."""
    return _rank


def is_first() -> bool:
    """Whether this rank writes the run directory and plays the evaluations."""
    return _rank == 0


def is_launched() -> bool:
    """Whether this process was started as one of several: by RL Lab, torchrun, or anything that sets what they do."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def local_rank() -> int:
    """The number of this rank on its machine: which GPU is its own."""
    return int(os.environ.get("LOCAL_RANK", "0")) if _count > 1 else 0


def join() -> None:
    """Meet the other ranks."""
    global _count, _rank, several
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RankLostError(f"The ranks did not meet at {where}: {_first_line(error)}") from error
    _count, _rank = dist.get_world_size(), dist.get_rank()
    several = _count > 1


def leave() -> None:
    """Go on alone, when all ranks have come here: one that ends while another still talks to it can take it along."""
    global _count, _rank, several
    import torch.distributed as dist

    if dist.is_initialized():
        wait_for_all()
        dist.destroy_process_group()
    _count, _rank, several = 1, 0, False


# Tensors --------------------------------------------------------------------------------------------------------------


def average_(tensor: Tensor) -> Tensor:
    """Put the mean over the ranks in place of a tensor."""
    if _count > 1:
        import torch.distributed as dist

        _call(dist.all_reduce, tensor)
        tensor.div_(_count)
    return tensor


def average(tensor: Tensor) -> Tensor:
    """The mean over the ranks, without gradient."""
    return average_(tensor.detach().clone()) if _count > 1 else tensor


def average_gradients_(gradients: Iterable[Tensor]) -> None:
    """`average_` of many tensors at once."""
    if _count > 1:
        import torch

        tensors = list(gradients)
        flat = average_(torch.cat([value.reshape(-1) for value in tensors]))
        for value, part in zip(tensors, flat.split([value.numel() for value in tensors]), strict=True):
            value.copy_(part.view_as(value))


def gathered(tensor: Tensor) -> Tensor:
    """The tensors of all ranks end to end along the first dimension, without gradient. They have one shape."""
    if _count == 1:
        return tensor
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(_count)]
    _call(dist.all_gather, parts, tensor.detach().contiguous())
    return torch.cat(parts)


def take_first_(tensors: Iterable[Tensor]) -> None:
    """Put the first rank's values in place of these."""
    if _count > 1:
        import torch.distributed as dist

        for tensor in tensors:
            _call(dist.broadcast, tensor.detach(), 0)


# Decisions ------------------------------------------------------------------------------------------------------------


def highest(value: float) -> float:
    """The largest value of any rank."""
    if _count == 1:
        return value
    import torch
    import torch.distributed as dist

    number = torch.tensor(value, dtype=torch.float64)
    _call(dist.all_reduce, number, dist.ReduceOp.MAX)
    return float(number)


def all_agree(answer: bool) -> bool:
    """Whether every rank says yes."""
    return answer if _count == 1 else highest(0.0 if answer else 1.0) == 0.0


def shared(value: Any) -> Any:
    """The first rank's value, on every rank."""
    if _count == 1:
        return value
    import torch.distributed as dist

    box = [value]
    _call(dist.broadcast_object_list, box, 0)
    return box[0]


def collected(value: Any) -> list[Any]:
    """The values of all ranks, in their order."""
    if _count == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * _count
    _call(dist.all_gather_object, values, value)
    return values


def wait_for_all() -> None:
    """Go on when every rank has come here."""
    if _count > 1:
        highest(0.0)


# What was saved -------------------------------------------------------------------------------------------------------


def dealt(parts: Sequence[Any], own: slice) -> Any:
    """The rows of the environments `own`, which are numbered over all ranks, out of a checkpoint's shares. `parts` has
    the share of each rank in order: a tensor or list with a row for each of its environments, or a dict of those."""
    import torch

    first = parts[0]
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {key: dealt([part[key] for part in parts], own) for key in first}
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))[own].clone()
    return [row for part in parts for row in part][own]


def _call(function: Any, *arguments: Any) -> None:
    """A collective call. Where another rank is gone, the error of the library becomes one line."""
    try:
        function(*arguments)
    except (RuntimeError, ValueError) as error:
        raise RankLostError(f"Rank {_rank} lost another rank: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
