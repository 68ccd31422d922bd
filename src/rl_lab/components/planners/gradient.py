"""Planning by gradient ascent through the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_lab.components.planners.base import Memory, Plan, Planner, take
from rl_lab.errors import ConfigError
from rl_lab.simulation.simulator import ModelState, map_state

MARGIN = 0.99  # of the box: tanh has hardly a slope beyond
ADAM_BETA1, ADAM_BETA2, ADAM_EPS = 0.9, 0.999, 1e-8


class GradientPlanner(Planner):
    """Climbs the return of action sequences tanh(x) with Adam, from several starts; the best ever seen is followed.

    The first start is the rest of the last plan, the others are random. Gradients are clipped for each sequence, so a
    model whose gradients explode moves the plan by one step at most. For differentiable models and continuous actions.
    """

    def __init__(
        self,
        *,
        restarts: int,  # sequences that climb side by side
        iterations: int,
        learning_rate: float,
        clip: float,  # norm of a sequence's gradient
        init_std: float,  # of the random starts, before tanh
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        if self.layout.classes:
            raise ConfigError(
                "The gradient planner needs continuous actions, but the environment has discrete ones, which have no "
                "gradient. Use controllers/planners=cem, mppi or random_shooting."
            )
        if restarts < 1 or iterations < 1 or learning_rate <= 0.0 or clip <= 0.0 or init_std < 0.0:
            raise ConfigError(
                f"restarts={restarts}, iterations={iterations}, learning_rate={learning_rate}, clip={clip}, init_std="
                f"{init_std}: expected at least 1 of the first two, more than 0 of the next two, and init_std >= 0."
            )
        self.restarts, self.iterations = restarts, iterations
        self.learning_rate, self.clip, self.init_std = learning_rate, clip, init_std

    def draw_noise(self, num_envs: int) -> dict[str, Tensor]:
        return {"starts": self._normal(num_envs, self.restarts - 1)}

    def _plan(self, state: ModelState, memory: Memory, noise: Mapping[str, Tensor]) -> Plan:
        # Planning is asked for where gradients are switched off; the graph needs tensors that allow them.
        with torch.inference_mode(False), torch.enable_grad():
            state = map_state(lambda tensor: tensor.detach().clone(), state)
            warm = self._first_mean(memory).clamp(-MARGIN, MARGIN).atanh()[:, None]
            x = torch.cat([warm, self.init_std * noise["starts"]], 1).detach().clone()
            best_x, best = self._climb(state, x)
        candidates = best_x.tanh()
        _, order = best.topk(self.restarts, 1)
        actions = take(candidates, order[:, :1])[:, 0]
        value = best.gather(1, order[:, :1])[:, 0]
        std = candidates.std(1, unbiased=False)
        return Plan(actions, value, candidates, best, order, std, self._next_memory(actions))

    def _climb(self, state: ModelState, x: Tensor) -> tuple[Tensor, Tensor]:
        """The best point that each start passed, and its return."""
        first, second = torch.zeros_like(x), torch.zeros_like(x)
        best_x, best = x, x.new_full(x.shape[:2], -torch.inf)
        for iteration in range(1, self.iterations + 2):
            x = x.detach().requires_grad_(iteration <= self.iterations)
            returns = self.score(state, x.tanh())
            better = returns.detach() > best
            best_x = torch.where(better[:, :, None, None], x.detach(), best_x)
            best = torch.where(better, returns.detach(), best)
            if iteration > self.iterations:
                break
            if not returns.requires_grad:
                raise ConfigError(
                    f"The gradient planner cannot see through {type(self.simulator).__name__}: its rewards do not "
                    "depend on actions in a way that torch can differentiate. Use controllers/planners=cem."
                )
            (gradient,) = torch.autograd.grad(torch.where(returns.isfinite(), returns, 0.0).sum(), x)
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            norm = gradient.flatten(2).norm(dim=2)[:, :, None, None]
            gradient = gradient * (self.clip / norm.clamp(min=self.clip))
            first = ADAM_BETA1 * first + (1.0 - ADAM_BETA1) * gradient
            second = ADAM_BETA2 * second + (1.0 - ADAM_BETA2) * gradient.square()
            size = (second / (1.0 - ADAM_BETA2**iteration)).sqrt() + ADAM_EPS
            x = x + self.learning_rate * first / (1.0 - ADAM_BETA1**iteration) / size
        return best_x, best
