"""The parts that all Dreamers share: a world model learns from replayed sequences, an actor and a critic in its dreams.

Each version's losses stand in its own file. Stop-gradients decide which part learns from which term, so that one
optimiser may hold all parameters or each part have one of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.actors.dreamer import Actor
from rl_lab.components.critics.dreamer import Critic
from rl_lab.components.planners.base import Planner
from rl_lab.components.world_models.base import Dream, LatentState, StateSpaceModel
from rl_lab.errors import ConfigError
from rl_lab.kernels.dreams import DeferredDream
from rl_lab.kernels.graphs import Branch
from rl_lab.metrics.values import TensorMetrics
from rl_lab.nn.layers import frozen
from rl_lab.nn.optimizers import Stepper
from rl_lab.records import SequenceBatch
from rl_lab.simulation.rssm import RSSMSimulator
from rl_lab.workflows.base import Mode
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.side_by_side import learn_side_by_side
from rl_lab.workflows.world_model import Losses, Replayed, WorldModelWorkflow
from rl_lab.workflows.world_model_acting import DECODED

Gradient = Literal["reinforce", "dynamics", "mixed"]
GradientChoice = Gradient | Literal["auto"]  # auto: reinforce for discrete actions, dynamics for continuous ones


class Predictions(NamedTuple):
    """Predicted reward, discount and values of imagined states, [H + 1, starts] each."""

    reward: Tensor  # on arriving at the state
    discount: Tensor  # γ while the episode goes on, 0 where it has ended
    value: Tensor  # that stands in returns and baselines
    slow_value: Tensor | None  # the slow critic's, where it is needed


class Behaviour(NamedTuple):
    """The losses of actor (`policy`) and critic (`value`), and what replayed states can learn from their dreams."""

    losses: Losses
    returns: Float[Tensor, " starts"]  # of the first state that has one
    slow_value: Float[Tensor, " starts"] | None
    metrics: dict[str, Tensor]


class Dreamer(WorldModelWorkflow):
    """A version adds `world_model_losses` and `behaviour_losses`, as its paper has them.

    With `controllers.planner` an evaluation plans in the world model, with the actor's proposals and the critic's
    values where the planner wants them. Data is collected, and dreams are dreamt, by the actor all the same.
    """

    update_hooks = ("update", "update_world_model", "update_controller")
    named_hooks = ("distill", "clone")
    compiled_pieces: ClassVar[Mapping[str, str]] = {
        "encode": "DreamerCNN.forward", "world_model_losses": "DreamerCNNDecoder.image_loss", "predictions": "",
        "value_logits": "", "policy_params": "",
    }  # fmt: skip
    target_critic: ClassVar[Literal["fast", "slow"]] = "fast"  # whose values stand in returns and baselines
    value_includes_reward: ClassVar[bool] = False  # whether V(s) begins with the reward of s itself

    def __init__(
        self,
        *,
        batch_size: int,
        sequence_length: int,
        train_ratio: float,
        stored_latents: bool,
        horizon: int,
        lambda_: float,
        free_nats: float,
        model_first: bool,
        loss_scales: Mapping[str, float],
    ) -> None:
        super().__init__(
            batch_size=batch_size, sequence_length=sequence_length, train_ratio=train_ratio,
            stored_latents=stored_latents, loss_scales=loss_scales,
        )  # fmt: skip
        if horizon < 2:
            raise ConfigError(f"horizon={horizon}: a dream needs at least two steps.")
        self.horizon, self.lambda_, self.free_nats, self.model_first = horizon, lambda_, free_nats, model_first
        self.gradient: Gradient = "dynamics"
        self.discount = 1.0

    def _bind_context(self, context: WorkflowContext) -> None:
        super()._bind_context(context)
        self.actor = context.controller("policy", Actor)
        self.critic = context.controller("critic", Critic)
        if self.model_first and not _is(self.losses, Dreamer.losses):
            raise ConfigError(
                f"{type(self).__name__} overrides losses(), which model_first=true never calls: the model has made its "
                "step before it dreams. Override world_model_losses, behaviour_losses or replay_losses, or set "
                "workflow.model_first=false."
            )
        if self.needs_slow_critic and self.critic.slow is None:
            raise ConfigError("The critic has no slow copy, and this workflow needs one. Give it a slow_rate.")
        if self.continuation is not None:
            self.discount = self.continuation.discount
        self.model = RSSMSimulator(
            rssm=self.rssm, reward=self.reward, action_size=self.codec.encoded_size, encode=self._embed,
            continuation=self.continuation, value=lambda features: self.critic.mean(self.critic(features)),
            value_includes_reward=self.value_includes_reward, discount=self.discount,
            policy=lambda features: self.actor.distribution(self.actor(features)).sample().clamp(-1.0, 1.0),
            logits=self.actor if len(context.action_spec.classes) == 1 else None,
        )  # fmt: skip
        context.simulator.attach(self.model)
        if "planner" in context.controllers:
            self.planner = context.controller("planner", Planner)
            self.planner.attach(context.simulator)
        model, behaviour = context.components.values(), (self.actor, self.critic)
        self.optimizers = Stepper(context.optimizers, {"world_model": model, "behaviour": behaviour})
        self._filtered: tuple[SequenceBatch, LatentState] | None = None  # of the last `update_world_model`
        self._dreams: DeferredDream | None = None
        self._branch: Branch | None = None
        if context.compile:
            self._compile()

    def _gradient(self, choice: GradientChoice) -> Gradient:
        if choice != "auto":
            return choice
        return "reinforce" if self.context.action_spec.kind == "discrete" else "dynamics"

    @property
    def needs_slow_critic(self) -> bool:
        return self.target_critic == "slow"

    def _act(self, inputs: Mapping[str, Tensor], mode: Mode) -> dict[str, Tensor]:
        if self.planner is not None and mode == "eval":
            plan, latent = self._planned(inputs)
            return {DECODED: self.codec.decode(plan.action), **self._state_after(plan, latent, inputs)}
        with self.context.autocast():
            latent = self._filtered_step(inputs)
            action = self._choose_action(latent, mode=mode)
        return self._decided(latent, action, inputs)

    def _choose_action(self, latent: LatentState, *, mode: Mode) -> Float[Tensor, "envs action"]:
        """A sample while training; the likeliest action in an evaluation."""
        distribution = self.actor.distribution(self.actor(latent.features))
        return distribution.sample() if mode == "train" else distribution.mode()

    # Updates ----------------------------------------------------------------------------------------------------------

    def update(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step on everything. With `model_first` the model has made its step before it dreams."""
        outputs = self._train_step("update")(self._inputs(batch))
        return self._finish("update", batch, outputs, phase)

    def update_world_model(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step on the model's losses alone."""
        outputs = self._train_step("update_world_model")(self._inputs(batch))
        self._filtered = batch, LatentState(outputs["deter"], outputs["stoch"], outputs.get("memory"))
        return self._finish("update_world_model", batch, outputs, phase)

    def update_controller(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step of actor and critic; the model stays as it is.

        Where `update_world_model` has just seen this batch, dreams start from the states that it found.
        """
        known = self._filtered is not None and self._filtered[0] is batch
        states = self._filtered[1]._asdict() if known and self._filtered is not None else {}
        further = {name: value for name, value in states.items() if value is not None}
        name = "update_controller" if known else "update_controller_alone"
        outputs = self._train_step(name)(self._inputs(batch) | further)
        return self._finish("update_controller", batch, outputs, phase)

    def clone(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step of the actor towards the actions of a dataset, -ln π(a | s) in posterior states of the
        model, which stays as it is: behaviour cloning. An episode's last record has no action."""
        data = self._replayed(self._inputs(batch))
        with torch.no_grad(), self.autocast():
            features = self.filter(data).states.features
        action = self.codec.encode(batch.action[:, batch.action.shape[1] - features.shape[1] :])
        self.optimizers.zero_grad()
        with self.autocast():
            log_prob = self.actor.distribution(self.actor(features)).log_prob(action)
        decided = (~data.is_last).float()
        loss = -(decided * log_prob).sum() / decided.sum().clamp(min=1.0)
        loss.backward()
        self.optimizers.step(loss, "behaviour")
        return TensorMetrics.pack({"loss/clone": loss} | self.optimizers.metrics())

    def _update_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        data = self._replayed(inputs)
        if self.model_first:
            losses, states, metrics = self._fit_world_model(data)
            own_losses, own_metrics = self._fit_behaviour(states, data)
            losses, metrics = losses | own_losses, metrics | own_metrics
        else:
            self.optimizers.zero_grad()
            if self._branch is not None and _is(self.losses, Dreamer.losses):
                total, losses, states, metrics = learn_side_by_side(self, data, self._branch)
            else:
                with self.autocast():
                    losses, states, metrics = self.losses(data)
                total = self.total(losses)
                total.backward()
            self.optimizers.step(total)
        self.critic.update_slow()
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()} | {"loss/total": self.total(losses)}
        return self._outputs("update", states, metrics | self.optimizers.metrics())

    def _update_world_model_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        losses, states, metrics = self._fit_world_model(self._replayed(inputs))
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()}
        outputs = self._outputs("update_world_model", states, metrics | self.optimizers.metrics())
        return outputs | {name: part for name, part in states._asdict().items() if part is not None}

    def _update_controller_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        states = LatentState(inputs["deter"], inputs["stoch"], inputs.get("memory"))
        return self._behaviour_step(states, self._replayed(inputs))

    def _update_controller_alone_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        data = self._replayed(inputs)
        with torch.no_grad(), self.autocast():
            states = self.filter(data).states
        return self._behaviour_step(states, data)

    def _behaviour_step(self, states: LatentState, data: Replayed) -> dict[str, Tensor]:
        losses, metrics = self._fit_behaviour(states, data)
        self.critic.update_slow()
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()}
        return self._outputs("update_controller", states, metrics | self.optimizers.metrics())

    def _fit_world_model(self, data: Replayed) -> tuple[Losses, LatentState, dict[str, Tensor]]:
        self.optimizers.zero_grad()
        with self.autocast():
            filtered = self.filter(data)
            losses, metrics = self.world_model_losses(filtered, data)
        total = self.total(losses)
        total.backward()
        self.optimizers.step(total, "world_model")
        return losses, filtered.states.detach(), metrics

    def _fit_behaviour(self, states: LatentState, data: Replayed) -> tuple[Losses, dict[str, Tensor]]:
        self.optimizers.zero_grad()
        states = states.detach()
        with self.autocast():
            behaviour = self.behaviour_losses(states, data)
            losses = behaviour.losses | self.replay_losses(states, data, behaviour)
        total = self.total(losses)
        total.backward()
        self.optimizers.step(total, "behaviour")
        return losses, behaviour.metrics

    def losses(self, data: Replayed) -> tuple[Losses, LatentState, dict[str, Tensor]]:
        """Every loss term, unscaled; the posterior states; values to watch."""
        filtered = self.filter(data)
        losses, metrics = self.world_model_losses(filtered, data)
        behaviour = self.behaviour_losses(filtered.states, data)
        losses |= behaviour.losses | self.replay_losses(filtered.states, data, behaviour)
        return losses, filtered.states, metrics | behaviour.metrics

    @abstractmethod
    def behaviour_losses(self, states: LatentState, data: Replayed) -> Behaviour:
        """Actor and critic on dreams from every replayed state. No gradient reaches the world model."""

    def replay_losses(self, states: LatentState, data: Replayed, behaviour: Behaviour) -> Losses:
        """Losses of replayed states by the returns of the dreams that start in them."""
        return {}

    # Dreams -----------------------------------------------------------------------------------------------------------

    def imagining(self) -> AbstractContextManager:
        """REINFORCE needs no gradient of the dream; else it flows through the model, whose parameters get none."""
        if self.gradient == "reinforce":
            return torch.no_grad()
        parts = [self.rssm, self.reward, self.critic, *([] if self.continuation is None else [self.continuation])]
        return frozen(*parts)

    def dream(self, start: LatentState) -> Dream:
        """States s_0 … s_H from the prior, and actions a_t ~ π(· | s_t), which see s_t without its gradient."""
        lead, device = (self.horizon, start.deter.shape[0]), start.deter.device
        noise, action_noise = self.rssm.draw_noise(lead, device), self.actor.draw_noise(lead, device)
        if self._dreams is not None:
            with self.imagining():
                return self._dreams(start, noise, action_noise)
        if self.gradient == "reinforce" and not self.context.compile:
            with torch.inference_mode():  # a tenth less time for small operations than without gradients alone
                dream = self.rssm.imagine(start, self.dreamt_action, latent_noise=noise, action_noise=action_noise)
            return dream.clone()
        with self.imagining():
            return self.rssm.imagine(start, self.dreamt_action, latent_noise=noise, action_noise=action_noise)

    def dreamt_action(self, features: Tensor, noise: Tensor) -> Tensor:
        """The action in an imagined state. An override takes dreams off the GPU's faster loop."""
        return self.actor.distribution(self.actor(features.detach())).sample(noise)

    def predictions(self, features: Float[Tensor, "states starts size"], value_logits: Tensor) -> Predictions:
        """Reward, discount and value of imagined states. `value_logits` are the critic's outputs there, constants.

        Where the actor learns through the dynamics, the values have a gradient by the features.
        """
        reward = self.reward.mean(self.reward(features))
        if self.continuation is None:
            discount = torch.full_like(reward, self.discount)
        else:
            discount = self.continuation.mean(self.continuation(features))
        slow_value = self.critic.slow_mean(features) if self.needs_slow_critic else None
        if self.target_critic == "slow" and slow_value is not None:
            value = slow_value
        else:
            value = self.critic.mean(value_logits if self.gradient == "reinforce" else self.critic(features))
        return Predictions(reward, discount, value, slow_value)

    def value_logits(self, features: Tensor) -> Tensor:
        return self.critic(features)

    def policy_params(self, features: Tensor) -> Tensor:
        return self.actor(features)

    # Compiled and captured --------------------------------------------------------------------------------------------

    def _compile(self) -> None:
        dtype = self.context.autocast_dtype or torch.float32
        plain_action = _is(self.dreamt_action, Dreamer.dreamt_action)
        plain_loop = _is(self.rssm.imagine, StateSpaceModel.imagine) and self.rssm.initial(1).memory is None
        if plain_action and plain_loop and self.gradient != "reinforce":
            self._dreams = DeferredDream(self.rssm, self.actor, dtype, Dream.of)
        super()._compile()
        if self.context.device.type == "cuda":
            self._branch = Branch()


def _is(method: Any, plain: Any) -> bool:
    """Whether a bound method is this one, and neither overridden in a class nor replaced on an instance."""
    return getattr(method, "__func__", None) is plain
