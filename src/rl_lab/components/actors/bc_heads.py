"""Heads of cloned policies: from features to a distribution over stored actions, its loss, and the action to take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import expm1, log, pi
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from rl_lab.components.acting import Mode
from rl_lab.errors import ConfigError, nearest
from rl_lab.specs import ActionSpec

HALF_LOG_TWO_PI = 0.5 * log(2.0 * pi)


class ActionHead(nn.Module, ABC):
    """`outputs` numbers for each decision, from which actions are scored and chosen."""

    action_kind: ClassVar[Literal["continuous", "discrete"]]
    outputs: int

    def __init__(self, spec: ActionSpec) -> None:
        super().__init__()
        if spec.kind != self.action_kind:
            raise ConfigError(
                f"{type(self).__name__} is for {self.action_kind} actions; the environment's are {spec.kind}."
            )
        self.spec, self.size = spec, spec.encoded_size

    @abstractmethod
    def loss(self, params: Float[Tensor, "*lead outputs"], action: Shaped[Tensor, "*stored"]) -> Float[Tensor, "*lead"]:
        """The loss of each stored action."""

    @abstractmethod
    def choose(self, params: Float[Tensor, "rows outputs"], mode: Mode) -> Shaped[Tensor, rows * action]:
        """Stored actions: sampled while training, the head's best guess in evaluations."""

    def _flat(self, action: Tensor) -> Float[Tensor, "*lead size"]:
        lead = action.shape[: action.ndim - len(self.spec.shape)]
        return action.float().reshape(*lead, self.size)

    def _stored(self, flat: Tensor) -> Tensor:
        return flat.clamp(-1.0, 1.0).reshape(len(flat), *self.spec.shape)


class CategoricalHead(ActionHead):
    """Discrete actions: cross-entropy, component by component; the likeliest class in evaluations."""

    action_kind = "discrete"

    def __init__(self, spec: ActionSpec) -> None:
        super().__init__(spec)
        self.outputs = self.size

    def loss(self, params: Tensor, action: Tensor) -> Tensor:
        parts = params.split(list(self.spec.classes), -1)
        losses = [
            F.cross_entropy(logits.flatten(0, -2), action[..., index].flatten().long(), reduction="none")
            for index, logits in enumerate(parts)
        ]
        return torch.stack(losses).sum(0).reshape(params.shape[:-1])

    def choose(self, params: Tensor, mode: Mode) -> Tensor:
        chosen = []
        for logits in params.split(list(self.spec.classes), -1):
            sampled = mode == "train"
            chosen.append(torch.multinomial(logits.softmax(-1), 1)[:, 0] if sampled else logits.argmax(-1))
        return torch.stack(chosen, -1).to(torch.int32)


class DeterministicHead(ActionHead):
    """One action, through tanh; squared error. Where the data do two things in one state, it does their mean."""

    action_kind = "continuous"

    def __init__(self, spec: ActionSpec) -> None:
        super().__init__(spec)
        self.outputs = self.size

    def loss(self, params: Tensor, action: Tensor) -> Tensor:
        return (params.tanh() - self._flat(action)).square().mean(-1)

    def choose(self, params: Tensor, mode: Mode) -> Tensor:
        return self._stored(params.tanh())


class GaussianHead(ActionHead):
    """A normal with a mean through tanh and a deviation of softplus + `min_std`; the mean in evaluations."""

    action_kind = "continuous"

    def __init__(self, spec: ActionSpec, *, min_std: float = 0.01, init_std: float = 0.1) -> None:
        super().__init__(spec)
        self.outputs, self.min_std = 2 * self.size, min_std
        self.offset = log(expm1(max(init_std - min_std, 1e-3)))

    def _moments(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = params.chunk(2, -1)
        return mean.tanh(), F.softplus(raw + self.offset) + self.min_std

    def loss(self, params: Tensor, action: Tensor) -> Tensor:
        mean, std = self._moments(params)
        z = (self._flat(action) - mean) / std
        return (0.5 * z.square() + std.log() + HALF_LOG_TWO_PI).sum(-1)

    def choose(self, params: Tensor, mode: Mode) -> Tensor:
        mean, std = self._moments(params)
        return self._stored(mean + std * torch.randn_like(std) if mode == "train" else mean)


class MixtureHead(ActionHead):
    """`modes` normals over the whole action. In evaluations a mode is drawn and its mean taken: the deviations that the
    loss needs would only blur it."""

    action_kind = "continuous"

    def __init__(self, spec: ActionSpec, *, modes: int = 5, min_std: float = 1e-2, init_std: float = 0.1) -> None:
        super().__init__(spec)
        self.modes, self.min_std = modes, min_std
        self.outputs = modes * (1 + 2 * self.size)
        self.offset = log(expm1(max(init_std - min_std, 1e-3)))

    def _mixture(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-weights [*lead, modes]; means and deviations [*lead, modes, size]."""
        logits, mean, raw = params.split([self.modes, self.modes * self.size, self.modes * self.size], -1)
        shape = (*params.shape[:-1], self.modes, self.size)
        std = F.softplus(raw.reshape(shape) + self.offset) + self.min_std
        return logits.log_softmax(-1), mean.reshape(shape).tanh(), std

    def loss(self, params: Tensor, action: Tensor) -> Tensor:
        log_weight, mean, std = self._mixture(params)
        z = (self._flat(action).unsqueeze(-2) - mean) / std
        log_density = -(0.5 * z.square() + std.log() + HALF_LOG_TWO_PI).sum(-1)
        return -torch.logsumexp(log_weight + log_density, -1)

    def choose(self, params: Tensor, mode: Mode) -> Tensor:
        log_weight, mean, std = self._mixture(params)
        chosen = torch.multinomial(log_weight.exp(), 1)[:, 0]
        rows = torch.arange(len(chosen), device=chosen.device)
        action = mean[rows, chosen]
        return self._stored(action + std[rows, chosen] * torch.randn_like(action) if mode == "train" else action)


HEADS: dict[str, type[ActionHead]] = {
    "categorical": CategoricalHead,
    "deterministic": DeterministicHead,
    "gaussian": GaussianHead,
    "gmm": MixtureHead,
}


def make_head(name: str, spec: ActionSpec, *, modes: int = 5, min_std: float | None = None) -> ActionHead:
    """The named head; `auto` is categorical for discrete actions and Gaussian for others."""
    if name == "auto":
        name = "categorical" if spec.kind == "discrete" else "gaussian"
    if name not in HEADS:
        raise ConfigError(f"head='{name}' does not exist.{nearest(name, ['auto', *HEADS])}")
    further: dict[str, float] = {} if min_std is None else {"min_std": min_std}
    if name == "gmm":
        return MixtureHead(spec, modes=modes, **further)
    return GaussianHead(spec, **further) if name == "gaussian" else HEADS[name](spec)
