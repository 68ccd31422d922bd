"""From rewards and values to returns, advantages and value targets."""

from rl_lab.components.return_computers.computers import (
    GAE,
    DiscountedReturn,
    LambdaReturn,
    NStepReturn,
    ReturnComputer,
)
from rl_lab.components.return_computers.functions import (
    Advantages,
    discounted_returns,
    first_n_step_return,
    gae,
    lambda_returns,
    live_discount,
    n_step_returns,
    recursive_returns,
)

__all__ = [
    "GAE",
    "Advantages",
    "DiscountedReturn",
    "LambdaReturn",
    "NStepReturn",
    "ReturnComputer",
    "discounted_returns",
    "first_n_step_return",
    "gae",
    "lambda_returns",
    "live_discount",
    "n_step_returns",
    "recursive_returns",
]
