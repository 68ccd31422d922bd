"""What the Dreamers share: a world model learns from replayed sequences, an actor and a critic in its dreams.

An update computes every loss, then makes one backward pass and steps the optimisers: stop-gradients decide who learns
what, so it does not matter whether one optimiser has all parameters or each part one of its own. Shapes are static and
nothing waits for the device, so that the whole update can be captured as a CUDA graph.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from rl_lab.components.behaviours import ActorCritic, BehaviourRules, Learned
from rl_lab.components.behaviours.actor_critic import Gradient
from rl_lab.components.controllers.actors import Actor
from rl_lab.components.controllers.critics import Critic
from rl_lab.components.planners.base import Planner
from rl_lab.components.predictors import ContinuePredictor
from rl_lab.components.representation_learners.base import LatentState
from rl_lab.errors import ConfigError, nearest
from rl_lab.metrics.values import TensorMetrics
from rl_lab.nn.capture import Branch, CapturedStep, GradientCut, Rehearsal, compile_block
from rl_lab.nn.fusion import fused
from rl_lab.nn.host_threads import only_small, rows_shared
from rl_lab.nn.normalizers import ReturnNormalizer
from rl_lab.records import SequenceBatch
from rl_lab.simulation.latent import LatentSimulator
from rl_lab.workflows.base import Mode
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.latent import DECODED, PROBE_SCALE, LatentWorkflow, Replayed

Losses = dict[str, Tensor]
GradientChoice = Gradient | Literal["auto"]  # auto: reinforce for discrete actions, dynamics for continuous ones


@runtime_checkable
class CapturableOptimizer(Protocol):
    """An optimiser that never waits for the device and leaves out an update whose loss or gradient is not finite."""

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def step(self, *, loss: Tensor) -> Any: ...

    def metrics(self) -> dict[str, Tensor]: ...

    def state_tensors(self) -> list[Tensor]: ...


class Dreamer(LatentWorkflow):
    """A version adds its settings, its form of the KL terms, and the rules of its behaviour.

    With `controllers.planner` an evaluation plans in the world model, with the actor's ideas and the critic's values
    where the planner wants them. Data is collected, and dreams are dreamt, by the actor as ever.
    """

    update_hooks = ("update",)
    captures_acting = True
    pieces: ClassVar[tuple[str, ...]] = ("_encode", "_prediction_losses")  # methods to compile
    default_scales: ClassVar[Mapping[str, float]]  # of all loss terms

    def __init__(
        self,
        *,
        batch_size: int,
        sequence_length: int,
        train_ratio: float,
        stored_latents: bool,
        discount: float,
        loss_scales: Mapping[str, float] | None,
    ) -> None:
        super().__init__(
            batch_size=batch_size, sequence_length=sequence_length, train_ratio=train_ratio,
            stored_latents=stored_latents,
        )  # fmt: skip
        self.discount = discount
        default_scales = {**self.default_scales, "probe": PROBE_SCALE}
        for name in loss_scales or {}:
            if name not in default_scales:
                raise ConfigError(f"loss_scales.{name}: there is no such loss.{nearest(name, default_scales)}")
        self.loss_scales = default_scales | dict(loss_scales or {})

    @abstractmethod
    def behaviour_rules(self) -> BehaviourRules:
        """How actor and critic learn in dreams."""

    def _gradient(self, choice: GradientChoice) -> Gradient:
        if choice != "auto":
            return choice
        return "reinforce" if self.context.action_spec.kind == "discrete" else "dynamics"

    @abstractmethod
    def divergence_losses(self, posterior: Any, prior: Any) -> tuple[Losses, Tensor]:
        """The terms that hold prior and posterior together, and the plain KL(posterior || prior) of each record."""

    def _bind_context(self, context: WorkflowContext) -> None:
        super()._bind_context(context)
        self.actor = context.controller("policy", Actor)
        self.critic = context.controller("critic", Critic)
        self.continuation: ContinuePredictor | None = None
        if "continue" in context.components:
            self.continuation = context.component("continue", ContinuePredictor)
            self.discount = self.continuation.discount
        return_scale = None
        if "return_normalizer" in context.components:
            return_scale = context.component("return_normalizer", ReturnNormalizer)
        self.behaviour = ActorCritic(
            self.behaviour_rules(), rssm=self.rssm, reward=self.reward, continuation=self.continuation,
            discount=self.discount, actor=self.actor, critic=self.critic, return_scale=return_scale,
        )  # fmt: skip
        self.model = LatentSimulator(
            rssm=self.rssm, reward=self.reward, action_size=self.codec.encoded_size, encode=self._embed,
            continuation=self.continuation, value=lambda features: self.critic.mean(self.critic(features)),
            policy=lambda features: self.actor.distribution(self.actor(features)).sample().clamp(-1.0, 1.0),
        )  # fmt: skip
        context.simulator.attach(self.model)
        if "planner" in context.controllers:
            self.planner = context.controller("planner", Planner)
            self.planner.attach(context.simulator)
        # There are none where the run is only loaded to act.
        self.optimizers: dict[str, CapturableOptimizer] = {
            name: context.optimizer(name, CapturableOptimizer) for name in context.optimizers
        }
        shares_rows = self.rssm.shares_rows and only_small([self.rssm, self.encoder, self.decoder, self.critic])
        self._sharing: Callable[[], AbstractContextManager] = rows_shared if shares_rows else nullcontext
        self._metric_names: tuple[str, ...] = ()
        self._branch: Branch | None = None
        self._step: Callable[[dict[str, Tensor]], dict[str, Tensor]] = self._train_step
        if context.compile:
            self._compile()

    def _compile(self) -> None:
        """Compiled pieces inside one captured CUDA graph. The plain methods stay the reference."""
        dtype = self.context.autocast_dtype or torch.float32
        self.behaviour.compile_pieces(dtype)  # first: it may copy the model
        self.rssm.compile_steps(dtype)
        pieces, kernels = list(self.pieces), [partial(self.rssm.rehearse, self.batch_size, dtype)]
        if (encoder := fused(self.encoder)) is not None:
            pieces.remove("_encode")
            kernels.append(partial(encoder.rehearse, dtype))
        if (decoder := fused(self.decoder)) is not None:
            pieces[pieces.index("_prediction_losses")] = "_state_losses"
            kernels.append(partial(decoder.rehearse, dtype))
            predictors = (self.rssm, self.reward, self.continuation)
            if not all(predictor is None or predictor.fuse() for predictor in predictors):
                pieces.append("_predict")
        for name in pieces:
            setattr(self, name, compile_block(getattr(self, name)))
        if self.context.device.type == "cuda":
            self._branch = Branch()
        self._step = CapturedStep(self._train_step, self._changing_tensors, rehearsal=Rehearsal(kernels))

    def _changing_tensors(self) -> list[Tensor]:
        states = [tensor for optimizer in self.optimizers.values() for tensor in optimizer.state_tensors()]
        return self._model_tensors() + states

    def _act(self, inputs: Mapping[str, Tensor], mode: Mode) -> dict[str, Tensor]:
        if self.planner is None or mode == "train":
            return super()._act(inputs, mode)
        plan, latent = self._planned(inputs)
        return {DECODED: self.codec.decode(plan.action), **self._state_after(plan, latent, inputs)}

    def _choose_action(self, latent: LatentState, *, mode: Mode) -> Tensor:
        """A sample while training; the likeliest action in an evaluation."""
        distribution = self.actor.distribution(self.actor(latent.features))
        return distribution.sample() if mode == "train" else distribution.mode()

    # One update -------------------------------------------------------------------------------------------------------

    def update(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step on everything; fresh latents go back into the replay, where it keeps them."""
        with self._sharing():
            outputs = self._step(self._inputs(batch))
        self._write_latents(batch, outputs, phase)
        return TensorMetrics(self._metric_names, outputs["metrics"])

    def _train_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        if self._branch is None:
            total, losses, states, metrics = self._learn(inputs)
        else:
            total, losses, states, metrics = self._learn_side_by_side(inputs, self._branch)
        for optimizer in self.optimizers.values():
            optimizer.step(loss=total)
        self.critic.update_slow()
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()} | {"loss/total": total}
        for name, optimizer in self.optimizers.items():
            prefix = f"optimizer/{name}_" if len(self.optimizers) > 1 else "optimizer/"
            metrics |= {prefix + key: value for key, value in optimizer.metrics().items()}
        packed = TensorMetrics.pack(metrics)
        self._metric_names = packed.names
        latents = self.rssm.to_stored(states.detach()) if self.latent_specs else {}
        return latents | {"metrics": packed.values_vector}

    def _total(self, losses: Losses) -> Tensor:
        with self.context.autocast():
            return torch.stack([self.loss_scales[name] * loss for name, loss in losses.items()]).sum()

    def _learn(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Losses, LatentState, dict[str, Tensor]]:
        """The sum of all losses, whose gradients are there afterwards, and what `losses` gives."""
        with self.context.autocast():
            losses, states, metrics = self.losses(self._replayed(inputs))
        total = self._total(losses)
        total.backward()
        return total, losses, states, metrics

    def _learn_side_by_side(
        self, inputs: dict[str, Tensor], branch: Branch
    ) -> tuple[Tensor, Losses, LatentState, dict[str, Tensor]]:
        """The same on a GPU, with the behaviour beside the model: both are mostly small kernels, one after another, and
        leave room for each other.

        The model's gradient waits at its states until all that is computed from them has had its backward pass.
        """
        with self.context.autocast():
            data = self._replayed(inputs)
            embed, states, posterior_params = self._filter(data)
        branch.fork()
        cut = GradientCut(states.deter, states.stoch, posterior_params, embed)
        deter, stoch, own_params, own_embed = cut.leaves
        own_states = LatentState(deter, stoch, states.memory)
        with self.context.autocast():
            losses, metrics = self._prediction_losses(own_states, own_params, own_embed, data)
        self._total(losses).backward()
        with branch, self.context.autocast():
            learned = self.learn_behaviour(states.detach(), data)
        further: Losses = {}
        if self.learns_from_returns:
            branch.join()
            with self.context.autocast():
                further = self.return_losses(own_states, data, learned)
            self._total(further).backward()
            branch.fork()  # the critic has gradients of both sides
        with branch:
            self._total(learned.losses).backward()
        cut.backward()
        branch.join()
        losses |= learned.losses | further
        return self._total(losses), losses, states, metrics | learned.metrics

    def batch_losses(self, batch: SequenceBatch) -> Losses:
        with self.context.autocast():
            return self.losses(self._replayed(self._inputs(batch)))[0]

    def losses(self, data: Replayed) -> tuple[Losses, LatentState, dict[str, Tensor]]:
        """Every loss term, unscaled; the posterior states; values to watch."""
        losses, states, metrics = self.world_model_losses(data)
        learned = self.learn_behaviour(states, data)
        losses |= learned.losses | self.return_losses(states, data, learned)
        return losses, states, metrics | learned.metrics

    @property
    def learns_from_returns(self) -> bool:
        """Whether there are `return_losses`."""
        return False

    def return_losses(self, states: LatentState, data: Replayed, learned: Learned) -> Losses:
        """What replayed states learn from the dreams that start in them."""
        return {}

    # The world model --------------------------------------------------------------------------------------------------

    def world_model_losses(self, data: Replayed) -> tuple[Losses, LatentState, dict[str, Tensor]]:
        """Prediction and divergence terms over replayed sequences."""
        embed, states, posterior_params = self._filter(data)
        losses, metrics = self._prediction_losses(states, posterior_params, embed, data)
        return losses, states, metrics

    def _filter(self, data: Replayed) -> tuple[Tensor, LatentState, Tensor]:
        """What was seen, the posterior states, and the parameters of their distributions."""
        embed = self._encode(data.observation)
        return embed, *self.rssm.observe(embed, data.prev_action, data.is_first, data.initial)

    def _encode(self, observation: dict[str, Tensor]) -> Tensor:
        return self.encoder(observation)

    def _prediction_losses(
        self, states: LatentState, posterior_params: Tensor, embed: Tensor, data: Replayed
    ) -> tuple[Losses, dict[str, Tensor]]:
        """What the states must explain: the observation, the reward, the episode's end, and each other."""
        losses, metrics = self._observation_losses(states, embed, data.observation)
        further_losses, further_metrics = self._state_losses(
            posterior_params, *self._predict(states), data.reward, data.is_terminal
        )
        return losses | further_losses, metrics | further_metrics

    def _predict(self, states: LatentState) -> tuple[Tensor, Tensor, Tensor | None]:
        """The prior's parameters, and the predictors' outputs for reward and continuation."""
        features = states.features
        continuation = None if self.continuation is None else self.continuation(features)
        return self.rssm.prior(states.deter), self.reward(features), continuation

    def _state_losses(
        self, posterior_params: Tensor, prior_params: Tensor, reward_output: Tensor,
        continue_output: Tensor | None, reward: Tensor, is_terminal: Tensor,
    ) -> tuple[Losses, dict[str, Tensor]]:  # fmt: skip
        """All of it but the observation."""
        posterior, prior = self.rssm.distribution(posterior_params), self.rssm.distribution(prior_params)
        divergences, kl = self.divergence_losses(posterior, prior)
        losses = {"reward": self.reward.loss(reward_output, reward).mean()}
        if self.continuation is not None and continue_output is not None:
            losses["continue"] = self.continuation.loss(continue_output, is_terminal).mean()
        metrics = {"latent/kl": kl.mean(), "latent/prior_entropy": self.rssm.entropy(prior).mean()}
        metrics |= {"latent/posterior_entropy": self.rssm.entropy(posterior).mean()}
        return losses | divergences, metrics

    # The behaviour ----------------------------------------------------------------------------------------------------

    def learn_behaviour(self, states: LatentState, data: Replayed) -> Learned:
        """Actor and critic, on dreams from every replayed state. No gradient reaches the world model."""
        return self.behaviour.learn(self.rssm.starts(states), data.is_terminal.flatten())
