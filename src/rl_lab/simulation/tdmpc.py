"""The latent model of TD-MPC and TD-MPC2 as a simulator, so that any planner can plan in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.controllers.latent_policies import LatentPolicy
from rl_lab.components.controllers.q_ensembles import QEnsemble
from rl_lab.components.dynamics.latent import LatentModel
from rl_lab.components.encoders.latent import LatentEncoder
from rl_lab.nn.capture import compile_block
from rl_lab.nn.precision import TENSOR_CORE_MULTIPLE, WorkingCopies
from rl_lab.simulation.simulator import Evaluation, ModelState, SimulatedStep, Simulator, account

Result = TypeVar("Result")
WORD = 4  # 16-bit numbers in 64 bits


class TDMPCSimulator(Simulator):
    """A state is a latent. Its value is that of an action of the policy, by two Qs that are drawn for each call.

    Random numbers are drawn outside of what `compile_blocks` compiles. Where the networks have kernels of their own,
    nothing but small pieces is left to compile.
    """

    has_value = True
    has_policy = True

    def __init__(
        self,
        *,
        encoder: LatentEncoder,
        model: LatentModel,
        policy: LatentPolicy,
        q: QEnsemble,
        pair: Literal["mean", "min"] = "mean",  # what is made of the two
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.encoder, self.model, self.prior, self.q = encoder, model, policy, q
        self.pair, self.autocast, self.plan_autocast = pair, autocast, autocast
        self._copies: WorkingCopies | None = None
        self._latent_dtype, self._latent_width = torch.float32, 0  # of plans; 0: no room behind it
        self._encode: Callable[..., Tensor] = self._encode_plainly
        self._advance: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._advance_plainly
        self._account: Callable[..., tuple[Tensor, Tensor]] = account
        self._drawn: Callable[..., Tensor] = policy.drawn
        self._evaluate: Callable[..., Tensor] = self._evaluate_plainly
        self._choose: Callable[..., Tensor] = self._choose_plainly

    def compile_blocks(self, dtype: torch.dtype | None = None) -> None:
        """Compile what a plan calls many times, for any number of rows. The plain methods stay the reference.

        `dtype`: plans are computed with weights of this type, those of the last `observe`.
        """
        if dtype is not None:
            copies = self._copies = WorkingCopies(dtype, multiple=TENSOR_CORE_MULTIPLE)
            self.model, self.prior, self.q = copies.add(self.model), copies.add(self.prior), copies.add(self.q)
            device = next(self.model.parameters()).device.type
            self.plan_autocast = lambda: torch.autocast(device, dtype)
        self._encode = compile_block(self._encode_plainly, dynamic=True)
        self._account = compile_block(account, dynamic=True)
        if dtype is not None and all([self.model.fuse(), self.prior.network.fuse(), self.q.fuse()]):
            self._latent_dtype, self._latent_width = dtype, self.model.trunks.width
            self._drawn = compile_block(self.prior.drawn, dynamic=True)
            return
        self._drawn = self.prior.drawn
        for name in ("_advance", "_evaluate", "_choose"):
            setattr(self, name, _on_plain(compile_block(getattr(self, f"{name}_plainly"), dynamic=True)))

    def observe(
        self,
        observation: Mapping[str, Tensor],
        *,
        previous: ModelState | None = None,
        action: Tensor | None = None,
        is_first: Tensor | None = None,
    ) -> ModelState:
        if self._copies is not None:
            self._copies.refresh()
        with self.autocast():
            return self._encode(self.encoder.augment(observation))

    def _encode_plainly(self, observation: dict[str, Tensor]) -> Tensor:
        return self.encoder(observation).float()

    def step(self, state: ModelState, action: Float[Tensor, "batch action"]) -> SimulatedStep:
        with self.plan_autocast():
            return SimulatedStep(*self._advance(state, action))

    def _advance_plainly(self, latent: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        following, reward = self.model.step(latent, action)
        continuation = self.model.continuation(following)
        return following.to(self._latent_dtype), self.model.reward_mean(reward), continuation

    def spread(self, state: ModelState, candidates: int, particles: int = 1) -> ModelState:
        if not self._latent_width:
            return super().spread(state, candidates, particles)
        envs, size = state.shape
        wide = state.new_empty(envs, candidates * particles, self._latent_width, dtype=self._latent_dtype)
        words = torch.int64 if size % WORD == 0 else self._latent_dtype  # copied at a time
        short = state.to(self._latent_dtype).view(words)
        wide.view(words)[..., : short.shape[1]] = short[:, None]
        wide[..., size:] = 0.0
        return wide.flatten(0, 1)[:, :size]

    def evaluate(
        self, state: ModelState, actions: Float[Tensor, "batch horizon action"], discount: float = 1.0
    ) -> Evaluation:
        total, weight = torch.zeros_like(actions[:, 0, 0]), torch.ones_like(actions[:, 0, 0])
        with self.plan_autocast():
            for action in actions.unbind(1):
                state, reward, continuation = self._advance(state, action)
                total, weight = self._account(total, weight, reward, continuation, discount)
        return Evaluation(total, weight, state)

    def value(self, state: ModelState) -> Float[Tensor, " batch"]:
        noise, pair = self.prior.draw_noise(state.shape[:1]), self.q.draw_pair()
        with self.plan_autocast():
            return self._evaluate(state, noise, pair)

    def _evaluate_plainly(self, latent: Tensor, noise: Tensor, pair: Tensor) -> Tensor:
        action = self._choose_plainly(latent, noise)
        return reduce_pair(self.q.mean(self.q(latent, action, members=pair)), self.pair)

    def policy(self, state: ModelState) -> Float[Tensor, "batch action"]:
        noise = self.prior.draw_noise(state.shape[:1])
        with self.plan_autocast():
            return self._choose(state, noise)

    def _choose_plainly(self, latent: Tensor, noise: Tensor) -> Tensor:
        return self._drawn(self.prior(latent), noise)


def _on_plain(function: Callable[..., Result]) -> Callable[..., Result]:
    """Called with contiguous tensors, no views of others: the compiler would make a version for each kind of view."""

    def call(*tensors: Tensor) -> Result:
        whole = [tensor.contiguous() for tensor in tensors]
        return function(*(whole if torch.is_grad_enabled() else [tensor.detach() for tensor in whole]))

    return call


def reduce_pair(values: Float[Tensor, " 2 *rest"], how: Literal["mean", "min"]) -> Float[Tensor, "*rest"]:
    """One value out of two."""
    return values.mean(0) if how == "mean" else values.amin(0)
