"""Adam on one flat vector: the optimiser of small networks, where the number of operations is the cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import isfinite, sqrt
from typing import Any, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from rl_lab import ranks
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.nn.flat_vector import move_into, padded_sizes, piece_views

ALIGNED = 16  # numbers; every tensor begins at a whole cache line


class FlatAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba, 2015), with the gradient scaled down to a global norm of `clip`; null: it is not. Each update
    first shrinks the parameters by the share `weight_decay`, whatever the learning rate.

    The parameters become views of one vector, so that a step is a handful of operations however many there are. They
    must be on their device when the optimiser is made. An update whose gradient or loss is not finite changes neither
    parameters nor state; nothing is read back from a GPU. `zero_grad` must come before each backward pass. Parameter
    groups may have learning rates and names of their own; the norm is that of all of them. A step may be for some of
    them: the others keep parameters, moments and the count of their updates.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float,
        clip: float | None,
        weight_decay: float = 0.0,
    ) -> None:
        if lr <= 0 or (clip is not None and clip <= 0):
            raise ConfigError(f"FlatAdam: lr={lr}, clip={clip}: expected numbers above 0 (clip may be null).")
        super().__init__(params, {"lr": float(lr), "betas": tuple(map(float, betas)), "eps": float(eps)})
        self.params: list[Tensor] = [value for group in self.param_groups for value in group["params"]]
        self.clip, self.weight_decay, device = clip, weight_decay, self.params[0].device
        sizes = padded_sizes(self.params, ALIGNED)
        self.weights, self.gradient, self.momentum, self.second_moment = torch.zeros(4, sum(sizes), device=device)
        self.updates = torch.zeros(len(self.param_groups), device=device)  # of each group
        self._counts = self.updates.unbind()  # views of it
        # Of the last update, on its device; plain numbers on the CPU.
        self.norm: Tensor | float = torch.zeros((), device=device)  # of the gradient, before clipping
        self.left_out: Tensor | float = torch.zeros((), device=device)  # 1 where the update was left out, else 0
        self._gradients = piece_views(self.gradient, self.params, sizes)
        self._cpu_gradient = self.gradient.numpy() if device.type == "cpu" else None
        everything, start = (self.weights, self.gradient, self.momentum, self.second_moment), 0
        self._parts: list[tuple[list[Tensor], ...]] = []  # those of each group
        for group in self.param_groups:
            stop = start + sum(padded_sizes(group["params"], ALIGNED))
            self._parts.append(tuple([flat[start:stop]] for flat in everything))
            start = stop
        move_into(self.weights, self.params, sizes)

    @property
    def last_grad_norm(self) -> Tensor:
        """Norm of the last update's gradient, before clipping."""
        return torch.as_tensor(self.norm, dtype=torch.float32)

    @property
    def last_bad(self) -> Tensor:
        """1 where the last update was left out, else 0."""
        return torch.as_tensor(self.left_out, dtype=torch.float32)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set all gradients to 0. They are views of one vector and stay: a backward pass adds to them."""
        self.gradient.zero_()
        for value, view in zip(self.params, self._gradients, strict=True):
            if value.grad is not view:
                value.grad = view

    def step(  # type: ignore[override]
        self, closure: None = None, *, loss: SupportsFloat | None = None, groups: Collection[str] | None = None
    ) -> None:
        """One update of all groups, or of those with these names; with `loss`, one whose loss is not finite is left out
        too. The gradients of groups that are left out must be 0."""
        loss, chosen = loss.detach() if isinstance(loss, Tensor) else loss, self._places(groups)
        ranks.average_(self.gradient)
        loss = ranks.average(loss) if isinstance(loss, Tensor) else loss
        if self._cpu_gradient is not None:
            self._step_on_cpu(self._cpu_gradient, 0.0 if loss is None else float(loss), chosen)
            return
        norm = torch.linalg.vector_norm(self.gradient)
        finite = torch.isfinite(norm + loss if isinstance(loss, Tensor) else norm).float()
        bad = 1.0 - finite
        self.norm, self.left_out = norm, bad
        # The kernel divides by the one, and does nothing where the other is 1.
        scale = None if self.clip is None else (norm / self.clip).clamp_(min=1.0)
        self._adam(chosen, finite, grad_scale=scale, found_inf=bad)

    def _places(self, groups: Collection[str] | None) -> Sequence[int]:
        if groups is None:
            return range(len(self.param_groups))
        names = [group.get("name") for group in self.param_groups]
        if missing := set(groups) - set(names):
            raise ConfigError(
                f"An update of {sorted(groups)} alone needs them in groups of their own, and there is none for "
                f"{sorted(missing)}. Write the optimiser's modules as a mapping, such as "
                "modules: {encoder: {}, model: {}, q: {}}."
            )
        return [place for place, name in enumerate(names) if name in groups]

    def _step_on_cpu(self, gradient: np.ndarray, loss: float, chosen: Sequence[int]) -> None:
        """The same, where a number can be looked at without waiting for it."""
        norm = sqrt(np.dot(gradient, gradient))
        finite = isfinite(norm + loss)
        self.norm, self.left_out = norm, 0.0 if finite else 1.0
        if not finite:
            return
        if self.clip is not None and norm > self.clip:
            self.gradient.mul_(self.clip / norm)
        self._adam(chosen, 1.0)

    def _adam(self, chosen: Sequence[int], finite: Tensor | float, **scaling: Tensor | None) -> None:
        for place in chosen:
            group, (weights, gradient, momentum, second_moment) = self.param_groups[place], self._parts[place]
            updates = self._counts[place].add_(finite)
            if self.weight_decay:
                weights[0].mul_(1.0 - self.weight_decay * finite)
            torch._fused_adam_(
                weights, gradient, momentum, second_moment, [], [updates],
                lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=0.0, eps=group["eps"],
                amsgrad=False, maximize=False, **scaling,
            )  # fmt: skip

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it for its profiler, at a third of its cost

    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the last step."""
        return {"grad_norm": self.last_grad_norm, "nonfinite": self.last_bad}

    def state_tensors(self) -> list[Tensor]:
        """Every tensor that `step` changes in place beside the parameters."""
        return [self.updates, self.momentum, self.second_moment]

    def state_dict(self) -> dict[str, Any]:
        """Tensors only."""
        return {"updates": self.updates, "momentum": self.momentum, "second_moment": self.second_moment}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Settings stay as constructed."""
        for name, value in state_dict.items():
            own = getattr(self, name)
            if own.shape != value.shape:
                raise CheckpointError(
                    f"The optimiser state does not fit the model: '{name}' has {value.numel()} numbers, this model "
                    f"needs {own.numel()}. Use the configuration that the run was made with."
                )
            own.copy_(value)
