"""Dreams with a gradient through the model on a GPU, on copies of model and actor whose weights are cast once for all
steps. They call the model's own `predict_step` and the actor's own `forward` and `distribution`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_lab.kernels.copies import WorkingCopies
from rl_lab.kernels.deferred import DeferredLoop, Tensors
from rl_lab.kernels.graphs import compile_block


class DeferredDream:
    """Dreams whose gradient reaches the actor through a model without further memory.

    The loop runs on copies of model and actor, in `dtype`. The actor sees states without their gradient, so that it can
    choose all actions again, at once and with gradients, when the states are known.
    """

    def __init__(self, model: Any, actor: Any, dtype: torch.dtype, make: Callable[..., Any]) -> None:
        """`make(deter, stoch, actions)` is called with h and z [horizon + 1, batch, size] and the actions."""
        self._copies = WorkingCopies(dtype)
        self._model, self._actor = self._copies.add(model), self._copies.add(actor)
        self.actor, self._make = actor, make
        self._predict, self._act, self._act_again = (
            compile_block(function) for function in (self._predicted, self._acted, self._acted_again)
        )

    def __call__(self, start: Any, latent_noise: Tensor, action_noise: Tensor) -> Any:
        self._copies.refresh()
        loop, actions = DeferredLoop(self._predict, (start.deter, start.stoch)), []
        for step_latent_noise, step_action_noise in zip(latent_noise, action_noise, strict=True):
            with torch.no_grad():
                actions.append(self._act(step_action_noise, *loop.state))
            loop.advance((actions[-1],), (step_latent_noise,))
        deter, stoch = loop.driven_by(self._act_again(action_noise, *loop.before()))
        deter, stoch = torch.cat([start.deter[None], deter]), torch.cat([start.stoch[None], stoch])
        return self._make(deter, stoch, torch.stack(actions))

    def _predicted(self, deter: Tensor, stoch: Tensor, action: Tensor, noise: Tensor) -> Tensors:
        state = self._model.predict_step(self._model.latent(deter, stoch), action.to(deter.dtype), noise)
        return state.deter, state.stoch, state.deter.clone(), state.stoch.clone()

    def _acted(self, noise: Tensor, deter: Tensor, stoch: Tensor) -> Tensor:
        return _choose(self._actor, torch.cat([deter, stoch], -1), noise)

    def _acted_again(self, noise: Tensor, deter: Tensor, stoch: Tensor) -> Tensor:
        return _choose(self.actor, torch.cat([deter, stoch], -1), noise)


def _choose(actor: Any, features: Tensor, noise: Tensor) -> Tensor:
    return actor.distribution(actor(features)).sample(noise)
