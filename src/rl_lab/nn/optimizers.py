"""LaProp with adaptive gradient clipping: the optimiser of DreamerV3."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.nn import host_kernels as kernels
from rl_lab.nn.flat_vector import move_into, padded_sizes, piece_views
from rl_lab.nn.fusion import has_triton
from rl_lab.nn.math import in_float32_on_host

ROW = 64  # tensors lie in the flat buffers in whole rows, so that a per-tensor factor is one number per row


class _FlatGroup:
    """The moments of one parameter group, each in one buffer: a handful of operations instead of some per tensor."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        sizes, device = padded_sizes(params, ROW), params[0].device
        segments = torch.repeat_interleave(torch.arange(len(params)), torch.tensor(sizes) // ROW)
        self.segments = segments.to(device)  # [rows] which tensor a row belongs to
        size = sum(sizes)
        self.momentum, self.second_moment = torch.zeros(size, device=device), torch.zeros(size, device=device)
        self.work, self.scratch = torch.zeros(size, device=device), torch.zeros(size, device=device)
        self.views = piece_views(self.work, params, sizes)
        self.on_host = all(in_float32_on_host(param) for param in params)
        if self.on_host:  # the parameters become views of one vector too: then a step is two passes over memory
            self.weights, self.firsts = torch.zeros_like(self.work), np.cumsum([0, *sizes])
            move_into(self.weights, params, sizes)

    def gather(self) -> Tensor:
        """Copy the gradients into `work`; their norms, [tensors]. A parameter without gradient has gradient 0."""
        present = [(view, p.grad) for view, p in zip(self.views, self.params, strict=True) if p.grad is not None]
        if len(present) < len(self.params):
            self.work.zero_()
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        return self._norms(self.work) if self.on_host else torch.stack(torch._foreach_norm(self.views))

    def sizes(self) -> Tensor:
        """The parameters' norms, [tensors]."""
        return self._norms(self.weights) if self.on_host else torch.stack(torch._foreach_norm(self.params))

    def _norms(self, flat: Tensor) -> Tensor:
        norms = torch.empty(len(self.params))
        kernels.tensor_norms(flat.numpy(), self.firsts, norms.numpy())
        return norms

    def scale(self, factors: Tensor) -> None:
        """Multiply each tensor's gradient by its factor; NaN and infinities become 0 (their update is not taken)."""
        rows = self.work.nan_to_num_(0.0, 0.0, 0.0).view(-1, ROW)
        rows.mul_(factors[self.segments].unsqueeze(1))


class LaProp(torch.optim.Optimizer):
    """Normalise by the running gradient size first, then average: AGC → RMS → momentum → learning rate.

    The learning rate rises linearly over `warmup` updates and then, where `decay_to` is given, falls linearly to it
    over `decay_updates`. AGC limits the norm of each whole gradient tensor, biases included, to `agc` times the norm
    of its parameter, taken as at least `agc_floor`; `agc=None` switches it off. An update with a gradient or loss that
    is not finite changes neither parameters nor state; `skipped` counts these.

    Nothing is read back to the host, so a step can be captured in a CUDA graph. The parameters must be on their device
    when the optimiser is made.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 4e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-20,
        agc: float | None = 0.3,
        agc_floor: float = 1e-3,
        warmup: int = 1000,
        decay_to: float | None = None,
        decay_updates: int = 0,
    ) -> None:
        momentum, rms = (float(beta) for beta in betas)
        if lr <= 0 or not (0.0 <= momentum < 1.0 and 0.0 <= rms < 1.0):
            raise ConfigError(f"LaProp: lr={lr}, betas={tuple(betas)}: expected lr > 0 and betas from 0 to below 1.")
        if decay_to is not None and decay_updates < 1:
            raise ConfigError(f"LaProp: decay_to={decay_to} needs decay_updates >= 1; it is {decay_updates}.")
        if agc is not None and agc <= 0:
            raise ConfigError(f"LaProp: agc={agc}: expected a positive number, or null to switch clipping off.")
        self._flat: list[_FlatGroup] = []
        defaults = {
            "lr": float(lr), "betas": (momentum, rms), "eps": eps, "agc": agc, "agc_floor": agc_floor,
            "warmup": warmup, "decay_to": decay_to, "decay_updates": decay_updates,
        }  # fmt: skip
        super().__init__(params, defaults)
        device = self._flat[0].momentum.device
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.last_grad_norm = torch.zeros((), device=device)  # over all parameters, before clipping
        self.last_learning_rate = torch.zeros((), device=device)  # of the first group
        self.last_finite = torch.ones((), dtype=torch.bool, device=device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._flat.append(_FlatGroup(self.param_groups[-1]["params"]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients: a step gathers what there is."""
        for flat in self._flat:
            for param in flat.params:
                param.grad = None

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None, *, loss: Tensor | None = None
    ) -> Tensor | None:
        """One update. With `loss`, an update whose loss is not finite is left out too."""
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_norms = [flat.gather() for flat in self._flat]
        self.last_grad_norm = torch.linalg.vector_norm(torch.cat(grad_norms))
        finite = torch.isfinite(self.last_grad_norm)
        if loss is not None:
            finite = finite & torch.isfinite(loss.detach())
        self.last_finite = finite
        self.updates += finite
        self.skipped += ~finite
        for group, flat, norms in zip(self.param_groups, self._flat, grad_norms, strict=True):
            rate = self._learning_rate(group)
            if flat is self._flat[0]:
                self.last_learning_rate = rate
            factors = self._factors(group, flat, norms, finite)
            if flat.on_host:
                if finite:
                    self._advance_on_host(group, flat, factors, rate)
                continue
            if has_triton(flat.work):
                self._advance_fused(group, flat, factors, rate, finite.to(rate.dtype))
            else:
                flat.scale(factors)
                self._advance(group, flat, rate, finite.to(rate.dtype))
            torch._foreach_sub_(flat.params, flat.views)
        return loss if closure is not None else None

    def _learning_rate(self, group: dict[str, Any]) -> Tensor:
        """At the update that is being made: the first has number 1."""
        number, lr = self.updates, group["lr"]
        rate = (number / max(1, group["warmup"])).clamp(max=1.0) * lr
        if group["decay_to"] is not None:
            progress = ((number - group["warmup"]) / group["decay_updates"]).clamp(0.0, 1.0)
            rate = rate + progress * (group["decay_to"] - lr)
        return rate

    @staticmethod
    def _factors(group: dict[str, Any], flat: _FlatGroup, norms: Tensor, finite: Tensor) -> Tensor:
        """AGC, per tensor; 0 where the update is left out."""
        factors = torch.ones_like(norms)
        if group["agc"] is not None:
            sizes = flat.sizes()
            factors = (norms / (group["agc"] * sizes.clamp(min=group["agc_floor"]))).clamp(min=1.0).reciprocal()
        return factors.masked_fill(~finite, 0.0)

    def _advance(self, group: dict[str, Any], flat: _FlatGroup, rate: Tensor, taken: Tensor) -> None:
        """The moments, and the step in `work`; `taken` is 1, or 0 to leave all as it is."""
        momentum, rms = group["betas"]
        work, scratch = flat.work, flat.scratch
        flat.second_moment.lerp_(torch.mul(work, work, out=scratch), taken * (1.0 - rms))
        torch.div(flat.second_moment, self._correction(rms), out=scratch).sqrt_().add_(group["eps"])
        flat.momentum.lerp_(torch.div(work, scratch, out=scratch), taken * (1.0 - momentum))
        torch.mul(flat.momentum, taken * rate / self._correction(momentum), out=work)

    def _advance_fused(
        self, group: dict[str, Any], flat: _FlatGroup, factors: Tensor, rate: Tensor, taken: Tensor
    ) -> None:
        """`scale` and `_advance` in one kernel."""
        from rl_lab.nn.laprop_kernel import advance

        momentum, rms = group["betas"]
        scalars = torch.stack([
            taken * (1.0 - rms), self._correction(rms), taken * (1.0 - momentum),
            taken * rate / self._correction(momentum),
        ])  # fmt: skip
        moments = flat.momentum, flat.second_moment
        advance(flat.work, *moments, flat.segments, factors, scalars, eps=group["eps"], row=ROW)

    def _advance_on_host(self, group: dict[str, Any], flat: _FlatGroup, factors: Tensor, rate: Tensor) -> None:
        """`scale`, `_advance` and the step itself in one pass."""
        momentum, rms = group["betas"]
        scalars = [1.0 - rms, self._correction(rms), group["eps"], 1.0 - momentum, rate / self._correction(momentum)]
        flats = (flat.work, flat.weights, flat.momentum, flat.second_moment)
        numbers = np.array([float(value) for value in scalars], np.float32)
        kernels.advance_laprop(*(part.numpy() for part in flats), flat.firsts, factors.numpy(), numbers)

    def _correction(self, beta: float) -> Tensor:
        """1 - beta^updates without cancellation; 1 before the first update, where nothing is divided by it."""
        if beta == 0.0:
            return torch.ones_like(self.last_grad_norm)
        return -torch.expm1(self.updates.clamp(min=1) * math.log(beta))

    def metrics(self) -> dict[str, Tensor]:
        """Of the last step."""
        skipped = (~self.last_finite).to(self.last_grad_norm.dtype)
        return {"grad_norm": self.last_grad_norm, "learning_rate": self.last_learning_rate, "nonfinite": skipped}

    def state_tensors(self) -> list[Tensor]:
        """Every tensor that `step` changes in place beside the parameters."""
        moments = [moment for flat in self._flat for moment in (flat.momentum, flat.second_moment)]
        return [self.updates, self.skipped, *moments]

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only."""
        return {
            "updates": self.updates,
            "skipped": self.skipped,
            "momentum": [flat.momentum for flat in self._flat],
            "second_moment": [flat.second_moment for flat in self._flat],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the existing buffers, so that a captured graph stays valid. Settings stay as constructed."""
        for name in ("momentum", "second_moment"):
            saved, own = state_dict[name], [getattr(flat, name) for flat in self._flat]
            if [tensor.shape for tensor in saved] != [tensor.shape for tensor in own]:
                raise CheckpointError(
                    f"The optimiser state does not fit the model: '{name}' has sizes {[t.numel() for t in saved]}, "
                    f"this model needs {[t.numel() for t in own]}. Use the configuration that the run was made with."
                )
            for target, source in zip(own, saved, strict=True):
                target.copy_(source)
        self.updates.copy_(state_dict["updates"])
        self.skipped.copy_(state_dict["skipped"])
