"""PlaNet (Hafner et al., 2019): a latent world model, and planning in it at every decision. There is no policy.

An update fits the model to replayed sequences: observation, reward, and a prior that must foresee the posterior. Acting
filters the observation into a latent state and searches for the action sequence with the most predicted reward. Shapes
are static and nothing waits for the device, so that both can be captured as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from rl_lab.components.planners.base import Planner
from rl_lab.components.predictors import ContinuePredictor
from rl_lab.components.representation_learners.base import LatentState
from rl_lab.errors import ConfigError, nearest
from rl_lab.metrics.values import TensorMetrics
from rl_lab.nn.capture import CapturedStep, compile_block
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.nn.precision import planning_dtype
from rl_lab.records import OBSERVATION_PREFIX, Observation, SequenceBatch
from rl_lab.simulation.latent import LatentSimulator
from rl_lab.workflows.base import AgentState, Mode
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.latent import PROBE_SCALE, LatentWorkflow, Replayed

LOSS_SCALES = {
    "observation": 1.0, "probe": PROBE_SCALE, "reward": 10.0, "continue": 1.0, "divergence": 1.0, "overshooting": 0.0,
}  # fmt: skip

Losses = dict[str, Tensor]
Step = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class PlaNet(LatentWorkflow):
    """Methods appear in the order in which the paper introduces them: model, overshooting, planning."""

    name = "planet"
    update_hooks = ("update_world_model",)

    def __init__(
        self,
        *,
        batch_size: int = 50,
        sequence_length: int = 50,
        train_ratio: float = 2000.0,  # replayed records per env step: 2000 / (50 × 50) = 0.8 updates
        stored_latents: bool = False,
        free_nats: float = 3.0,
        overshooting_distance: int = 1,  # prior steps without observations; 1: only the plain divergence
        exploration: float = 0.3,  # deviation of the noise on actions; for classes, how often one is drawn at random
        loss_scales: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size, sequence_length=sequence_length, train_ratio=train_ratio,
            stored_latents=stored_latents,
        )  # fmt: skip
        for name in loss_scales or {}:
            if name not in LOSS_SCALES:
                raise ConfigError(f"loss_scales.{name}: there is no such loss.{nearest(name, LOSS_SCALES)}")
        self.loss_scales = LOSS_SCALES | dict(loss_scales or {})
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
        predictor = context.components.get("continue")
        self.continuation = predictor if isinstance(predictor, ContinuePredictor) else None
        self.planner: Planner = context.controller("planner", Planner)
        self.optimizer = context.optimizer("main", FlatAdam) if context.optimizers else None  # none where it only acts
        self.model = LatentSimulator(
            rssm=self.rssm, reward=self.reward, action_size=self.codec.encoded_size, encode=self._embed,
            continuation=self.continuation,
        )  # fmt: skip
        context.simulator.attach(self.model)
        self.planner.attach(context.simulator)
        self._metric_names: tuple[str, ...] = ()
        self._step: Step = self._train_step
        self._act_steps: dict[tuple[int, Mode], Step] = {}
        if context.compile:
            self._compile()

    def _compile(self) -> None:
        """Compiled pieces inside captured CUDA graphs. The plain methods stay the reference."""
        self.model.compile_steps(planning_dtype(self.context.device, self.context.autocast_dtype))  # first: it may copy
        self.rssm.compile_steps(self.context.autocast_dtype or torch.float32)
        self._encode = compile_block(self._encode)  # type: ignore[method-assign]
        self._prediction_losses = compile_block(self._prediction_losses)  # type: ignore[method-assign]
        self._step = CapturedStep(self._train_step, self._changing_tensors)

    # Learning the model -----------------------------------------------------------------------------------------------

    def update_world_model(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step."""
        outputs = self._step(self._inputs(batch))
        self._write_latents(batch, outputs, phase)
        return TensorMetrics(self._metric_names, outputs["metrics"])

    def _train_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        assert self.optimizer is not None
        with self.context.autocast():
            losses, states, metrics = self.losses(self._replayed(inputs))
            total = torch.stack([self.loss_scales[name] * loss for name, loss in losses.items()]).sum()
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step(loss=total)
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()} | {"loss/total": total}
        metrics |= {f"optimizer/{name}": value for name, value in self.optimizer.metrics().items()}
        packed = TensorMetrics.pack(metrics)
        self._metric_names = packed.names
        latents = self.rssm.to_stored(states.detach()) if self.latent_specs else {}
        return latents | {"metrics": packed.values_vector}

    def batch_losses(self, batch: SequenceBatch) -> Losses:
        with self.context.autocast():
            return self.losses(self._replayed(self._inputs(batch)))[0]

    def losses(self, data: Replayed) -> tuple[Losses, LatentState, dict[str, Tensor]]:
        """Every term of the loss, unscaled; the posterior states; values to watch."""
        # The same noisy image is seen and must be explained.
        data = data._replace(observation=self.preprocess(data.observation))
        embed = self._encode(data.observation)
        states, posterior_params = self.rssm.observe(embed, data.prev_action, data.is_first, data.initial)
        losses, metrics = self._prediction_losses(states, posterior_params, embed, data)
        if self.overshooting_distance > 1:
            losses["overshooting"] = self.overshooting_loss(states, posterior_params, data)
        return losses, states, metrics

    def _encode(self, observation: Mapping[str, Tensor]) -> Tensor:
        return self.encoder(observation)

    def _embed(self, observation: Mapping[str, Tensor]) -> Tensor:
        """As it is while acting and looking: the plain form, for any number of observations."""
        return self.encoder(self.preprocess(dict(observation)))

    def _prediction_losses(
        self, states: LatentState, posterior_params: Tensor, embed: Tensor, data: Replayed
    ) -> tuple[Losses, dict[str, Tensor]]:
        features = states.features
        posterior = self.rssm.distribution(posterior_params)
        prior = self.rssm.distribution(self.rssm.prior(states.deter))
        divergence = self.rssm.divergence(posterior, prior)
        losses, metrics = self._observation_losses(states, embed, data.observation)
        losses |= {
            "reward": self.reward.loss(self.reward(features), data.reward).mean(),
            "divergence": self._beyond_free_nats(divergence).mean(),
        }
        if self.continuation is not None:
            losses["continue"] = self.continuation.loss(self.continuation(features), data.is_terminal).mean()
        metrics |= {"latent/kl": divergence.mean(), "latent/prior_entropy": self.rssm.entropy(prior).mean()}
        metrics |= {"latent/posterior_entropy": self.rssm.entropy(posterior).mean()}
        return losses, metrics

    def _beyond_free_nats(self, divergence: Tensor) -> Tensor:
        """PlaNet takes the free nats off each step; later versions clip instead."""
        return (divergence - self.free_nats).clamp_min(0.0)

    def overshooting_loss(self, states: LatentState, posterior_params: Tensor, data: Replayed) -> Tensor:
        """The prior after 2 … D steps without observations against the posterior there, which only teaches.

        From every state that is followed by enough steps of its episode; the mean over distances of the means over such
        states.
        """
        length, terms = posterior_params.shape[1], []
        state, alive = states.detach(), torch.ones_like(data.is_first)
        for distance in range(1, self.overshooting_distance + 1):
            # Row t goes on to t + distance; where that is a new episode, or beyond the sequence, it ends.
            rows = length - distance
            alive = alive[:, :rows] & ~data.is_first[:, distance:]
            action = data.prev_action[:, distance:].flatten(0, 1)
            start = state.map(partial(torch.narrow, dim=1, start=0, length=rows)).flatten()
            deter, memory = self.rssm.advance(start, action.to(start.deter.dtype))
            params = self.rssm.prior(deter)
            stoch = self.rssm.sample(params, self.rssm.draw_noise(deter.shape[:1], deter.device), deter.dtype)
            state = LatentState(deter, stoch, memory).map(partial(torch.unflatten, dim=0, sizes=(-1, rows)))
            if distance > 1:  # one step is the plain divergence
                prior = self.rssm.distribution(params.unflatten(0, (-1, rows)))
                posterior = self.rssm.distribution(posterior_params[:, distance:].detach())
                divergence = self._beyond_free_nats(self.rssm.divergence(posterior, prior))
                terms.append((divergence * alive).sum() / alive.sum().clamp(min=1))
        return torch.stack(terms).mean()

    # Planning ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """Filter the new observation into the latent state, and plan from there."""
        device = self.context.device
        inputs = {OBSERVATION_PREFIX + key: torch.as_tensor(value, device=device) for key, value in observation.items()}
        outputs = self._act_step(len(state["deter"]), mode)(inputs | state)
        new_state = {name: value.clone() for name, value in outputs.items() if name in state}
        return self.codec.decode(outputs["action"]).cpu().numpy(), new_state

    def _act_step(self, num_envs: int, mode: Mode) -> Step:
        """The step for this many environments: on a GPU, each has a graph of its own."""
        key = (num_envs, mode)
        if key not in self._act_steps:
            step: Step = self._plain_act_train if mode == "train" else self._plain_act_eval
            self._act_steps[key] = CapturedStep(step, list) if self.context.compile else step
        return self._act_steps[key]

    def _plain_act_train(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = self._plain_act_eval(inputs)
        return outputs | {"action": self._explored(outputs["action"])}

    def _plain_act_eval(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._state_after(*self._planned(inputs), inputs)

    def _explored(self, action: Tensor) -> Tensor:
        """Noise while data is collected: added and clipped, or, for classes, a random action now and then."""
        noise = torch.randn_like(action)
        if not self.planner.layout.classes:
            return (action + self.exploration * noise).clamp(-1.0, 1.0)
        random = torch.rand_like(action[:, :1]) < self.exploration
        return torch.where(random, self.planner.layout.uniform(noise), action)

    def _changing_tensors(self) -> list[Tensor]:
        assert self.optimizer is not None
        return self._model_tensors() + self.optimizer.state_tensors()
