"""Dreams whose gradient reaches the actor through the model, with each of its weights used once for all steps."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.controllers.actors import Actor
from rl_lab.components.representation_learners.base import Dream, LatentState, StateSpaceModel
from rl_lab.nn.capture import compile_block
from rl_lab.nn.precision import WorkingCopies
from rl_lab.nn.recorded_loop import RecordedLoop, Tensors


class RecordedDream:
    """`StateSpaceModel.imagine` with the actor, for models without further memory.

    The loop runs on copies of both, in `dtype`. Actions follow states without a gradient by these, so that the actor
    can choose all of them again, at once, when the states are known. To be copied, the model must not be compiled yet.
    """

    def __init__(self, rssm: StateSpaceModel, actor: Actor, dtype: torch.dtype) -> None:
        self.actor, self._copies = actor, WorkingCopies(dtype)
        self._rssm, self._copied_actor = self._copies.add(rssm), self._copies.add(actor)

    def compile(self) -> None:
        for name in ("_predict", "_choose", "_choose_again"):
            setattr(self, name, compile_block(getattr(self, name)))

    def __call__(
        self, start: LatentState, latent_noise: Float[Tensor, "horizon b *latent"],
        action_noise: Float[Tensor, "horizon b *action"],
    ) -> Dream:  # fmt: skip
        self._copies.refresh()
        loop, actions = RecordedLoop(self._predict, (start.deter, start.stoch)), []
        for step_latent_noise, step_action_noise in zip(latent_noise, action_noise, strict=True):
            with torch.no_grad():
                actions.append(self._choose(step_action_noise, *loop.state))
            loop.advance((actions[-1],), (step_latent_noise,))
        deter, stoch = loop.driven_by(self._choose_again(action_noise, *loop.before()))
        states = LatentState(torch.cat([start.deter[None], deter]), torch.cat([start.stoch[None], stoch]))
        return Dream(states, states.features, torch.stack(actions))

    def _predict(self, deter: Tensor, stoch: Tensor, action: Tensor, noise: Tensor) -> Tensors:
        state = self._rssm.predict_step(LatentState(deter, stoch), action.to(deter.dtype), noise)
        return state.deter, state.stoch, state.deter.clone(), state.stoch.clone()

    def _choose(self, noise: Tensor, deter: Tensor, stoch: Tensor) -> Tensor:
        features = LatentState(deter, stoch).features
        return self._copied_actor.distribution(self._copied_actor(features)).sample(noise)

    def _choose_again(self, noise: Tensor, deter: Tensor, stoch: Tensor) -> Tensor:
        features = LatentState(deter, stoch).features
        return self.actor.distribution(self.actor(features)).sample(noise)
