"""DQN (Mnih et al., 2015): Q-learning from replayed transitions, towards a copy of the network that lags behind.

With the additions that have proved themselves, each a setting: double Q-learning (van Hasselt et al., 2016), dueling
networks (Wang et al., 2016; in the network), returns over several steps, and prioritised replay (Schaul et al., 2016;
in the data source).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.actions import mask_illegal
from rl_lab.components.critics.dreamer import SlowTarget
from rl_lab.components.frame_stack import FrameStack
from rl_lab.components.q_functions.dqn import QNetwork
from rl_lab.errors import ConfigError
from rl_lab.kernels.graphs import CapturedStep
from rl_lab.losses.returns import first_n_step_return
from rl_lab.metrics.values import Metrics, TensorMetrics, pack
from rl_lab.nn.optimizers import gradient_step, state_tensors
from rl_lab.records import (
    OBSERVATION_PREFIX,
    BatchSpec,
    CollectResult,
    Observation,
    SequenceBatch,
    split_observation,
)
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import MetricsSink, PhaseView, WorkflowContext
from rl_lab.workflows.priority_writer import PriorityWriter
from rl_lab.workflows.random_actions import legal_action

SEED_DOMAIN = 5  # keeps the stream of exploration apart from the run's other ones
LEARNED_FROM = ("action", "reward", "is_first", "is_last", "is_terminal", "weight")  # of a batch, its observation aside
WATCHED = ("q/value", "q/target", "q/error_size")


class TDLoss(NamedTuple):
    """The loss of a batch, a scalar, and the values and targets that it compares, [batch]."""

    loss: Tensor
    value: Tensor  # Q(s, a)
    target: Tensor  # R


class DQN(Workflow):
    """Methods appear in the order: exploring, the target, the update."""

    name = "dqn"
    data_parallel = True
    random_entries = (*Workflow.random_entries, "exploration")
    update_hooks = ("update",)

    def __init__(
        self,
        *,
        batch_size: int,
        train_every: float,  # env steps for each update, where the phases do not say
        discount: float,
        n_step: int,  # rewards before the bootstrap
        double: bool,  # the network chooses the action that its target copy values
        loss: Literal["huber", "mse"],
        epsilon_start: float,
        epsilon_end: float,
        epsilon_steps: int,  # env steps in which ε falls linearly from start to end
        eval_epsilon: float,
        priority_floor: float,  # prioritised replay: keeps every transition's priority above 0
    ) -> None:
        if n_step < 1 or train_every <= 0:
            raise ConfigError(f"n_step={n_step}, train_every={train_every}: expected at least 1, and more than 0.")
        if loss not in ("huber", "mse"):
            raise ConfigError(f"loss={loss!r}: expected huber or mse.")
        shares = {"discount": discount, "epsilon_start": epsilon_start, "epsilon_end": epsilon_end}
        shares["eval_epsilon"] = eval_epsilon
        for name, value in shares.items():
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name}={value}: expected a number from 0 to 1.")
        self.batch_size, self.train_every, self.discount, self.n_step = batch_size, train_every, discount, n_step
        self.double, self.loss = double, loss
        self.epsilon_start, self.epsilon_end, self.epsilon_steps = epsilon_start, epsilon_end, epsilon_steps
        self.eval_epsilon, self.priority_floor = eval_epsilon, priority_floor

    def _bind_context(self, context: WorkflowContext) -> None:
        self.q = context.controller("q", QNetwork)
        self.target = context.component("target", SlowTarget)
        self.frames = context.component("frame_stack", FrameStack)
        # A run that is loaded to act has no optimiser.
        self.optimizer = context.optimizer("main", torch.optim.Optimizer) if context.optimizers else None
        self._rng = np.random.default_rng(np.random.SeedSequence([context.seed, SEED_DOMAIN]))
        self._epsilon = self.epsilon_start
        self._priorities = PriorityWriter(context.data_sources, late=context.device.type == "cuda")
        self._autocast = nullcontext() if context.autocast_dtype is None else context.autocast()
        self._captured: CapturedStep | None = None
        if context.compile and self.optimizer is not None and state_tensors(self.optimizer) is not None:
            self._captured = CapturedStep(self._train_step, self._changing_tensors, modules=context.modules)
        self._act_graphs: dict[int, CapturedStep] = {}  # by the number of environments

    # Exploring --------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> AgentState:
        return self.frames.initial(num_envs, self.context.device)

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """The best action, or with probability ε any."""
        count, epsilon = len(next(iter(observation.values()))), self._epsilon if mode == "train" else self.eval_epsilon
        if epsilon == 0.0:
            return self._greedy(observation, state)
        # Evaluation seeds torch's stream, so that its episodes can be repeated; training has one of its own.
        draws = self._rng.random((2, count, 1)) if mode == "train" else torch.rand(2, count, 1).double().numpy()
        explore = draws[0] < epsilon
        if not explore.any():
            return self._greedy(observation, state)
        drawn = legal_action((draws[1] * self.q.actions).astype(np.int32), observation, self.context.action_spec)
        if explore.all() and not self.frames.specs:  # there is no memory that has to see the observation
            return drawn, state
        action, state = self._greedy(observation, state)
        return np.where(explore, drawn, action), state

    def _greedy(self, observation: Observation, state: AgentState) -> tuple[np.ndarray, AgentState]:
        choose = self._captured_choice if self.context.compile else self._choose
        with torch.no_grad():
            best, state = choose({key: torch.as_tensor(value) for key, value in observation.items()}, state)
        return best.cpu().numpy(), state

    def _choose(self, observation: dict[str, Tensor], state: AgentState) -> tuple[Tensor, AgentState]:
        """The action with the highest value, [env, 1], and the next memory."""
        device = self.context.device
        seen, memory = self.frames.push({key: value.to(device) for key, value in observation.items()}, state)
        return self._legal(self.q(seen), seen).argmax(-1, keepdim=True).int(), memory

    def _legal(self, values: Tensor, observation: Mapping[str, Tensor]) -> Tensor:
        return mask_illegal(values, observation, self.context.action_spec)

    def _captured_choice(self, observation: dict[str, Tensor], state: AgentState) -> tuple[Tensor, AgentState]:
        """`_choose` as a CUDA graph."""
        inputs = {OBSERVATION_PREFIX + key: value for key, value in observation.items()} | state
        count = len(next(iter(inputs.values())))
        if count not in self._act_graphs:
            self._act_graphs[count] = CapturedStep(self._choice_step, list, modules=self.context.modules)
        # The next call overwrites the graph's outputs; a state belongs to the caller.
        outputs = {name: value.clone() for name, value in self._act_graphs[count](inputs).items()}
        return outputs.pop("action"), outputs

    def _choice_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """`_choose` from a flat dict of tensors to another one."""
        action, memory = self._choose(*split_observation(inputs))
        return memory | {"action": action}

    def epsilon(self, step: int) -> float:
        """ε after `step` env steps."""
        share = min(1.0, step / self.epsilon_steps) if self.epsilon_steps else 1.0
        return self.epsilon_start + share * (self.epsilon_end - self.epsilon_start)

    def collect_step(self, step: int, *, phase: PhaseView) -> CollectResult | None:
        self._epsilon = self.epsilon(step)
        return super().collect_step(step, phase=phase)

    # The target -------------------------------------------------------------------------------------------------------

    def batch_spec(self) -> BatchSpec:
        """A transition of n steps, and the frames that must be seen with its first record."""
        context, device = self.frames.context, str(self.context.device)
        return BatchSpec(self.batch_size, 1 + self.n_step, context=context, device=device)

    @torch.no_grad()
    def targets(self, batch: SequenceBatch) -> Tensor:
        """R = r_1 + γ r_2 + … + γ^n v(s_n), [batch], where v is `bootstrap_value`.

        Where the episode ends before, at record k, the sum does too: after a truncation with γ^k v(s_k), after a
        termination with nothing.
        """
        start = self.frames.context
        value = self.bootstrap_value(self._seen(batch, self._bootstrap_position(batch)))
        discount = torch.where(batch.is_terminal[:, start:], 0.0, self.discount)
        return first_n_step_return(batch.reward[:, start:], discount, batch.is_last[:, start:], value)

    def bootstrap_value(self, observation: Mapping[str, Tensor]) -> Tensor:
        """v(s) = max_a Q'(s, a), [batch], where Q' is the target copy. Double: v(s) = Q'(s, argmax_a Q(s, a))."""
        target = self._legal(self.target.network(observation), observation)
        if not self.double:
            return target.amax(-1)
        best = self._legal(self.q(observation), observation).argmax(-1, keepdim=True)
        return target.gather(-1, best).squeeze(-1)

    def _bootstrap_position(self, batch: SequenceBatch) -> int | Tensor:
        """The record that the return ends with: the n-th, or the episode's last."""
        first = self.frames.context + 1
        if self.n_step == 1:
            return first
        ends = batch.is_last[:, first:].float()
        ends[:, -1] = 1.0
        return first + ends.argmax(1)  # of equals the first

    def _seen(self, batch: SequenceBatch, position: int | Tensor) -> dict[str, Tensor]:
        """Observations at one record of each window, stacked with the frames before them: [batch, ...]."""
        return self.frames.at(batch.observation, batch.is_first, position)

    # The update -------------------------------------------------------------------------------------------------------

    @property
    def updates_per_env_step(self) -> float:
        return 1.0 / self.train_every

    def update(self, batch: SequenceBatch, *, phase: PhaseView) -> Metrics:
        """One gradient step and one step of the target copy; new priorities."""
        if self._captured is not None:
            metrics, priority = self._learn_captured(batch)
        else:
            values, priority = self._learn(batch)
            metrics = pack(values)
        if priority is not None and phase.data_source is not None:
            assert batch.indices is not None
            self._priorities.write(phase.data_source, batch.indices[:, self.frames.context], priority)
        return metrics

    def _learn(self, batch: SequenceBatch) -> tuple[dict[str, Tensor], Tensor | None]:
        """Values to watch, and new priorities where the batch was drawn by priority."""
        assert self.optimizer is not None
        with self._autocast:
            loss, value, target = self.td_loss(batch)
        step = gradient_step(self.optimizer, loss)
        self.target.update(self.q)
        value = value.detach()
        error = (value - target).abs()
        means = torch.stack([value, target, error]).mean(1).unbind()
        metrics = {"loss/td": loss.detach(), **dict(zip(WATCHED, means, strict=True))}
        metrics["optimizer/grad_norm"] = step["grad_norm"]
        return metrics, None if batch.weight is None else self._priority(batch.is_last, error)

    def td_loss(self, batch: SequenceBatch) -> TDLoss:
        """The mean of w·huber(Q(s, a) - R), or of w·(Q(s, a) - R)², where w are the weights of a prioritised replay.

        Nothing follows an episode's last record: its target is its own value, so that it counts for nothing.
        """
        start = self.frames.context
        values = self.q(self._seen(batch, start))
        value = values.gather(-1, batch.action[:, start].long()).squeeze(-1)
        target = torch.where(batch.is_last[:, start], value.detach(), self.targets(batch))
        loss_function = F.huber_loss if self.loss == "huber" else F.mse_loss
        if batch.weight is None:
            return TDLoss(loss_function(value, target), value, target)
        losses = loss_function(value, target, reduction="none")
        return TDLoss((batch.weight * losses).mean(), value, target)

    def _priority(self, is_last: Tensor, error: Tensor) -> Tensor:
        floor = self.priority_floor
        priority = torch.where(is_last[:, self.frames.context], 0.0, error + floor)
        # An update that was left out because of a NaN must not leave its mark here.
        return torch.nan_to_num(priority, nan=floor, posinf=floor)

    def batch_losses(self, batch: SequenceBatch) -> Mapping[str, Tensor]:
        return {"td": self.td_loss(batch).loss}

    # The same update as a CUDA graph ----------------------------------------------------------------------------------

    def _learn_captured(self, batch: SequenceBatch) -> tuple[Metrics, Tensor | None]:
        assert self._captured is not None
        inputs = {OBSERVATION_PREFIX + key: value for key, value in batch.observation.items()}
        inputs |= {name: getattr(batch, name) for name in LEARNED_FROM if getattr(batch, name) is not None}
        outputs = self._captured(inputs)
        return TensorMetrics(self._metric_names, outputs["metrics"]), outputs.get("priority")

    def _train_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """`_learn` from a flat dict of tensors to another one."""
        observation, rest = split_observation(inputs)
        metrics, priority = self._learn(SequenceBatch(observation=observation, **rest))
        packed = TensorMetrics.pack(metrics)
        self._metric_names = packed.names
        outputs = {"metrics": packed.values_vector}
        return outputs if priority is None else outputs | {"priority": priority}

    def _changing_tensors(self) -> list[Tensor]:
        assert self.optimizer is not None
        moments = state_tensors(self.optimizer) or []
        return [tensor for part in (self.q, self.target) for tensor in part.state_dict().values()] + moments

    def log_metrics(self, step: int, writer: MetricsSink) -> None:
        writer.scalar("workflow/epsilon", self.epsilon(step))

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        exploration, priorities = json.dumps(self._rng.bit_generator.state), self._priorities.state_dict()
        return super().state_dict() | {"exploration": exploration, "priorities": priorities}

    def dealt_state(self, states: Sequence[dict[str, Any]], own: slice) -> dict[str, Any]:
        return super().dealt_state(states, own) | {"priorities": {}}  # the records have other numbers now

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._rng.bit_generator.state = json.loads(state["exploration"])
        self._priorities.load_state_dict(state["priorities"])
