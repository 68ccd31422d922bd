"""Return computers that a configuration can name: settings around the functions."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Bool, Float
from torch import Tensor

from rl_lab.components.return_computers.functions import (
    Advantages,
    discounted_returns,
    gae,
    lambda_returns,
    live_discount,
    n_step_returns,
)
from rl_lab.errors import ConfigError


class ReturnComputer(ABC):
    """Value targets of all records but the last, [batch, time] unless `dim` says otherwise."""

    def __init__(self, *, discount: float = 0.99, dim: int = 1) -> None:
        if not 0.0 <= discount <= 1.0:
            raise ConfigError(f"discount={discount}: expected a number from 0 to 1.")
        self.discount, self.dim = discount, dim

    @abstractmethod
    def __call__(
        self,
        reward: Float[Tensor, "*records"],
        is_last: Bool[Tensor, "*records"],
        is_terminal: Bool[Tensor, "*records"],
        value: Float[Tensor, "*records"],
    ) -> Float[Tensor, "*states"]: ...


class DiscountedReturn(ReturnComputer):
    """All rewards to the episode's end."""

    def __call__(self, reward: Tensor, is_last: Tensor, is_terminal: Tensor, value: Tensor) -> Tensor:
        return discounted_returns(reward, live_discount(is_terminal, self.discount), is_last, value, dim=self.dim)


class NStepReturn(ReturnComputer):
    """`n` rewards, then the value."""

    def __init__(self, *, n: int = 5, discount: float = 0.99, dim: int = 1) -> None:
        super().__init__(discount=discount, dim=dim)
        if n < 1:
            raise ConfigError(f"n={n}: an n-step return needs at least one step.")
        self.n = n

    def __call__(self, reward: Tensor, is_last: Tensor, is_terminal: Tensor, value: Tensor) -> Tensor:
        return n_step_returns(reward, live_discount(is_terminal, self.discount), is_last, value, self.n, dim=self.dim)


class LambdaReturn(ReturnComputer):
    """TD(λ); `mix` is λ."""

    def __init__(self, *, mix: float = 0.95, discount: float = 0.99, dim: int = 1) -> None:
        super().__init__(discount=discount, dim=dim)
        self.mix = _checked_mix(mix)

    def __call__(self, reward: Tensor, is_last: Tensor, is_terminal: Tensor, value: Tensor) -> Tensor:
        mix = self.mix * (1.0 - is_last.to(reward.dtype))
        return lambda_returns(reward, live_discount(is_terminal, self.discount), value, mix, dim=self.dim)


class GAE(ReturnComputer):
    """Generalised advantage estimation; `advantages` gives them together with the value targets."""

    def __init__(self, *, mix: float = 0.95, discount: float = 0.99, dim: int = 1) -> None:
        super().__init__(discount=discount, dim=dim)
        self.mix = _checked_mix(mix)

    def __call__(self, reward: Tensor, is_last: Tensor, is_terminal: Tensor, value: Tensor) -> Tensor:
        return self.advantages(reward, is_last, is_terminal, value).target

    def advantages(self, reward: Tensor, is_last: Tensor, is_terminal: Tensor, value: Tensor) -> Advantages:
        live = live_discount(is_terminal, self.discount)
        return gae(reward, live, is_last, value, self.mix, dim=self.dim)


def _checked_mix(mix: float) -> float:
    if not 0.0 <= mix <= 1.0:
        raise ConfigError(f"mix={mix}: λ must be from 0 to 1.")
    return mix
