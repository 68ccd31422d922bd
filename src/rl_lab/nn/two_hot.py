"""Scalars as network outputs: categorical distributions over bins, or plain numbers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_lab.errors import ConfigError
from rl_lab.nn import two_hot_kernels as kernels
from rl_lab.nn.fusion import has_triton, uses_kernels
from rl_lab.nn.host_threads import VERY_MANY, share_rows
from rl_lab.nn.math import at_least_float32, in_float32_on_host, symexp, symlog

Spacing = Literal["symexp", "linear"]


class TwoHot(nn.Module):
    """`bins` values from -symexp(limit) to +symexp(limit), dense around an exact 0 in the middle.

    Targets are raw values (no symlog), predictions are means in raw space, and everything is float32 or better. With
    `spacing: linear` the bins are equally spaced from -limit to +limit, and stand for symlog values: the target is
    squashed, and the prediction is symexp of the mean.
    """

    bins: Tensor
    edges: Tensor

    def __init__(self, bins: int = 255, limit: float = 20.0, spacing: Spacing = "symexp") -> None:
        super().__init__()
        if bins < 3 or bins % 2 == 0:
            raise ConfigError(f"bins={bins}: two-hot needs an odd number of at least 3, so that one bin is exactly 0.")
        if limit <= 0:
            raise ConfigError(f"limit={limit}: the symlog range of the two-hot bins must be positive.")
        self.center, self.spacing = (bins - 1) // 2, spacing
        negative = torch.linspace(-limit, 0.0, self.center + 1, dtype=torch.float64)
        negative = symexp(negative) if spacing == "symexp" else negative
        values = torch.cat([negative, -negative[:-1].flip(0)]).float()
        self.largest = float(values[-1])
        self.register_buffer("bins", values, persistent=False)  # rebuilt from the settings, so not saved
        self.fused = False
        # A buffer of its own: on CUDA, Inductor's bucketize ignores the offset of a sliced view.
        self.register_buffer("edges", values[1:-1].clone(), persistent=False)

    @property
    def size(self) -> int:
        """The number of logits."""
        return self.bins.shape[0]

    def fuse(self) -> bool:
        """Compute means by a kernel of our own from now on, where no gradient is asked for."""
        self.fused = has_triton(self.bins)
        return self.fused

    def mean(self, logits: Float[Tensor, "*lead bins"]) -> Float[Tensor, "*lead"]:
        """Expected value. Each bin is paired with its mirror image, so uniform logits give exactly 0."""
        if uses_kernels(self.fused):
            from rl_lab.nn.latent_kernels import two_hot_mean

            return two_hot_mean(logits, self.bins, squashed=self.spacing == "linear")
        if not torch.is_grad_enabled() and in_float32_on_host(logits):
            return self._transformed(self._mean_on_host(logits))
        probs = torch.softmax(at_least_float32(logits), -1)
        surplus = probs[..., self.center + 1 :] - probs[..., : self.center].flip(-1)
        return self._transformed((surplus * self.bins[self.center + 1 :]).sum(-1))

    def _transformed(self, mean: Tensor) -> Tensor:
        return mean if self.spacing == "symexp" else symexp(mean)

    def _mean_on_host(self, logits: Tensor) -> Tensor:
        means = torch.empty(logits.shape[:-1])
        rows, bins, flat = logits.reshape(-1, self.size).numpy(), self.bins.numpy(), means.view(-1).numpy()
        share_rows(lambda first, end: kernels.mean(rows[first:end], bins, flat[first:end]), len(rows), least=VERY_MANY)
        return means

    def loss(self, logits: Float[Tensor, "*lead bins"], target: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        """Cross-entropy with the two-hot encoding of `target`, which is not materialised and gets no gradient."""
        if in_float32_on_host(logits):
            return self.losses(logits, target)[0]
        logits = at_least_float32(logits)
        neighbours, upper_mass = self._place(logits, target)
        chosen = torch.log_softmax(logits, -1).gather(-1, neighbours)
        return -torch.lerp(chosen[..., 0], chosen[..., 1], upper_mass)

    def losses(self, logits: Float[Tensor, "*lead bins"], *targets: Float[Tensor, "*lead"]) -> list[Tensor]:
        """The same for several targets."""
        if not in_float32_on_host(logits):
            return [self.loss(logits, target) for target in targets]
        stacked = torch.stack(targets).detach().to(logits.dtype)
        stacked = stacked if self.spacing == "symexp" else symlog(stacked)
        return list(_HostCrossEntropy.apply(logits, self.bins, stacked))

    def _place(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The two bins around each target [..., 2], and how much of it belongs to the upper one."""
        target = target.detach().to(logits.dtype)
        target = target if self.spacing == "symexp" else symlog(target)
        target = target.clamp(-self.largest, self.largest)
        lower = torch.bucketize(target.contiguous(), self.edges.to(logits.dtype), right=True)
        neighbours = torch.stack([lower, lower + 1], -1)
        ends = self.bins[neighbours]
        return neighbours, (target - ends[..., 0]) / (ends[..., 1] - ends[..., 0])


class _HostCrossEntropy(torch.autograd.Function):
    """On the CPU: one softmax for several targets, and a derivative that is written out."""

    @staticmethod
    def forward(ctx: Any, logits: Float[Tensor, "*lead bins"], bins: Tensor, targets: Tensor) -> Tensor:
        """Targets and losses are [targets, *lead]."""
        count, shape = len(targets), logits.shape
        rows = logits.reshape(-1, shape[-1]).contiguous()
        losses, upper_mass = torch.empty(2, count, len(rows)).unbind()
        lower, log_totals = torch.empty(count, len(rows), dtype=torch.int64), torch.empty(len(rows))
        kept = losses, lower, upper_mass, log_totals
        given = rows, bins, targets.reshape(count, -1).contiguous()
        arrays = [tensor.numpy() for tensor in (*given, *kept)]
        share_rows(lambda first, end: kernels.losses(*arrays, first, end), len(rows), least=VERY_MANY)
        ctx.save_for_backward(rows, *kept[1:])
        return losses.view(targets.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.saved_tensors[0]
        by_logits = torch.empty_like(rows)
        given = grad.reshape(len(grad), -1).contiguous(), *ctx.saved_tensors, by_logits
        arrays = [tensor.numpy() for tensor in given]
        share_rows(lambda first, end: kernels.losses_backward(*arrays, first, end), len(rows), least=VERY_MANY)
        return by_logits.view(*grad.shape[1:], -1), None, None


class PlainScalar(nn.Module):
    """One number, and the squared error."""

    size = 1

    def fuse(self) -> bool:
        """There is nothing to fuse."""
        return False

    def mean(self, output: Float[Tensor, "*lead 1"]) -> Float[Tensor, "*lead"]:
        return at_least_float32(output).squeeze(-1)

    def loss(self, output: Float[Tensor, "*lead 1"], target: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return (self.mean(output) - target.detach()).square()


def make_scalar(bins: int, limit: float) -> TwoHot | PlainScalar:
    """How TD-MPC's networks put out a number: with one bin as it is, with more by two-hot regression of its symlog."""
    return PlainScalar() if bins == 1 else TwoHot(bins, limit, "linear")
