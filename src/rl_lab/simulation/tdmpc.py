"""The latent model of TD-MPC and TD-MPC2 as a simulator, so that any planner can plan in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.controllers.latent_policies import LatentPolicy
from rl_lab.components.controllers.q_ensembles import QEnsemble
from rl_lab.components.dynamics.latent import LatentModel
from rl_lab.components.encoders.latent import LatentEncoder
from rl_lab.nn.capture import compile_block
from rl_lab.nn.precision import WorkingCopies
from rl_lab.simulation.simulator import Evaluation, ModelState, SimulatedStep, Simulator

TENSOR_CORE_MULTIPLE = 8  # sizes of 16-bit matrices that the units for products of a GPU take whole


class TDMPCSimulator(Simulator):
    """A state is a latent. Its value is that of an action of the policy, by two Qs that are drawn for each call.

    Random numbers are drawn outside of what `compile_blocks` compiles.
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
        self._encode: Callable[..., Tensor] = self._encode_plainly
        self._advance: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._advance_plainly
        self._follow: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._follow_plainly
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
        for name in ("_encode", "_advance", "_follow", "_evaluate", "_choose"):
            setattr(self, name, compile_block(getattr(self, f"{name}_plainly"), dynamic=True))

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
            return SimulatedStep(*self._advance(_plain(state), _plain(action)))

    def _advance_plainly(self, latent: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        following, reward = self.model.step(latent, action)
        return following.float(), self.model.reward_mean(reward), self.model.continuation(following)

    def evaluate(
        self, state: ModelState, actions: Float[Tensor, "batch horizon action"], discount: float = 1.0
    ) -> Evaluation:
        total, weight = torch.zeros_like(actions[:, 0, 0]), torch.ones_like(actions[:, 0, 0])
        latent = _plain(state)
        with self.plan_autocast():
            for action in _plain(actions.transpose(0, 1)):
                latent, total, weight = self._follow(latent, action, total, weight, discount)
        return Evaluation(total, weight, latent)

    def _follow_plainly(
        self, latent: Tensor, action: Tensor, total: Tensor, weight: Tensor, discount: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A step, and what it adds."""
        latent, reward, continuation = self._advance_plainly(latent, action)
        return latent, total + weight * reward, weight * continuation * discount

    def value(self, state: ModelState) -> Float[Tensor, " batch"]:
        noise, pair = self.prior.draw_noise(state.shape[:1]), self.q.draw_pair()
        with self.plan_autocast():
            return self._evaluate(_plain(state), noise, pair)

    def _evaluate_plainly(self, latent: Tensor, noise: Tensor, pair: Tensor) -> Tensor:
        action = self.prior.sample(latent, noise)
        return reduce_pair(self.q.mean(self.q(latent, action, members=pair)), self.pair)

    def policy(self, state: ModelState) -> Float[Tensor, "batch action"]:
        noise = self.prior.draw_noise(state.shape[:1])
        with self.plan_autocast():
            return self._choose(_plain(state), noise)

    def _choose_plainly(self, latent: Tensor, noise: Tensor) -> Tensor:
        return self.prior.sample(latent, noise)


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous and no view of another: the compiler would make a version of its own for each kind of view."""
    tensor = tensor.contiguous()
    return tensor if torch.is_grad_enabled() else tensor.detach()


def reduce_pair(values: Float[Tensor, " 2 *rest"], how: Literal["mean", "min"]) -> Float[Tensor, "*rest"]:
    """One value out of two."""
    return values.mean(0) if how == "mean" else values.amin(0)
