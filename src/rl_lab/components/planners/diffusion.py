"""Planning as inference with a diffusion prior: sequences that the prior finds likely and the model finds good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_lab.components.planners.base import Memory, Plan, Planner, take
from rl_lab.components.planners.particles import (
    Particles,
    effective_sample_size,
    kl_from_prior,
    reweight,
    spread_of,
    uniform_log_weights,
    widest_spread,
)
from rl_lab.components.planners.plan_priors import ActionPrior, GaussianPrior, PlanPrior
from rl_lab.components.planners.search import moments
from rl_lab.errors import ConfigError
from rl_lab.simulation.simulator import ModelState, batch_size, map_state

Steering = Literal["smc", "gradient", "annealed"]
MIN_SPREAD = 1e-4  # of returns: below it they count as equal


@dataclass(frozen=True)
class DiffusionPlan(Plan):
    """A plan with the weights of its candidates as particles of p ∝ p0·exp(βR)."""

    weights: Float[Tensor, "env candidate"]  # they sum to 1
    effective_samples: Float[Tensor, " env"]  # 1 / Σ w², of the weights since the last resampling
    kl: Float[Tensor, " env"]  # how far p is from the prior, in nats

    def metrics(self) -> dict[str, Tensor]:
        return {"effective_samples": self.effective_samples, "prior_kl": self.kl}


class DiffusionPlanner(Planner):
    """Draws plans from p(τ | s0) ∝ p0(τ | s0)·exp(β R(τ)), the minimum over q of KL(q ‖ p0) - β E_q[R].

    p0 is a diffusion prior over action sequences and R the return of the model's rollout with its value at the end
    (`Planner.score`). β = 0 gives the prior back. Ways of steering:

        smc       the prior's own reverse process; particles are weighted by exp(ᾱβR(x̂_0)), where the share ᾱ of the
                  signal rises to 1, and resampled where few of them carry the weight
        gradient  each step is shifted by σ²β∇R(x̂_0(x)), through the model; the weights undo what the shift cost
        annealed  one sequence for each environment; in place of x̂_0 stands the average of draws around it, weighted by
                  exp(βR) (model-based diffusion, Pan et al., 2024); no learned prior

    With `standardize`, β counts in deviations of the returns of a decision's candidates: it then means the same
    whatever the scale of the rewards.
    """

    def __init__(
        self,
        *,
        prior: ActionPrior | None,  # learned, and saved by the role that it has; None: gaussian
        samples: int,
        steps: int,  # of the reverse process
        steering: Steering,
        beta: float,
        standardize: bool,
        scored: int,  # smc: times that candidates are rolled out in the model, spread over the steps; the last is x_0
        resample_below: float,  # smc: share of effective samples below which particles are resampled
        max_shift: float,  # gradient: norm of a sequence's shift, in units of the step's deviation times √entries
        std: float,  # gaussian: of continuous entries
        class_floor: float,  # gaussian: share of equal probabilities in those of discrete actions
        execute: Literal["sample", "best", "mean"],
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        if samples < 1 or steps < 1 or not 1 <= scored <= steps + 1:
            raise ConfigError(
                f"samples={samples}, steps={steps}, scored={scored}: expected at least 1 of each, and at most "
                "steps + 1 for scored: before each step, and at the end."
            )
        if beta < 0.0 or std <= 0.0 or max_shift <= 0.0:
            raise ConfigError(
                f"beta={beta}, std={std}, max_shift={max_shift}: expected beta >= 0 and more than 0 of the others."
            )
        if not 0.0 <= resample_below <= 1.0 or not 0.0 <= class_floor < 1.0:
            raise ConfigError(
                f"resample_below={resample_below}, class_floor={class_floor}: expected shares from 0 to 1, and "
                "class_floor below 1."
            )
        if steering == "gradient" and self.layout.classes:
            raise ConfigError(
                "steering=gradient needs continuous actions, but the environment has discrete ones, which have no "
                "gradient. Use steering=smc or annealed."
            )
        if prior is not None:
            _check_prior(prior, steering, self.horizon)
        self._learned = (prior,)  # within a tuple it is not a part of this module: its role saves and counts it
        self.samples, self.steps, self.steering, self.beta = samples, steps, steering, beta
        self.standardize, self.scored, self.resample_below = standardize, scored, resample_below
        self.max_shift, self.std, self.class_floor, self.execute = max_shift, std, class_floor, execute

    # The prior --------------------------------------------------------------------------------------------------------

    def _prior(self, memory: Memory, state: ModelState, observation: Mapping[str, Tensor] | None) -> PlanPrior:
        (learned,) = self._learned
        if learned is not None:
            return learned.given(self._seen(state, observation), candidates=self.samples, steps=self.steps)
        mean = self.layout.keep_possible(self._first_mean(memory), self.class_floor)
        return GaussianPrior(self.layout, mean, self.std, steps=self.steps, noise_filter=self.noise_filter)

    def _seen(self, state: ModelState, observation: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """The observation that conditions the learned prior; in imagination, the one that the model predicts."""
        if observation is not None:
            return observation
        if not self.simulator.has_observation:
            raise ConfigError(
                f"The learned prior needs an observation, and {type(self.simulator).__name__} predicts none: hand "
                "plan(…) the observation that led to the state."
            )
        return self.simulator.observation(state)

    def draw_noise(self, num_envs: int) -> dict[str, Tensor]:
        device = self.neutral.device
        shape = (self.horizon, self.layout.size)
        return {
            "steps": torch.randn(self.steps + 1, num_envs, self.samples, *shape, device=device),
            "resampling": torch.rand(self.scored, num_envs, 1, 1, 1, device=device),
            "choice": torch.empty(num_envs, self.samples, 1, 1, device=device).exponential_(),
        }

    def plan(
        self,
        state: ModelState,
        memory: Memory,
        *,
        noise: Mapping[str, Tensor] | None = None,
        observation: Mapping[str, Tensor] | None = None,
    ) -> DiffusionPlan:
        self.check_model()
        noise = self.draw_noise(batch_size(state)) if noise is None else noise
        return self._infer(self._prior(memory, state, observation), state, noise)

    def _plan(self, state: ModelState, memory: Memory, noise: Mapping[str, Tensor]) -> DiffusionPlan:
        return self.plan(state, memory, noise=noise)

    def _infer(self, prior: PlanPrior, state: ModelState, noise: Mapping[str, Tensor]) -> DiffusionPlan:
        if self.steering == "annealed":
            return self._anneal(prior, state, noise)
        particles = self._denoise(prior, state, noise)
        candidates = prior.actions(self._by_env(particles.x))
        returns = self.score(state, candidates)
        particles = self._weigh(particles, returns)
        kl = kl_from_prior(particles.log_weights, particles.potential, particles.log_evidence)
        return self._chosen(candidates, returns, particles.log_weights, kl, noise)

    # Steering ---------------------------------------------------------------------------------------------------------

    def _denoise(self, prior: PlanPrior, state: ModelState, noise: Mapping[str, Tensor]) -> Particles:
        """The reverse process of all candidates, from noise to x_0; its last weighing is left to do."""
        start, *draws = noise["steps"].flatten(1, 2)
        particles = Particles.begin(start, envs=noise["steps"].shape[1])
        scored = self._scored_steps()
        for index, draw in enumerate(draws):
            if self.steering == "gradient":
                particles = self._guided_step(prior, state, particles, index, draw)
                continue
            if index in scored:
                particles = self._select(prior, state, particles, index, scored, noise["resampling"])
            mean, std = prior.kernel(particles.x, prior.clean(particles.x, index), index)
            particles = particles._replace(x=mean + std * draw if std else mean)
        return particles

    def _scored_steps(self) -> list[int]:
        """The steps before which candidates are weighed, evenly spread; the weighing of x_0 is not among them."""
        return [round(place * self.steps / self.scored) for place in range(1, self.scored)]

    def _select(
        self,
        prior: PlanPrior,
        state: ModelState,
        particles: Particles,
        index: int,
        scored: list[int],
        offsets: Float[Tensor, "scored env 1 1 1"],
    ) -> Particles:
        """Weigh the particles by what their clean sequences promise now; resample where few carry the weight."""
        returns = self.score(state, prior.actions(self._by_env(prior.clean(particles.x, index))))
        particles = self._weigh(particles, returns, prior.alpha_bar(index), prior.expected_spread(index))
        return particles.resampled(offsets[scored.index(index)].flatten(), below=self.resample_below)

    def _weigh(
        self,
        particles: Particles,
        returns: Float[Tensor, "env candidate"],
        share: float = 1.0,
        expected_spread: float = 1.0,
    ) -> Particles:
        """Put exp(share·βR) into the weights, in place of the potential that is in them."""
        spread = widest_spread(particles.spread, returns, expected_spread)
        return particles._replace(spread=spread).weighed(share * self._tilt(returns, spread))

    def _tilt(
        self, returns: Float[Tensor, "env candidate"], spread: Float[Tensor, " env"]
    ) -> Float[Tensor, "env candidate"]:
        """βR; with `standardize` β is divided by the deviation of the returns. 0 for all where β is 0."""
        if self.beta == 0.0:
            return torch.where(returns.isfinite(), 0.0, returns)
        scale = torch.where(spread > MIN_SPREAD, spread, 1.0) if self.standardize else torch.ones_like(spread)
        return self.beta * returns / scale[:, None]

    def _guided_step(
        self, prior: PlanPrior, state: ModelState, particles: Particles, index: int, draw: Tensor
    ) -> Particles:
        """x' = μ + δ + σε with δ = σ²β∇R(x̂_0(x)); the weights take ln N(x'; μ, σ) - ln N(x'; μ + δ, σ)."""
        with torch.inference_mode(False), torch.enable_grad():
            state = map_state(lambda tensor: tensor.detach().clone(), state)
            x = particles.x.detach().clone().requires_grad_()
            clean = prior.clean(x, index)
            returns = self.score(state, prior.actions(self._by_env(clean)))
            if not returns.requires_grad:
                raise ConfigError(
                    f"steering=gradient cannot see through {type(self.simulator).__name__}: its rewards do not depend "
                    "on actions in a way that torch can differentiate. Use steering=smc or annealed."
                )
            (gradient,) = torch.autograd.grad(torch.where(returns.isfinite(), returns, 0.0).sum(), x)
        returns, gradient = returns.detach(), gradient.nan_to_num(0.0, 0.0, 0.0)
        spread = widest_spread(particles.spread, returns, prior.expected_spread(index))
        mean, std = prior.kernel(particles.x, clean.detach(), index)
        if not std:
            return particles._replace(x=mean, spread=spread)
        scale = self._tilt(torch.ones_like(returns), spread).flatten()[:, None, None]
        shift = std * scale * gradient  # in deviations of the step
        longest = self.max_shift * (shift[0].numel() ** 0.5)
        shift = shift * (longest / shift.flatten(1).norm(dim=1).clamp(min=longest))[:, None, None]
        cost = (shift * draw).flatten(1).sum(1) + 0.5 * shift.square().flatten(1).sum(1)
        log_weights, factor = reweight(particles.log_weights, -self._by_env(cost))
        return particles._replace(
            x=mean + std * (shift + draw), log_weights=log_weights, log_evidence=particles.log_evidence + factor,
            spread=spread,
        )  # fmt: skip

    def _anneal(self, prior: PlanPrior, state: ModelState, noise: Mapping[str, Tensor]) -> DiffusionPlan:
        """For every level of noise, from all of it to little: draws of x_0 around the plan, and their weighted mean.

        Before step k the plan is x̂_0 = E[x_0 | x_k] of the last one, x_k = √ᾱ_k·x̂_0, and the prior's own guess for x_0
        is normal with mean ᾱ_k·x̂_0 and variance 1 - ᾱ_k. The mean of the draws counts as it should be, not as it
        came out (a control variate), so that equal weights leave the prior's guess as it is.
        """
        assert isinstance(prior, GaussianPrior)
        plan = torch.zeros_like(noise["steps"][0, :, :1])
        for index, draw in enumerate(noise["steps"][:-1]):
            kept = prior.alpha_bar(index)
            guess = kept * plan
            drawn = guess + (1.0 - kept) ** 0.5 * draw
            candidates = prior.actions(drawn)
            returns = self.score(state, candidates)
            uniform = uniform_log_weights(len(drawn), self.samples, drawn)
            tilt = self._tilt(returns, spread_of(returns)).to(drawn.dtype)
            log_weights, _ = reweight(uniform, torch.where(tilt.isfinite(), tilt, -torch.inf))
            excess = (log_weights.exp() - uniform.exp())[:, :, None, None]
            plan = guess + (excess * drawn).sum(1, keepdim=True)
        kl = 0.5 * plan.square().flatten(1).sum(1)  # of the prior moved to the plan
        return self._chosen(candidates, returns, log_weights, kl, noise, prior.actions(plan)[:, 0])

    # The decision -----------------------------------------------------------------------------------------------------

    def _chosen(
        self,
        candidates: Float[Tensor, "env candidate horizon action"],
        returns: Float[Tensor, "env candidate"],
        log_weights: Float[Tensor, "env candidate"],
        kl: Float[Tensor, " env"],
        noise: Mapping[str, Tensor],
        plan: Float[Tensor, "env horizon action"] | None = None,
    ) -> DiffusionPlan:
        """Follow the annealed plan, or one candidate by its weight, the best one, or their weighted mean."""
        weights = log_weights.exp()
        best: Int[Tensor, "env elite"] = returns.topk(max(1, self.samples // 10), 1).indices
        mean, variance = moments(candidates, weights.to(candidates.dtype))
        finite = torch.where(weights > 0, weights * returns.nan_to_num(0.0, 0.0, 0.0), 0.0)
        value = finite.sum(1)
        if plan is not None:
            actions = plan
        elif self.execute == "mean":
            actions = self.layout.valid(mean)
        else:
            # Of exponential clocks with these rates, each particle's rings first with its probability.
            clocks = weights / noise["choice"].flatten(1)
            chosen = best[:, :1] if self.execute == "best" else clocks.argmax(1, keepdim=True)
            actions, value = take(candidates, chosen)[:, 0], returns.gather(1, chosen)[:, 0]
        mean = mean if plan is not None or self.execute == "mean" else actions
        return DiffusionPlan(
            actions, value, candidates, returns, best, variance.sqrt(), self._next_memory(mean),
            weights, effective_sample_size(log_weights), kl,
        )  # fmt: skip

    def _by_env(self, rows: Float[Tensor, " row *shape"]) -> Float[Tensor, "env candidate *shape"]:
        return rows.unflatten(0, (-1, self.samples))


def _check_prior(prior: ActionPrior, steering: Steering, horizon: int) -> None:
    """Refuse a learned prior that this planner cannot steer."""
    if steering == "annealed":
        raise ConfigError("steering=annealed plans without a learned prior: use smc or gradient, or prior=null.")
    if prior.horizon != horizon:
        raise ConfigError(
            f"horizon={horizon}, but the prior draws sequences of {prior.horizon}: expected the same. "
            "horizon: '@controllers.<role of the prior>.horizon' keeps them equal."
        )
