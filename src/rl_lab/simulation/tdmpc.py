"""The latent model of TD-MPC and TD-MPC2 as a simulator, so that any planner can plan in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_lab.components.actors.tdmpc import TDMPCPolicy
from rl_lab.components.dynamics.tdmpc import TDMPCModel
from rl_lab.components.encoders.tdmpc import TDMPCEncoder
from rl_lab.components.q_functions.ensemble import QEnsemble
from rl_lab.kernels.copies import WorkingCopies
from rl_lab.kernels.graphs import compile_block
from rl_lab.simulation.simulator import ModelState, SimulatedStep, Simulator

Result = TypeVar("Result")
QReduction = Literal["mean", "min"]


class TDMPCSimulator(Simulator):
    """A state is a latent. Its value is that of an action of the policy, by two Qs that are drawn for each call.

    Random numbers are drawn in `value` and `policy`; what they call has none, so that it can be compiled.
    """

    has_value = True
    has_policy = True

    def __init__(
        self,
        *,
        encoder: TDMPCEncoder,
        model: TDMPCModel,
        policy: TDMPCPolicy,
        q: QEnsemble,
        q_reduction: QReduction,  # of the two Qs
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.encoder, self.model, self.prior, self.q = encoder, model, policy, q
        self.discount = model.discount
        self.has_logits = len(policy.codec.spec.classes) == 1
        self.q_reduction, self.autocast, self.plan_autocast = q_reduction, autocast, autocast
        self._copies: WorkingCopies | None = None
        self._pending: Callable[[], None] | None = None  # compiles, at the first `observe`

    # The model --------------------------------------------------------------------------------------------------------

    def observe(
        self,
        observation: Mapping[str, Tensor],
        *,
        previous: ModelState | None = None,
        action: Tensor | None = None,
        is_first: Tensor | None = None,
    ) -> ModelState:
        if self._pending is not None:
            compile_now, self._pending = self._pending, None
            compile_now()
        if self._copies is not None:
            self._copies.refresh()
        with self.autocast():
            return self._encode(self.encoder.augment(observation))

    def _encode(self, observation: dict[str, Tensor]) -> Tensor:
        return self.encoder(observation).float()

    def step(self, state: ModelState, action: Float[Tensor, "batch action"]) -> SimulatedStep:
        with self.plan_autocast():
            return self._advance(state, action)

    def _advance(self, latent: Tensor, action: Tensor) -> SimulatedStep:
        following, reward = self.model.step(latent, action)
        continuation = self.model.continuation(following)
        return SimulatedStep(following.to(latent.dtype), self.model.reward_mean(reward), continuation)

    def spread(self, state: ModelState, candidates: int, particles: int = 1) -> ModelState:
        state = state if self._copies is None else state.to(self._copies.dtype)
        return super().spread(state, candidates, particles)

    def value(self, state: ModelState) -> Float[Tensor, " batch"]:
        noise, members = self.prior.draw_noise(state.shape[:1]), self.q.draw_pair()
        with self.plan_autocast():
            return self._value(state, noise, members)

    def _value(self, latent: Tensor, noise: Tensor, members: Int[Tensor, " 2"]) -> Tensor:
        action = self.prior.sample(latent, noise)
        return reduce_q(self.q.mean(self.q(latent, action, members=members)), self.q_reduction)

    def policy(self, state: ModelState) -> Float[Tensor, "batch action"]:
        noise = self.prior.draw_noise(state.shape[:1])
        with self.plan_autocast():
            return self._sample(state, noise)

    def _sample(self, latent: Tensor, noise: Tensor) -> Tensor:
        return self.prior.sample(latent, noise)

    def policy_logits(self, state: ModelState) -> Float[Tensor, "batch classes"]:
        if not self.has_logits:
            return super().policy_logits(state)
        with self.plan_autocast():
            return self.prior(state)

    # Speed ------------------------------------------------------------------------------------------------------------

    def compile_blocks(self, dtype: torch.dtype | None = None) -> None:
        """Compile the methods that a plan calls many times, for any number of rows. The plain methods stay the
        reference. It is done at the first `observe`: until then the modules may be changed.

        `dtype`: plans are computed with copies of the weights of this type, which `observe` renews.
        """
        self._pending = partial(self._compile, dtype)

    def _compile(self, dtype: torch.dtype | None) -> None:
        self._encode = compile_block(self._encode, dynamic=True)  # type: ignore[method-assign]
        if dtype is not None:
            copies = self._copies = WorkingCopies(dtype)
            self.model, self.prior, self.q = copies.add(self.model), copies.add(self.prior), copies.add(self.q)
            device = next(self.model.parameters()).device.type
            self.plan_autocast = lambda: torch.autocast(device, dtype)
        for name in ("_advance", "_value", "_sample"):
            setattr(self, name, _with_whole_tensors(compile_block(getattr(self, name), dynamic=True)))


def _with_whole_tensors(function: Callable[..., Result]) -> Callable[..., Result]:
    """Called with contiguous tensors, no views of others: the compiler would make a version for each kind of view."""

    def call(*tensors: Tensor) -> Result:
        whole = [tensor.contiguous() for tensor in tensors]
        return function(*(whole if torch.is_grad_enabled() else [tensor.detach() for tensor in whole]))

    return call


def reduce_q(values: Float[Tensor, " 2 *rest"], how: QReduction) -> Float[Tensor, "*rest"]:
    """The mean or the smaller of two values."""
    return values.mean(0) if how == "mean" else values.amin(0)
