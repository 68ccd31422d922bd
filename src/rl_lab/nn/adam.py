"""Adam behind a limit on the gradient's global norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class ClippedAdam(torch.optim.Adam):
    """Adam in one fused kernel. Gradients are scaled down to a global norm of `clip`; null: they are not.

    An update whose gradient or loss is not finite changes neither parameters nor state. Nothing is read back to the
    host: clipping and skipping happen inside the kernel.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-5,
        clip: float | None = 0.5,
    ) -> None:
        super().__init__(params, lr=float(lr), betas=(float(betas[0]), float(betas[1])), eps=float(eps), fused=True)
        self.clip = clip
        self.last_grad_norm = torch.zeros(())
        self.last_finite = torch.ones((), dtype=torch.bool)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None, *, loss: Tensor | None = None
    ) -> Tensor | None:
        """One update. With `loss`, an update whose loss is not finite is left out too."""
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        finite = torch.isfinite(norm if loss is None else norm + loss.detach())
        # What torch's gradient scaler uses: the kernel divides by the one and leaves all as it is where the other is 1.
        if self.clip is not None:
            self.grad_scale = (norm * (1.0 / self.clip)).clamp_(min=1.0)
        self.found_inf = (~finite).float()
        self.last_grad_norm, self.last_finite = norm, finite
        super().step()
        return loss if closure is not None else None

    def set_learning_rate(self, rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = rate

    def metrics(self) -> dict[str, Tensor]:
        """Of the last step."""
        return {"grad_norm": self.last_grad_norm, "nonfinite": (~self.last_finite).to(self.last_grad_norm.dtype)}
