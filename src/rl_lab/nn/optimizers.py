"""LaProp with adaptive gradient clipping, the optimiser of DreamerV3; and steps of several optimisers together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab import ranks
from rl_lab.errors import CheckpointError, ConfigError, nearest
from rl_lab.nn.flat_vector import padded_sizes, piece_views

ROW = 64  # tensors lie in the flat buffers in whole rows, so that a per-tensor factor is one number per row


class _FlatGroup:
    """The moments of one parameter group, each in one buffer: a handful of operations instead of some per tensor."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        sizes, device = padded_sizes(params, ROW), params[0].device
        segments = torch.repeat_interleave(torch.arange(len(params)), torch.tensor(sizes) // ROW)
        self.segments = segments.to(device)  # [rows] which tensor a row belongs to
        self.momentum, self.second_moment, self.work = torch.zeros(3, sum(sizes), device=device).unbind()
        self.updates = torch.zeros(len(params), dtype=torch.int64, device=device)  # of each tensor
        self.views = piece_views(self.work, params, sizes)
        self._choices: dict[frozenset[int], Tensor] = {}  # by the identities of the parameters that a step is for

    def gather(self) -> Tensor:
        """Copy the gradients, averaged over the ranks, into `work`; their norms, [tensors]. Missing ones are 0."""
        present = [(view, p.grad) for view, p in zip(self.views, self.params, strict=True) if p.grad is not None]
        if len(present) < len(self.params):
            self.work.zero_()
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        if ranks.several:
            ranks.average_(self.work)
        return torch.stack(torch._foreach_norm(self.views))

    def chosen(self, only: Collection[Tensor] | None) -> Tensor:
        """[tensors] which of them this step is for."""
        ids = frozenset(map(id, self.params if only is None else only))
        if ids not in self._choices:  # made once: a captured step must not copy from the host
            self._choices[ids] = torch.tensor([id(value) in ids for value in self.params]).to(self.updates.device)
        return self._choices[ids]


class LaProp(torch.optim.Optimizer):
    """Normalise by the running gradient size first, then average: AGC → RMS → momentum → learning rate.

    The learning rate rises linearly from 0 over `warmup` updates and then, where `decay_to` is given, falls linearly to
    it over `decay_updates`. AGC limits the norm of each whole gradient tensor, biases included, to `agc` times the norm
    of its parameter, taken as at least `agc_floor`; `agc=None` switches it off. An update with a gradient or loss that
    is not finite changes neither parameters nor state; `skipped` counts these.

    Nothing is read back to the host, so a step can be captured in a CUDA graph. The parameters must be on their device
    when the optimiser is made. Each tensor counts its own updates, since a step may be for some of them `only`.
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
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.last_grad_norm = torch.zeros((), device=device)  # over all parameters, before clipping
        self.last_learning_rate = torch.zeros((), device=device)  # the largest of all tensors
        self.last_finite = torch.ones((), dtype=torch.bool, device=device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._flat.append(_FlatGroup(self.param_groups[-1]["params"]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients: a step gathers those that there are."""
        for flat in self._flat:
            for param in flat.params:
                param.grad = None

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Tensor] | None = None,
        *,
        loss: Tensor | None = None,
        only: Collection[Tensor] | None = None,
    ) -> Tensor | None:
        """One update, of all parameters or of `only` these. With `loss`, one whose loss is not finite is left out."""
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_norms = [flat.gather() for flat in self._flat]
        self.last_grad_norm = torch.linalg.vector_norm(torch.cat(grad_norms))
        self.last_finite = torch.isfinite(self.last_grad_norm)
        if loss is not None:
            seen = ranks.average(loss.detach()) if ranks.several else loss.detach()
            self.last_finite = self.last_finite & torch.isfinite(seen)
        self.skipped += ~self.last_finite
        rates = []
        for group, flat, norms in zip(self.param_groups, self._flat, grad_norms, strict=True):
            taken = flat.chosen(only) & self.last_finite
            rate = self._learning_rate(group, flat.updates)
            flat.updates += taken
            self._advance(group, flat, self._clipping(group, flat, norms), rate, taken)
            rates.append((rate * taken).max())
        self.last_learning_rate = torch.stack(rates).max()
        return loss if closure is not None else None

    @staticmethod
    def _learning_rate(group: dict[str, Any], updates: Tensor) -> Tensor:
        """[tensors] that of the update after `updates` others: with a warm-up, that of the first one is 0."""
        lr, warmup = group["lr"], group["warmup"]
        rate = (
            (updates / warmup).clamp(max=1.0) * lr if warmup else torch.full(updates.shape, lr, device=updates.device)
        )
        if group["decay_to"] is not None:
            progress = ((updates - warmup) / group["decay_updates"]).clamp(0.0, 1.0)
            rate = rate + progress * (group["decay_to"] - lr)
        return rate

    @staticmethod
    def _clipping(group: dict[str, Any], flat: _FlatGroup, norms: Tensor) -> Tensor:
        """[tensors] AGC: the factor of each gradient, at most 1."""
        if group["agc"] is None:
            return torch.ones_like(norms)
        sizes = torch.stack(torch._foreach_norm(flat.params))
        return (norms / (group["agc"] * sizes.clamp(min=group["agc_floor"]))).clamp(min=1.0).reciprocal()

    @staticmethod
    def _advance(group: dict[str, Any], flat: _FlatGroup, clipping: Tensor, rate: Tensor, taken: Tensor) -> None:
        """The moments and the parameters of the tensors that are `taken`; the others stay as they are."""
        beta1, beta2 = group["betas"]
        share = taken.to(rate.dtype)
        per_tensor = torch.stack([
            clipping.masked_fill(~taken, 0.0), share * (1.0 - beta2), _bias_correction(beta2, flat.updates),
            share * (1.0 - beta1), share * rate / _bias_correction(beta1, flat.updates),
        ])  # fmt: skip
        factor, weight2, correction2, weight1, size = per_tensor[:, flat.segments].unsqueeze(-1).unbind()
        gradient, momentum, second = (x.view(-1, ROW) for x in (flat.work, flat.momentum, flat.second_moment))
        gradient.nan_to_num_(0.0, 0.0, 0.0).mul_(factor)  # bad gradients are not taken, but must not spread
        second.lerp_(gradient.square(), weight2)
        momentum.lerp_(gradient.div_((second / correction2).sqrt_().add_(group["eps"])), weight1)
        torch.mul(momentum, size, out=gradient)
        torch._foreach_sub_(flat.params, flat.views)

    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the last step."""
        skipped = (~self.last_finite).to(self.last_grad_norm.dtype)
        return {"grad_norm": self.last_grad_norm, "learning_rate": self.last_learning_rate, "nonfinite": skipped}

    def state_tensors(self) -> list[Tensor]:
        """Every tensor that `step` changes in place beside the parameters."""
        return [self.skipped, *(x for flat in self._flat for x in (flat.momentum, flat.second_moment, flat.updates))]

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only."""
        return {"skipped": self.skipped} | {
            name: [getattr(flat, name) for flat in self._flat] for name in ("momentum", "second_moment", "updates")
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the existing buffers, so that a captured graph stays valid. Settings stay as constructed."""
        for name in ("momentum", "second_moment", "updates"):
            saved, own = state_dict[name], [getattr(flat, name) for flat in self._flat]
            if [tensor.shape for tensor in saved] != [tensor.shape for tensor in own]:
                raise CheckpointError(
                    f"The optimiser state does not fit the model: '{name}' has sizes {[t.numel() for t in saved]}, "
                    f"this model needs {[t.numel() for t in own]}. Use the configuration that the run was made with."
                )
            for target, source in zip(own, saved, strict=True):
                target.copy_(source)
        self.skipped.copy_(state_dict["skipped"])


def _bias_correction(beta: float, updates: Tensor) -> Tensor:
    """1 - beta^updates without cancellation; 1 before the first update, where nothing is divided by it."""
    if beta == 0.0:
        return torch.ones_like(updates, dtype=torch.float32)
    return -torch.expm1(updates.clamp(min=1) * math.log(beta))


class Stepper:
    """The optimisers of a workflow, which step together or on one side of the model alone.

    `sides` names groups of modules, such as the world model and the behaviour. An optimiser that holds parameters of
    several sides must be a `LaProp`, which can step some of its tensors; any other one belongs to one side.
    """

    def __init__(
        self, optimizers: Mapping[str, torch.optim.Optimizer], sides: Mapping[str, Iterable[nn.Module]]
    ) -> None:
        self.optimizers = dict(optimizers)  # none where a run is only loaded to act
        self._sides = {side: [p for part in parts for p in part.parameters()] for side, parts in sides.items()}
        self._last: dict[str, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def step(self, loss: Tensor, side: str | None = None) -> None:
        """After the backward pass of `loss`. With `side`, only that side's parameters move."""
        for name, optimizer in self.optimizers.items():
            held = [value for group in optimizer.param_groups for value in group["params"]]
            ids = {id(value) for value in (held if side is None else self._sides[side])}
            own = [value for value in held if id(value) in ids]
            if own:
                metrics = self._step_one(name, optimizer, loss, None if len(own) == len(held) else own)
                if name in self._last:  # it has stepped another side before: neither may go by unseen
                    metrics["nonfinite"] = torch.maximum(metrics["nonfinite"], self._last[name]["nonfinite"])
                self._last[name] = metrics

    @staticmethod
    def _step_one(
        name: str, optimizer: torch.optim.Optimizer, loss: Tensor, only: list[Tensor] | None
    ) -> dict[str, Tensor]:
        if only is not None and not isinstance(optimizer, LaProp):
            raise ConfigError(
                f"optimizers.{name} holds parameters of the world model and of the behaviour, and a "
                f"{type(optimizer).__name__} cannot step one of them alone. Use laprop, or an optimiser for each."
            )
        if isinstance(optimizer, LaProp):
            optimizer.step(loss=loss, only=only)
            return optimizer.metrics()
        return checked_step(optimizer, loss)

    def metrics(self) -> dict[str, Tensor]:
        """Metrics of each optimiser's last step since the last call; with several, under their names."""
        several, last = len(self.optimizers) > 1, self._last
        self._last = {}
        return {
            f"optimizer/{f'{name}_' if several else ''}{key}": value
            for name, metrics in last.items() for key, value in metrics.items()
        }  # fmt: skip

    @property
    def captured(self) -> bool:
        """Whether steps may be captured in a CUDA graph: those of torch's own optimisers are not."""
        return all(state_tensors(optimizer) is not None for optimizer in self.optimizers.values())

    def state_tensors(self) -> list[Tensor]:
        """Every tensor beside the parameters that a step changes in place."""
        return [x for optimizer in self.optimizers.values() for x in state_tensors(optimizer) or ()]


def checked_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> dict[str, Tensor]:
    """Step any optimiser after the backward pass of `loss`, unless loss or gradient is not finite.

    Returns the gradient's norm before clipping, and 1 where the step was left out, else 0. RL Lab's own optimisers make
    that check themselves, without waiting for a GPU; for those of torch it is made here.
    """
    if hasattr(optimizer, "metrics"):
        optimizer.step(loss=loss)  # type: ignore[call-overload]
        return optimizer.metrics()
    parameters = [value for group in optimizer.param_groups for value in group["params"] if value.grad is not None]
    ranks.average_gradients_(value.grad for value in parameters)
    norm = nn.utils.get_total_norm([value.grad for value in parameters])
    finite = torch.isfinite(norm + ranks.average(loss.detach()))
    if finite:
        if (clip := getattr(optimizer, "clip", None)) is not None:
            nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        optimizer.step()
    return {"grad_norm": norm, "nonfinite": 1.0 - finite.float()}


def gradient_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> dict[str, Tensor]:
    """Minimise `loss` by one step of any optimiser; returns what `checked_step` does."""
    optimizer.zero_grad()
    loss.backward()
    return checked_step(optimizer, loss)


def torch_optimizer(
    params: Iterable[Tensor] | Iterable[dict[str, Any]], *, name: str, lr: float, clip: float | None, **settings: Any
) -> torch.optim.Optimizer:
    """An optimiser of `torch.optim` by its name, with its own settings. `checked_step` scales the gradient down to a
    global norm of `clip` (None: it does not)."""
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        known = [word for word, value in vars(torch.optim).items() if isinstance(value, type)]
        raise ConfigError(f"name={name}: torch.optim has no such optimiser.{nearest(name, known)}")
    optimizer: Any = kind(params, **{"lr": lr} | settings)
    optimizer.clip = clip
    return optimizer


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor] | None:
    """Every tensor beside the parameters that a step changes in place, for a step that is captured as a CUDA graph.
    None for torch's own optimisers, whose steps are not captured."""
    return optimizer.state_tensors() if hasattr(optimizer, "state_tensors") else None


def scale_learning_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Set each parameter group's learning rate to a share of the configured one."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * share


def warmup_cosine(update: int, *, warmup: int, total: int) -> float:
    """The share of the learning rate at an update, from 0 on: it rises linearly over `warmup` updates, then falls along
    half a cosine, to 0 after `total`."""
    if update < warmup:
        return (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    return 0.5 * (1.0 + math.cos(math.pi * progress))
