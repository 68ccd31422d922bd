"""The base class of planners: the plan they return, the memory they keep, and the score of action sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.colored_noise import noise_filter
from rl_lab.errors import ConfigError, NonFiniteError
from rl_lab.simulation.service import SimulatorService
from rl_lab.simulation.simulator import ModelState, Simulator, batch_size
from rl_lab.specs import ActionSpec

Memory = dict[str, Tensor]  # kept from one decision to the next, environments first; zeros: no memory
Bootstrap = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Plan:
    """The chosen sequence and the candidates of the last iteration; actions are encoded."""

    actions: Float[Tensor, "env horizon action"]  # the sequence that is followed
    value: Float[Tensor, " env"]  # the return that the model expects of it
    candidates: Float[Tensor, "env candidate horizon action"]
    returns: Float[Tensor, "env candidate"]  # -inf where the model gave NaN or infinity
    elites: Int[Tensor, "env elite"]  # positions among the candidates, best first
    std: Float[Tensor, "env horizon action"]  # deviations of the search distribution at the end
    memory: Memory  # for the next decision

    @property
    def action(self) -> Float[Tensor, "env action"]:
        """The first action of the sequence."""
        return self.actions[:, 0]

    @property
    def is_finite(self) -> Bool[Tensor, " env"]:
        """Whether any candidate had a finite return."""
        return self.returns.isfinite().any(-1)

    def metrics(self) -> dict[str, Tensor]:
        """Values to watch beside the expected return, each [env]."""
        return {}

    def require_finite(self) -> None:
        """Stop where the model was not finite for any candidate. Waits for the device: call it outside of graphs."""
        bad = (~self.is_finite).nonzero().flatten().tolist()
        if bad:
            raise NonFiniteError(
                f"The planner's model gave NaN or infinite returns for all {self.returns.shape[1]} candidates of "
                f"environment {bad[0]}: a dynamics, reward or value prediction is not finite. Look at the model's "
                "losses; a lower learning rate, a shorter horizon or clipped targets usually help."
            )


class Planner(nn.Module, ABC):
    """A controller that chooses actions by trying them in a `Simulator`.

    One call plans for all environments: their candidates, each with its particles, are one batch of the model. Shapes
    are static, nothing waits for the device, and the noise is drawn before (`draw_noise`), so a plan can be captured.
    """

    follows_policy: ClassVar[bool] = False  # whether the model must have a policy
    neutral: Tensor
    noise_filter: Tensor | None

    def __init__(
        self,
        *,
        action: ActionLayout | ActionSpec | Mapping[str, Any],
        horizon: int,
        discount: float | Literal["auto"],  # auto: the model's
        particles: int,  # rollouts of each candidate in an uncertain model, averaged
        bootstrap: Bootstrap,  # the model's value at the horizon; auto: where it has one
        warm_start: bool,  # begin with the plan of the decision before
        noise_beta: float,  # how slowly the noise of candidates changes in time: its power is 1 / frequency^beta
    ) -> None:
        super().__init__()
        if horizon < 1 or particles < 1:
            raise ConfigError(f"horizon={horizon}, particles={particles}: expected at least 1 of each.")
        if discount != "auto" and not 0.0 < discount <= 1.0:
            raise ConfigError(f"discount={discount}: expected auto, or a number above 0 and at most 1.")
        self.layout = ActionLayout.of(action)
        self.horizon, self.particles = horizon, particles
        self._own_discount = None if discount == "auto" else float(discount)
        self.bootstrap, self.warm_start = bootstrap, warm_start
        self.register_buffer("neutral", self.layout.neutral(), persistent=False)
        self.register_buffer(
            "noise_filter", noise_filter(horizon, noise_beta) if noise_beta else None, persistent=False
        )
        self._service = SimulatorService()

    # The model --------------------------------------------------------------------------------------------------------

    def attach(self, simulator: Simulator | SimulatorService) -> None:
        """Plan in this model from now on."""
        self._service = simulator if isinstance(simulator, SimulatorService) else SimulatorService(simulator)
        self.check_model()

    @property
    def simulator(self) -> Simulator:
        return self._service.simulator

    @property
    def discount(self) -> float:
        """γ: the planner's own where it is set, else the model's."""
        return self.simulator.discount if self._own_discount is None else self._own_discount

    def check_model(self) -> None:
        """Refuse a model that lacks what this planner needs."""
        simulator = self.simulator
        if not simulator.has_reward:
            raise ConfigError(
                f"{type(self).__name__} needs rewards, but {type(simulator).__name__} predicts none. Give the model a "
                "reward predictor."
            )
        if self.bootstrap == "always" and not simulator.has_value:
            raise ConfigError(
                f"{type(self).__name__} has bootstrap=always, but {type(simulator).__name__} predicts no value. Give "
                "the model a critic, or use bootstrap=auto with a longer horizon."
            )
        if self.follows_policy and not simulator.has_policy:
            raise ConfigError(
                f"{type(self).__name__} follows the model's policy, but {type(simulator).__name__} has none. Use "
                "controllers/planners=mppi or cem."
            )

    def score(
        self, state: ModelState, candidates: Float[Tensor, "env candidate horizon action"]
    ) -> Float[Tensor, "env candidate"]:
        """Σ_{t<H} γ^t c_t r_{t+1} + γ^H c_H V(s_H) for each sequence, averaged over particles; c_t is the probability
        that the episode has not ended by step t.

        Where the model's V(s_H) includes the reward on arriving at s_H, it takes the place of that reward:
        Σ_{t<H-1} γ^t c_t r_{t+1} + γ^(H-1) c_{H-1} V(s_H). A return that is NaN or infinite counts as -inf: such a
        candidate never wins.
        """
        simulator = self.simulator
        envs, count = candidates.shape[:2]
        actions = candidates.flatten(0, 1)
        actions = actions.repeat_interleave(self.particles, 0) if self.particles > 1 else actions
        start = simulator.spread(state, count, self.particles)
        evaluation = simulator.evaluate(start, actions, self.discount)
        total = evaluation.total
        if simulator.has_value and self.bootstrap != "never":
            value = simulator.value(evaluation.state)
            if simulator.value_includes_reward:
                total = total + evaluation.last_weight * (value - evaluation.last_reward)
            else:
                total = total + evaluation.weight * value
        mean = total.view(envs, count, self.particles).mean(-1)
        return torch.where(mean.isfinite(), mean, -torch.inf)

    # Planning ---------------------------------------------------------------------------------------------------------

    def initial_memory(self, num_envs: int) -> Memory:
        """The memory at the start of an episode: zeros."""
        mean = self.neutral.new_zeros(num_envs, self.horizon, self.layout.size)
        return {"plan_mean": mean, "plan_known": mean.new_zeros(num_envs)}

    def compile_blocks(self) -> None:
        """Compile the parts of a plan outside of the model, where that pays. The plain methods stay the reference."""

    @abstractmethod
    def draw_noise(self, num_envs: int) -> dict[str, Tensor]:
        """All standard normal noise of one plan, from the device's global generator."""

    def plan(
        self,
        state: ModelState,
        memory: Memory,
        *,
        noise: Mapping[str, Tensor] | None = None,
        observation: Mapping[str, Tensor] | None = None,  # that led to `state`: learned priors are conditioned on it
    ) -> Plan:
        """Plan for every environment from its model state. Put `memory` to zero where an episode begins."""
        self.check_model()
        return self._plan(state, memory, self.draw_noise(batch_size(state)) if noise is None else noise)

    @abstractmethod
    def _plan(self, state: ModelState, memory: Memory, noise: Mapping[str, Tensor]) -> Plan: ...

    def _normal(self, *lead: int) -> Float[Tensor, "*lead horizon action"]:
        """Noise for whole sequences, white or coloured."""
        white = torch.randn(*lead, self.horizon, self.layout.size, device=self.neutral.device)
        return white if self.noise_filter is None else self.noise_filter @ white

    def _first_mean(self, memory: Memory) -> Float[Tensor, "env horizon action"]:
        """Last decision's mean, one step on; the neutral one where there is none."""
        if not self.warm_start:
            return self.neutral.expand_as(memory["plan_mean"])
        return torch.where(memory["plan_known"][:, None, None] > 0, memory["plan_mean"], self.neutral)

    def _next_memory(self, mean: Float[Tensor, "env horizon action"], last: Tensor | None = None) -> Memory:
        """The mean shifted by one step; its last step is `last`, or neutral."""
        last = self.neutral.expand_as(mean[:, 0]) if last is None else last
        return {"plan_mean": torch.cat([mean[:, 1:], last[:, None]], 1), "plan_known": torch.ones_like(mean[:, 0, 0])}


def take(
    candidates: Float[Tensor, "env candidate horizon action"], indices: Int[Tensor, "env chosen"]
) -> Float[Tensor, "env chosen horizon action"]:
    """The sequences at these positions of each environment."""
    return candidates.gather(1, indices[:, :, None, None].expand(-1, -1, *candidates.shape[2:]))


def check_counts(*, samples: int, iterations: int, elites: int | None = None) -> None:
    """Refuse numbers that no planner can sample with."""
    if samples < 1 or iterations < 1:
        raise ConfigError(f"samples={samples}, iterations={iterations}: expected at least 1 of each.")
    if elites is not None and not 1 <= elites <= samples:
        raise ConfigError(f"elites={elites}, samples={samples}: expected from 1 to as many elites as samples.")
