"""The planner of TD-MPC and TD-MPC2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.base import Memory, Plan, Planner, check_counts, take
from rl_lab.components.planners.search import Search, moments
from rl_lab.errors import ConfigError
from rl_lab.kernels.graphs import compile_block
from rl_lab.simulation.simulator import ModelState
from rl_lab.specs import ActionSpec

MANY_ACTIONS = 20  # with this many action entries or more, TD-MPC2 makes two more iterations


class TDMPCPlanner(Planner):
    """MPPI over elites, among random sequences and those of the policy, that plays one of its elites:

        Π = sequences that follow the policy π in the model
        μ = the mean of the last decision, one step on; σ = max_std
        repeat `iterations` times:
            A = Π and samples - |Π| sequences from N(μ, σ²)
            G = Σ_t γ^t r_t + γ^H Q(z_H, π(z_H)) of each
            the best `elites` of A, weighted by exp(temperature · (G - max G)), give the next μ and σ
        play the first action of one elite, drawn by its weight; keep μ

    The temperature multiplies: a higher one is greedier. Discrete actions: the classes' probabilities take the place of
    μ. They are the weighted frequencies among the elites, mixed with a share `class_floor` of equal ones (which does
    what `min_std` does), and at the beginning of a decision with a share `first_class_floor` (as the wide σ).
    """

    follows_policy = True
    std_floor: Tensor

    def __init__(
        self,
        *,
        action: ActionLayout | ActionSpec | Mapping[str, Any],
        horizon: int,
        samples: int,  # the policy's among them
        policy_samples: int,
        iterations: int | Literal["auto"],  # auto: 6, and 8 with 20 or more action entries
        elites: int,
        temperature: float,
        min_std: float,
        max_std: float,  # that of the first iteration, too
        momentum: float,  # share of the old mean in the new one
        class_floor: float,
        first_class_floor: float,
        **arguments: Any,
    ) -> None:
        super().__init__(action=action, horizon=horizon, bootstrap="always", **arguments)
        many = self.layout.size >= MANY_ACTIONS
        self.iterations = (8 if many else 6) if iterations == "auto" else iterations
        check_counts(samples=samples, iterations=self.iterations, elites=elites)
        if not 1 <= policy_samples <= samples:
            raise ConfigError(
                f"policy_samples={policy_samples}, samples={samples}: expected from 1 to as many as samples."
            )
        if temperature <= 0.0 or not 0.0 <= momentum < 1.0 or not 0.0 <= min_std <= max_std:
            raise ConfigError(
                f"temperature={temperature}, momentum={momentum}, min_std={min_std}, max_std={max_std}: expected a "
                "temperature above 0, momentum from 0 to below 1, and min_std from 0 to max_std."
            )
        if not 0.0 <= class_floor < 1.0 or not 0.0 <= first_class_floor <= 1.0:
            raise ConfigError(
                f"class_floor={class_floor}, first_class_floor={first_class_floor}: expected shares from 0 to 1, and "
                "class_floor below 1."
            )
        self.samples, self.policy_samples, self.elites = samples, policy_samples, elites
        self.temperature, self.max_std, self.momentum = temperature, max_std, momentum
        self.class_floor, self.first_class_floor = class_floor, first_class_floor
        self.planned = horizon  # steps that are planned now, where a schedule lengthens it
        self.register_buffer("std_floor", torch.tensor(float(min_std)))  # a tensor, for it may follow a schedule

    def compile_blocks(self) -> None:
        self.propose, self.refit = compile_block(self.propose), compile_block(self.refit)  # type: ignore[method-assign]

    def draw_noise(self, num_envs: int) -> dict[str, Tensor]:
        candidates = self._normal(self.iterations, num_envs, self.samples - self.policy_samples)
        choice = torch.empty(num_envs, self.elites, device=self.neutral.device).exponential_()
        return {"candidates": candidates[..., : self.planned, :], "choice": choice}

    def _plan(self, state: ModelState, memory: Memory, noise: Mapping[str, Tensor]) -> Plan:
        followed = self.policy_sequences(state)
        search = self.start(memory)
        for draw in noise["candidates"]:
            candidates = self.propose(search, draw, followed)
            returns = self.score(state, candidates)
            elite_returns, elites = returns.topk(self.elites, 1)
            search, weight = self.refit(search, take(candidates, elites), elite_returns)
        # Of exponential clocks with these rates, each elite's rings first with its probability.
        chosen = (weight / noise["choice"]).argmax(1, keepdim=True)
        actions = take(candidates, elites.gather(1, chosen))[:, 0]
        value = elite_returns.gather(1, chosen)[:, 0]
        return Plan(actions, value, candidates, returns, elites, search.std, self.remember(search.mean))

    # The parts, in their order ----------------------------------------------------------------------------------------

    def policy_sequences(self, state: ModelState) -> Float[Tensor, "env candidate planned action"]:
        """Sequences that follow the model's policy; they compete in every iteration."""
        simulator, actions = self.simulator, list[Tensor]()
        state = simulator.spread(state, self.policy_samples)
        for time in range(self.planned):
            actions.append(simulator.policy(state))
            if time + 1 < self.planned:  # nothing follows the last action
                state = simulator.step(state, actions[-1]).state
        return torch.stack(actions, 1).unflatten(0, (-1, self.policy_samples)).to(self.neutral.dtype)

    def start(self, memory: Memory) -> Search:
        """The distribution of the first iteration: last decision's mean, and the widest deviation."""
        mean = self.layout.keep_possible(self._first_mean(memory)[:, : self.planned], self.first_class_floor)
        return Search(mean.clone(), torch.full_like(mean, self.max_std))  # a view would be compiled for itself

    def propose(
        self,
        search: Search,
        noise: Float[Tensor, "env drawn planned action"],
        followed: Float[Tensor, "env followed planned action"],
    ) -> Float[Tensor, "env candidate planned action"]:
        """The candidates of one iteration: the policy's, then those drawn around the mean."""
        mean, std = (part[:, None].expand_as(noise) for part in search)
        return torch.cat([followed, self.layout.sample(mean, std, noise)], 1)

    def refit(
        self,
        search: Search,
        elites: Float[Tensor, "env elite planned action"],
        returns: Float[Tensor, "env elite"],
    ) -> tuple[Search, Float[Tensor, "env elite"]]:
        """The distribution of the next iteration, and the elites' weights. Where no return is finite, all weights are
        0 and the old distribution stays."""
        weight = torch.softmax(self.temperature * returns, 1).nan_to_num(0.0)
        found = weight.amax(1)[:, None, None] > 0
        mean, variance = moments(elites, weight.to(elites.dtype))
        mean = self.layout.keep_possible(torch.where(found, mean, search.mean), self.class_floor)
        mean = torch.lerp(mean, search.mean, self.momentum) if self.momentum else mean
        std = torch.where(found, variance.sqrt().clamp(max=self.max_std), search.std)
        return Search(mean, torch.maximum(std, self.std_floor)), weight

    def remember(self, mean: Float[Tensor, "env planned action"]) -> Memory:
        """The mean, one step on, for the next decision; neutral where nothing was planned."""
        unplanned = self.neutral.expand(len(mean), self.horizon - self.planned, -1)
        return self._next_memory(torch.cat([mean, unplanned], 1))
