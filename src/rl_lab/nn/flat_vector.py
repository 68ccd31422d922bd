"""Tensors as pieces of one flat vector, so that an operation on all of them is one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def padded_sizes(tensors: Sequence[Tensor], multiple: int) -> list[int]:
    """The size of each tensor, rounded up so that all begin at multiples of a number."""
    return [-(-tensor.numel() // multiple) * multiple for tensor in tensors]


def piece_views(flat: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Views of the vector in the shapes of the tensors, one after the other."""
    pieces = zip(flat.split(list(sizes)), tensors, strict=True)
    return [piece[: tensor.numel()].view(tensor.shape) for piece, tensor in pieces]


@torch.no_grad()
def move_into(flat: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """From now on the tensors are views of the vector, with the values that they had."""
    for tensor, view in zip(tensors, piece_views(flat, tensors, sizes), strict=True):
        view.copy_(tensor.detach())
        tensor.data = view
