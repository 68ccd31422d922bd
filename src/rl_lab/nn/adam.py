"""Adam behind a limit on the gradient's global norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rl_lab.errors import CheckpointError, ConfigError


class ClippedAdam(torch.optim.Optimizer):
    """Adam in one fused kernel. Gradients are scaled down to a global norm of `clip`; null: they are not.

    An update whose gradient or loss is not finite changes neither parameters nor state; `updates` counts the others.
    Nothing is read back to the host: clipping and skipping happen inside the kernel. A parameter without gradient is
    left alone. The parameters must be on their device when the optimiser is made.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-5,
        clip: float | None = 0.5,
    ) -> None:
        first, second = (float(beta) for beta in betas)
        if lr <= 0 or not (0.0 <= first < 1.0 and 0.0 <= second < 1.0):
            raise ConfigError(
                f"ClippedAdam: lr={lr}, betas={tuple(betas)}: expected lr > 0 and betas from 0 to below 1."
            )
        if clip is not None and clip <= 0:
            raise ConfigError(f"ClippedAdam: clip={clip}: expected a positive number, or null to switch clipping off.")
        super().__init__(params, {"lr": float(lr), "betas": (first, second), "eps": float(eps)})
        self.clip = clip
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.first_moments = [torch.zeros_like(p) for p in self.parameters]
        self.second_moments = [torch.zeros_like(p) for p in self.parameters]
        device = self.parameters[0].device
        self.updates = torch.zeros((), device=device)  # float: the kernel wants it so
        self.last_grad_norm = torch.zeros((), device=device)
        self.last_finite = torch.ones((), dtype=torch.bool, device=device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None, *, loss: Tensor | None = None
    ) -> Tensor | None:
        """One update. With `loss`, an update whose loss is not finite is left out too."""
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [p.grad.reshape(-1) for p in self.parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.cat(gradients))
        finite = torch.isfinite(norm if loss is None else norm + loss.detach())
        self.last_grad_norm, self.last_finite = norm, finite
        self.updates += finite
        # Meant for loss scaling: the kernel divides by the one, and does nothing where the other is 1.
        scale = None if self.clip is None else (norm * (1.0 / self.clip)).clamp_(min=1.0)
        skip = (~finite).float()
        start = 0
        for group in self.param_groups:
            self._advance(group, slice(start, start + len(group["params"])), scale, skip)
            start += len(group["params"])
        return loss if closure is not None else None

    step.hooked = True  # type: ignore[attr-defined]  # torch's wrapper for profilers would cost more than the update

    def _advance(self, group: dict[str, Any], own: slice, scale: Tensor | None, skip: Tensor) -> None:
        parts = zip(self.parameters[own], self.first_moments[own], self.second_moments[own], strict=True)
        present = [(p, p.grad, first, second) for p, first, second in parts if p.grad is not None]
        if not present:
            return
        params, gradients, firsts, seconds = (list(column) for column in zip(*present, strict=True))
        torch._fused_adam_(
            params, gradients, firsts, seconds, [], [self.updates] * len(params),
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=0.0, eps=group["eps"],
            amsgrad=False, maximize=False, grad_scale=scale, found_inf=skip,
        )  # fmt: skip

    def set_learning_rate(self, rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = rate

    def metrics(self) -> dict[str, Tensor]:
        """Of the last step."""
        return {"grad_norm": self.last_grad_norm, "nonfinite": (~self.last_finite).to(self.last_grad_norm.dtype)}

    def state_dict(self) -> dict[str, Any]:
        """Tensors only; settings stay as constructed."""
        return {"updates": self.updates, "first": list(self.first_moments), "second": list(self.second_moments)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for saved, own in ((state_dict["first"], self.first_moments), (state_dict["second"], self.second_moments)):
            if [tensor.shape for tensor in saved] != [tensor.shape for tensor in own]:
                raise CheckpointError(
                    f"The optimiser state does not fit the model: it has {len(saved)} tensors of other shapes than the "
                    f"{len(own)} here. Use the configuration that the run was made with."
                )
            for target, source in zip(own, saved, strict=True):
                target.copy_(source)
        self.updates.copy_(state_dict["updates"])
