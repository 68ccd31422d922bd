"""MuZero (Schrittwieser et al., 2020): tree search in a latent model that learns only what the search needs.

A representation h encodes the observation, dynamics g predict the next latent and the reward, and a prediction f gives
policy and value. At each decision a tree is searched in them; the search's policy is what f's policy is trained
towards, and its value bootstraps the returns that f's value is trained towards. Gumbel MuZero and Sampled MuZero are
settings of the planner. EfficientZero's additions (Ye et al., 2021) are settings here and of the dynamics: consistency
(`components.projection`), value prefix, shorter returns for older data, and searches made anew by a slow copy.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.actions import ActionCodec
from rl_lab.components.critics.dreamer import SlowTarget
from rl_lab.components.frame_stack import FrameStack
from rl_lab.components.muzero.dynamics import Dynamics
from rl_lab.components.muzero.model import MuZeroModel, Projection
from rl_lab.components.muzero.prediction import PolicyValueNetwork
from rl_lab.components.muzero.representation import Representation
from rl_lab.components.planners.base import Planner
from rl_lab.components.planners.mcts import MCTS
from rl_lab.errors import ConfigError, nearest
from rl_lab.losses.unrolled import EpisodeMasks
from rl_lab.metrics.values import TensorMetrics
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.records import OBSERVATION_PREFIX, BatchSpec, SequenceBatch, split_observation
from rl_lab.simulation.muzero import MuZeroSimulator
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.muzero_acting import SearchingWorkflow, Step
from rl_lab.workflows.muzero_targets import ACTIONS, POLICY, VALUE, MuZeroTargets, Targets, clipped_targets
from rl_lab.workflows.priority_writer import PriorityWriter
from rl_lab.workflows.schedule import StepSchedule

LEARNED_FROM = ("action", "reward", "is_first", "is_last", "is_terminal")  # of a batch, beside its observation
RENEWED = "renewed."  # before the names of fields that an update found anew
LOSS_SCALES = {"policy": 1.0, "value": 0.25, "reward": 1.0, "consistency": 2.0, "entropy": 0.0}
Losses = dict[str, Tensor]


class MuZero(SearchingWorkflow):
    """Losses, then the update. `SearchingWorkflow` acts, `MuZeroTargets` makes the targets."""

    name = "muzero"
    data_parallel = True
    update_hooks = ("update", "update_world_model", "update_controller")

    def __init__(
        self,
        *,
        batch_size: int = 256,
        unroll: int = 5,  # steps K
        train_every: float = 2.0,  # env steps for each update, where the phases do not say
        discount: float = 0.997,
        players: int = 1,
        td_steps: int = 5,
        lambda_: float | None = None,  # TD(λ) over td_steps records in place of n-step returns
        bootstrap: Literal["network", "search"] = "network",  # slow copy's value, or the search's when it was stored
        correction_interval: int | None = None,  # returns of a record lose a step for every so many newer records
        reanalyze: float = 0.0,  # share of each batch whose searches are made anew by the slow copy
        temperature: float | Sequence[Sequence[float]] = 1.0,  # of visit counts; or pairs [env step, value]
        simulations: int | Sequence[Sequence[float]] | None = None,  # while training; null: the planner's own
        loss_scales: Mapping[str, float] | None = None,
        gradient_scale: float = 0.5,  # of a latent, at each step of the unroll
        priority_floor: float = 1e-6,
    ) -> None:
        if min(batch_size, unroll, td_steps) < 1 or train_every <= 0.0:
            raise ConfigError(
                f"batch_size={batch_size}, unroll={unroll}, td_steps={td_steps}, train_every={train_every}: expected "
                "at least 1 of each, and train_every above 0."
            )
        if not 0.0 < discount <= 1.0 or not 0.0 <= reanalyze <= 1.0 or players not in (1, 2):
            raise ConfigError(
                f"discount={discount}, reanalyze={reanalyze}, players={players}: expected a discount above 0 and at "
                "most 1, a share from 0 to 1, and 1 or 2 players."
            )
        for name in loss_scales or {}:
            if name not in LOSS_SCALES:
                raise ConfigError(f"loss_scales.{name}: there is no such loss.{nearest(name, LOSS_SCALES)}")
        self.batch_size, self.unroll, self.train_every = batch_size, unroll, train_every
        self.discount, self.players, self.td_steps, self.lambda_ = discount, players, td_steps, lambda_
        self.bootstrap, self.correction_interval, self.reanalyze = bootstrap, correction_interval, reanalyze
        self.temperature = StepSchedule("temperature", temperature)
        self.simulations = None if simulations is None else StepSchedule("simulations", simulations)
        if self.simulations is not None and min(self.simulations.values) < 1:
            raise ConfigError(f"simulations={simulations}: expected at least 1.")
        self.loss_scales = LOSS_SCALES | dict(loss_scales or {})
        self.gradient_scale, self.priority_floor = gradient_scale, priority_floor

    def _bind_context(self, context: WorkflowContext) -> None:
        self.model = MuZeroModel(
            representation=context.component("representation", Representation),
            dynamics=context.component("dynamics", Dynamics),
            prediction=context.component("prediction", PolicyValueNetwork),
        )
        self.slow = context.component("slow_model", SlowTarget)
        assert isinstance(self.slow.network, MuZeroModel)
        self.frames = context.component("frame_stack", FrameStack)
        self.projection = context.component("projection", Projection) if "projection" in context.components else None
        self.codec = ActionCodec(context.action_spec)
        self.planner = context.controller("planner", Planner)
        self.simulator = MuZeroSimulator(model=self.model, discount=self.discount, autocast=context.autocast)
        context.simulator.attach(self.simulator)
        self.planner.attach(context.simulator)
        self.optimizers: dict[str, FlatAdam] = {}  # none where it only acts
        if context.optimizers:
            self.optimizers = {name: context.optimizer(name, FlatAdam) for name in ("model", "prediction")}
            self._bind_search(context)
        self._priorities = PriorityWriter(context.data_sources, late=context.device.type == "cuda")
        self._step = self._records = 0
        self._warned = False
        self._graphs = {}
        self._metric_names: dict[tuple[str, ...], tuple[str, ...]] = {}

    def _bind_search(self, context: WorkflowContext) -> None:
        if not isinstance(self.planner, MCTS):
            raise ConfigError("MuZero learns from tree searches: controllers.planner must be MCTS while it is trained.")
        if self.planner.players != self.players:
            raise ConfigError(
                f"workflow.players={self.players}, but controllers.planner.players={self.planner.players}: give both "
                "the same number."
            )
        slow, planner = self.slow.network, copy.copy(self.planner)
        assert isinstance(slow, MuZeroModel)
        planner.attach(MuZeroSimulator(model=slow, discount=self.discount, autocast=context.autocast))
        self.target_maker = MuZeroTargets(
            model=slow, planner=planner, frames=self.frames, mask=context.action_spec.mask,
            unroll=self.unroll, discount=self.discount if self.players == 1 else -self.discount,
            td_steps=self.td_steps, lambda_=self.lambda_, bootstrap=self.bootstrap,
            correction_interval=self.correction_interval, reanalyze=self.reanalyze,
        )  # fmt: skip

    # Losses -----------------------------------------------------------------------------------------------------------

    @property
    def updates_per_env_step(self) -> float:
        return 1.0 / self.train_every

    def batch_spec(self) -> BatchSpec:
        """The records of the unroll, those that the last of its returns needs, and the frames before."""
        length = self.unroll + 1 + self.td_steps
        return BatchSpec(self.batch_size, length, context=self.frames.context, device=str(self.context.device))

    def losses(self, batch: SequenceBatch, targets: Targets, *, frozen_model: bool = False) -> tuple[Losses, Tensor]:
        """Each loss by name, [batch], over the unroll: step 0 counts 1, and the K steps after it count 1 together.
        Also the predicted values of the first records. `frozen_model`: representation and dynamics get no gradient."""
        first, masks, model = self.frames.context, targets.masks, self.model
        times = first + torch.arange(self.unroll + 1, device=batch.reward.device).expand(len(batch.reward), -1)
        start = model.representation(model.representation.augment(self.target_maker.seen(batch, times[:, :1])))
        action = self._unroll_actions(batch.action[:, first : first + self.unroll], masks)
        later, rewards = model.dynamics.unroll(start, action, gradient_scale=self.gradient_scale)
        latents = torch.cat([start[None], later])
        output = model.prediction((latents.detach() if frozen_model else latents).flatten(0, 1))
        policy_loss, entropy = self._policy_loss(output.policy, targets)
        value_loss = model.prediction.support.loss(output.value, targets.value.t().flatten())
        # The reward of arriving at a record is known where the value of the record before it is.
        reward_target = model.dynamics.reward_targets(targets.reward.t(), masks.decided[:, :-1].t())
        reward_loss = model.dynamics.support.loss(rewards, reward_target)
        losses = {
            "policy": self._over_unroll(policy_loss, masks.decided),
            "value": self._over_unroll(value_loss, masks.known),
            "entropy": self._over_unroll(-entropy, masks.decided),
            "reward": (reward_loss * masks.known[:, :-1].t()).sum(0) / self.unroll,
        }
        if self.projection is not None:
            with torch.no_grad():
                following = model.representation.augment(self.target_maker.seen(batch, times[:, 1:]))
                true = model.representation(following)
            loss = self.projection.loss(later.flatten(0, 1), true).view(self.unroll, -1)
            losses["consistency"] = (loss * masks.inside[:, 1:].t()).sum(0) / self.unroll
        return losses, model.prediction.support.mean(output.value[: len(start)].detach())

    def _over_unroll(self, loss: Float[Tensor, " rows"], counts: Float[Tensor, "batch states"]) -> Tensor:
        """Rows are state by state; the losses of each window, [batch]."""
        masked = loss.view(self.unroll + 1, -1) * counts.t()
        return masked[0] + masked[1:].sum(0) / self.unroll

    def _unroll_actions(self, action: Tensor, masks: EpisodeMasks) -> Float[Tensor, "batch steps action"]:
        """Recorded actions; random ones after the end of an episode, where none must matter."""
        encoded = self.codec.encode(action)
        random = self.planner.layout.uniform(torch.randn_like(encoded))
        return torch.where(masks.decided[:, :-1, None] > 0, encoded, random)

    def _policy_loss(self, params: Float[Tensor, "rows params"], targets: Targets) -> tuple[Tensor, Tensor]:
        """Cross-entropy with the search's policy, and the entropy of the network's, [rows]; rows are state by state."""
        policy, wanted = self.model.prediction.policy, targets.policy.transpose(0, 1).flatten(0, 1)
        entropy = policy.entropy(params)
        if targets.actions is None:
            return -(wanted * torch.log_softmax(params, -1)).sum(-1), entropy
        actions = targets.actions.transpose(0, 1).flatten(0, 1)
        wide = params[:, None].expand(-1, actions.shape[1], -1)
        return -(wanted * policy.log_prob(wide, actions)).sum(-1), entropy

    # One update -------------------------------------------------------------------------------------------------------

    def update(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step on all networks."""
        return self._learn(batch, phase, tuple(LOSS_SCALES))

    def update_world_model(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """Representation and dynamics alone, by rewards and consistency."""
        return self._learn(batch, phase, ("reward", "consistency"))

    def update_controller(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """Policy and value alone, on a model that stays as it is."""
        return self._learn(batch, phase, ("policy", "value", "entropy"))

    def _learn(self, batch: SequenceBatch, phase: PhaseView, names: tuple[str, ...]) -> TensorMetrics:
        step: Step = lambda given: self._train_step(given, names)  # noqa: E731
        outputs = self._run(("learn", names), step, self._inputs(batch), self._changing_tensors)
        source, first = phase.data_source, self.frames.context
        if source is not None and batch.indices is not None:
            renewed = {name: outputs[RENEWED + name] for name in (POLICY, VALUE, ACTIONS) if RENEWED + name in outputs}
            if renewed:
                indices = batch.indices[: len(renewed[VALUE]), first : first + self.unroll + 1]
                self.context.data_sources[source].update(indices, renewed)
            if batch.weight is not None:
                self._priorities.write(source, batch.indices[:, first], outputs["priority"])
        self._watch_support(outputs)
        return TensorMetrics(self._metric_names[names], outputs["metrics"])

    def _changing_tensors(self) -> list[Tensor]:
        """Everything that an update changes in place."""
        tensors = [tensor for part in self.context.components.values() for tensor in part.state_dict().values()]
        return tensors + [tensor for own in self.optimizers.values() for tensor in own.state_tensors()]

    def _inputs(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """The tensors of a batch that are learned from, by name, and the lengths of its returns."""
        inputs = {OBSERVATION_PREFIX + key: value for key, value in batch.observation.items()} | batch.extras
        inputs |= {name: getattr(batch, name) for name in LEARNED_FROM}
        optional = {"weight": batch.weight, "lengths": self.target_maker.return_lengths(batch, self._records)}
        return inputs | {name: value for name, value in optional.items() if value is not None}

    def _train_step(self, inputs: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
        """One gradient step by these losses. Returns metrics, new priorities, new searches, and the targets."""
        observation, rest = split_observation(inputs)
        lengths, weight = rest.pop("lengths", None), rest.pop("weight", None)
        own = {name: rest.pop(name) for name in LEARNED_FROM}
        batch, frozen = SequenceBatch(observation=observation, extras=rest, weight=weight, **own), "reward" not in names
        with self.context.autocast():
            targets, renewed = self.target_maker.make(batch, lengths)
            losses, value = self.losses(batch, targets, frozen_model=frozen)
        weight = torch.ones_like(value) if weight is None else weight
        means = {name: (weight * losses[name]).mean() for name in names if name in losses}
        total = torch.stack([self.loss_scales[name] * loss for name, loss in means.items()]).sum()
        moved = {"model": not frozen, "prediction": "policy" in names}
        optimizers = [self.optimizers[name] for name, moves in moved.items() if moves]
        for optimizer in optimizers:
            optimizer.zero_grad()
        total.backward()
        for optimizer in optimizers:
            optimizer.step(loss=total)
        self.slow.update(self.model)
        error = (value - targets.value[:, 0]).abs() * targets.masks.known[:, 0]
        metrics = {f"loss/{name}": loss.detach() for name, loss in means.items()} | {"loss/total": total.detach()}
        metrics |= {"value/predicted": value.mean(), "value/target": targets.value[:, 0].mean()}
        metrics |= {"value/error_size": error.mean(), "optimizer/grad_norm": optimizers[0].last_grad_norm}
        packed = TensorMetrics.pack(metrics)
        self._metric_names[names] = packed.names
        outputs = {RENEWED + name: found for name, found in ({} if renewed is None else renewed).items()}
        outputs |= {"metrics": packed.values_vector, "priority": self._priority(targets, error)}
        return outputs | {"value": targets.value, "reward": targets.reward}

    def _priority(self, targets: Targets, error: Tensor) -> Float[Tensor, " batch"]:
        floor = self.priority_floor
        priority = torch.where(targets.masks.decided[:, 0] > 0, error + floor, 0.0)
        return torch.nan_to_num(priority, nan=floor, posinf=floor)

    def _watch_support(self, targets: Mapping[str, Tensor]) -> None:
        """Say once that the bins do not reach the returns. On a GPU this would wait for the device: it is left out."""
        if self._warned or targets["value"].is_cuda:
            return
        message = clipped_targets(self.model, targets["value"], targets["reward"])
        if message is not None:
            self._warned = True
            warnings.warn(message, stacklevel=2)

    def batch_losses(self, batch: SequenceBatch) -> Losses:
        with self.context.autocast():
            targets, _ = self.target_maker.make(batch, self.target_maker.return_lengths(batch, self._records))
            return {name: loss.mean() for name, loss in self.losses(batch, targets)[0].items()}

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"priorities": self._priorities.state_dict()}

    def dealt_state(self, states: Sequence[dict[str, Any]], own: slice) -> dict[str, Any]:
        """The records have other numbers then: priorities that are still to be written belong to none of them."""
        return super().dealt_state(states, own) | {"priorities": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if "priorities" in state:
            self._priorities.load_state_dict(state["priorities"])
