"""PlaNet (Hafner et al., 2019): a latent world model, and planning in it at every decision. There is no policy.

An update fits the model to replayed sequences: observation, reward, and a prior that must foresee the posterior. Acting
filters the observation into a latent state and searches for the action sequence with the most predicted reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from rl_lab.components.planners.base import Planner
from rl_lab.components.world_models.base import LatentState
from rl_lab.errors import ConfigError
from rl_lab.losses.returns import kl_beyond_free_nats
from rl_lab.metrics.values import TensorMetrics
from rl_lab.nn.optimizers import Stepper
from rl_lab.records import SequenceBatch
from rl_lab.simulation.rssm import RSSMSimulator
from rl_lab.workflows.base import Mode
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.world_model import Filtered, Losses, Replayed, WorldModelWorkflow
from rl_lab.workflows.world_model_acting import DECODED


class PlaNet(WorldModelWorkflow):
    """Methods appear in the order in which the paper introduces them: model, overshooting, planning."""

    name = "planet"
    update_hooks = ("update_world_model",)
    compiled_pieces: ClassVar[Mapping[str, str]] = {"encode": "DreamerCNN.forward", "world_model_losses": ""}
    loss_names: ClassVar[tuple[str, ...]] = ("observation", "reward", "continue", "divergence", "overshooting")
    planner: Planner

    def __init__(
        self,
        *,
        batch_size: int,
        sequence_length: int,
        train_ratio: float,
        stored_latents: bool,
        free_nats: float,
        overshooting_distance: int,
        exploration: float,
        loss_scales: Mapping[str, float],
    ) -> None:
        super().__init__(
            batch_size=batch_size, sequence_length=sequence_length, train_ratio=train_ratio,
            stored_latents=stored_latents, loss_scales=loss_scales,
        )  # fmt: skip
        self.free_nats, self.overshooting_distance, self.exploration = free_nats, overshooting_distance, exploration
        if not 1 <= overshooting_distance < sequence_length:
            raise ConfigError(
                f"overshooting_distance={overshooting_distance}: expected at least 1 and less than the "
                f"sequence_length of {sequence_length}."
            )
        if (overshooting_distance > 1) != (self.loss_scales["overshooting"] > 0.0):
            raise ConfigError(
                f"overshooting_distance={overshooting_distance} with loss_scales.overshooting="
                f"{self.loss_scales['overshooting']:g}: overshooting needs a distance above 1 and a scale above 0."
            )

    def _bind_context(self, context: WorkflowContext) -> None:
        super()._bind_context(context)
        self.preprocess = context.components.get("preprocess", nn.Identity())
        self.planner = context.controller("planner", Planner)
        self.optimizers = Stepper(context.optimizers, {"world_model": context.components.values()})
        self.model = RSSMSimulator(
            rssm=self.rssm, reward=self.reward, action_size=self.codec.encoded_size, encode=self._embed,
            continuation=self.continuation,
        )  # fmt: skip
        context.simulator.attach(self.model)
        self.planner.attach(context.simulator)
        if context.compile:
            self.model.compile_blocks(context.planning_dtype)  # first: it may copy
            self._compile()

    # Learning the model -----------------------------------------------------------------------------------------------

    def update_world_model(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step."""
        outputs = self._train_step("update_world_model")(self._inputs(batch))
        return self._finish("update_world_model", batch, outputs, phase)

    def _update_world_model_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        self.optimizers.zero_grad()
        with self.autocast():
            losses, states, metrics = self.losses(self._replayed(inputs))
        total = self.total(losses)
        total.backward()
        self.optimizers.step(total)
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()} | {"loss/total": total}
        return self._outputs("update_world_model", states, metrics | self.optimizers.metrics())

    def losses(self, data: Replayed) -> tuple[Losses, LatentState, dict[str, Tensor]]:
        # The same noisy image is seen and must be explained.
        data = data._replace(observation=self.preprocess(data.observation))
        filtered = self.filter(data)
        losses, metrics = self.world_model_losses(filtered, data)
        if self.overshooting_distance > 1:
            losses["overshooting"] = self.overshooting_loss(filtered, data)
        return losses, filtered.states, metrics

    def world_model_losses(self, filtered: Filtered, data: Replayed) -> tuple[Losses, dict[str, Tensor]]:
        """-ln p(o|s) - ln p(r|s) + E[max(KL(q‖p) - free, 0)]: free nats are taken off each step's KL."""
        losses, metrics = self.prediction_losses(filtered, data)
        posterior, prior = self.posterior_and_prior(filtered)
        kl = self.rssm.divergence(posterior, prior)
        losses["divergence"] = kl_beyond_free_nats(kl, self.free_nats).mean()
        return losses, metrics | self.latent_metrics(posterior, prior, kl)

    def overshooting_loss(self, filtered: Filtered, data: Replayed) -> Tensor:
        """KL of the prior after 2 … D steps without observations from the posterior there, which only teaches.

        From every state that is followed by enough steps of its episode; the mean over distances of the means over such
        states.
        """
        length, terms = filtered.posterior.shape[1], []
        state, within = filtered.states.detach(), torch.ones_like(data.is_first)
        for distance in range(1, self.overshooting_distance + 1):
            # Row t goes on to t + distance; where that is a new episode, or beyond the sequence, it ends.
            rows = length - distance
            within = within[:, :rows] & ~data.is_first[:, distance:]
            action = data.prev_action[:, distance:].flatten(0, 1)
            start = state.map(partial(torch.narrow, dim=1, start=0, length=rows)).flatten()
            deter, memory = self.rssm.advance(start, action.to(start.deter.dtype))
            params = self.rssm.prior(deter)
            stoch = self.rssm.sample(params, self.rssm.draw_noise(deter.shape[:1], deter.device), deter.dtype)
            state = LatentState(deter, stoch, memory).map(partial(torch.unflatten, dim=0, sizes=(-1, rows)))
            if distance > 1:  # one step is the plain divergence
                prior = self.rssm.distribution(params.unflatten(0, (-1, rows)))
                posterior = self.rssm.distribution(filtered.posterior[:, distance:].detach())
                kl = kl_beyond_free_nats(self.rssm.divergence(posterior, prior), self.free_nats)
                terms.append((kl * within).sum() / within.sum().clamp(min=1))
        return torch.stack(terms).mean()

    def _embed(self, observation: Mapping[str, Tensor]) -> Tensor:
        return self.encoder(self.preprocess(dict(observation)))

    # Planning ---------------------------------------------------------------------------------------------------------

    def _act(self, inputs: Mapping[str, Tensor], mode: Mode) -> dict[str, Tensor]:
        """Filter the new observation into the latent state, and plan from there; exploration noise while training."""
        plan, latent = self._planned(inputs)
        action = self._explored(plan.action) if mode == "train" else plan.action
        return {DECODED: self.codec.decode(action), **self._state_after(plan, latent, inputs), "action": action.float()}

    def _explored(self, action: Tensor) -> Tensor:
        """Noise while data is collected: added and clipped, or, for classes, a random action now and then."""
        noise = torch.randn_like(action)
        if not self.planner.layout.classes:
            return (action + self.exploration * noise).clamp(-1.0, 1.0)
        random = torch.rand_like(action[:, :1]) < self.exploration
        return torch.where(random, self.planner.layout.uniform(noise), action)
