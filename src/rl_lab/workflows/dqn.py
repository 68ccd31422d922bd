"""DQN (Mnih et al., 2015): Q-learning from replayed transitions, towards a copy of the network that lags behind.

With the additions that have proved themselves, each a setting: double Q-learning (van Hasselt et al., 2016), dueling
networks (Wang et al., 2016; in the network), returns over several steps, and prioritised replay (Schaul et al., 2016;
in the data source).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_lab.components.controllers.q_networks import QNetwork
from rl_lab.components.frame_stack import FrameStack
from rl_lab.components.return_computers import first_n_step_return
from rl_lab.errors import ConfigError
from rl_lab.metrics.values import Metrics, TensorMetrics
from rl_lab.nn.arrays import Array, as_array, clip, flags, library, means, row_maximum, row_numbers
from rl_lab.nn.capture import CapturedStep
from rl_lab.nn.flat_adam import FlatAdam
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

METRICS = ("loss/td", "q/value", "q/target", "q/error_size", "optimizer/grad_norm")
SEED_DOMAIN = 5  # keeps the stream of exploration apart from the run's other ones
LEARNED_FROM = ("action", "reward", "is_first", "is_last", "is_terminal", "weight")  # of a batch, its observation aside


class DQN(Workflow):
    """Methods appear in the order: exploring, the target, the update."""

    name = "dqn"
    update_hooks = ("update",)

    def __init__(
        self,
        *,
        batch_size: int = 32,
        train_every: float = 4.0,  # env steps for each update, where the phases do not say
        discount: float = 0.99,
        n_step: int = 1,  # rewards before the bootstrap
        double: bool = False,  # the network chooses the action that its target copy values
        loss: Literal["huber", "mse"] = "huber",
        target_every: int = 250,  # updates between two moves of the target copy …
        target_rate: float = 1.0,  # … by this share of the way; 1: a copy
        epsilon_start: float = 1.0,
        epsilon_end: float = 0.05,
        epsilon_steps: int = 10_000,  # env steps in which ε falls linearly from start to end
        eval_epsilon: float = 0.0,
        priority_floor: float = 1e-6,  # prioritised replay: so that no transition is lost for good
    ) -> None:
        if n_step < 1 or target_every < 1 or train_every <= 0:
            raise ConfigError(
                f"n_step={n_step}, target_every={target_every}, train_every={train_every}: expected at least 1, 1 and "
                "more than 0."
            )
        if loss not in ("huber", "mse"):
            raise ConfigError(f"loss={loss!r}: expected huber or mse.")
        shares = {"discount": discount, "target_rate": target_rate, "epsilon_start": epsilon_start}
        shares |= {"epsilon_end": epsilon_end, "eval_epsilon": eval_epsilon}
        for name, value in shares.items():
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name}={value}: expected a number from 0 to 1.")
        self.batch_size, self.train_every, self.discount, self.n_step = batch_size, train_every, discount, n_step
        self.double, self.huber = double, loss == "huber"
        self.target_every, self.target_rate = target_every, target_rate
        self.epsilon_start, self.epsilon_end, self.epsilon_steps = epsilon_start, epsilon_end, epsilon_steps
        self.eval_epsilon, self.priority_floor = eval_epsilon, priority_floor

    def _bind_context(self, context: WorkflowContext) -> None:
        self.q = context.controller("q", QNetwork)
        self.frames = context.component("frame_stack", FrameStack)
        self.optimizer = context.optimizer("main", FlatAdam) if context.optimizers else None  # none: it only acts
        self._rng = np.random.default_rng(np.random.SeedSequence([context.seed, SEED_DOMAIN]))
        self._epsilon = self.epsilon_start
        self._updates = 0
        self._priorities = PriorityWriter(context.data_sources, late=context.device.type == "cuda")
        self._autocast = nullcontext() if context.autocast_dtype is None else context.autocast()
        # See rl_lab.nn.arrays: on the CPU, a plain network is run by NumPy.
        self._in_numpy = context.device.type == "cpu" and context.autocast_dtype is None
        self._in_numpy = self._in_numpy and self.q.online.takes_arrays and not self.frames.specs
        self._captured = CapturedStep(self._train_step, self._changing_tensors) if context.compile else None
        self._act_graphs: dict[int, CapturedStep] = {}  # by the number of environments

    # Exploring --------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> AgentState:
        return self.frames.initial(num_envs, self.context.device)

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """The best action, or with probability ε any."""
        action, state = self._greedy(observation, state)
        epsilon = self._epsilon if mode == "train" else self.eval_epsilon
        if epsilon == 0.0:
            return action, state
        shape = (2, *action.shape)
        # Evaluation seeds torch's stream, so that its episodes can be repeated; training has one of its own.
        draws = self._rng.random(shape) if mode == "train" else torch.rand(shape, dtype=torch.float64).numpy()
        explore = draws[0] < epsilon
        if explore.any():
            np.copyto(action, (draws[1] * self.q.actions).astype(np.int32), where=explore)
        return action, state

    def _greedy(self, observation: Observation, state: AgentState) -> tuple[np.ndarray, AgentState]:
        if self._in_numpy:
            best: np.ndarray = self.q.online.forward(observation).argmax(-1).astype(np.int32)[:, None]
            return best, state
        inputs = {OBSERVATION_PREFIX + key: torch.as_tensor(value) for key, value in observation.items()} | state
        if self.context.compile:
            outputs = self._captured_choice(inputs)
        else:
            outputs = self._choose({name: value.to(self.context.device) for name, value in inputs.items()})
        return outputs.pop("action").cpu().numpy(), outputs

    @torch.no_grad()
    def _choose(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From observation and memory to the best action and the next memory."""
        seen, memory = self.frames.push(*split_observation(inputs))
        return memory | {"action": self.q.online.forward(seen).argmax(-1, keepdim=True).int()}

    def _captured_choice(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`_choose` as a CUDA graph."""
        count = len(next(iter(inputs.values())))
        if count not in self._act_graphs:
            self._act_graphs[count] = CapturedStep(self._choose, list)
        # The next call overwrites the graph's outputs; a state belongs to the caller.
        return {name: value.clone() for name, value in self._act_graphs[count](inputs).items()}

    def epsilon(self, step: int) -> float:
        """ε after so many env steps."""
        share = min(1.0, step / self.epsilon_steps) if self.epsilon_steps else 1.0
        return self.epsilon_start + share * (self.epsilon_end - self.epsilon_start)

    def collect_step(self, step: int, *, phase: PhaseView) -> CollectResult | None:
        self._epsilon = self.epsilon(step)
        return super().collect_step(step, phase=phase)

    # The target -------------------------------------------------------------------------------------------------------

    def batch_spec(self) -> BatchSpec:
        """A transition of n steps, and the frames that must be seen with its first record."""
        context, device = self.frames.context, str(self.context.device)
        return BatchSpec(self.batch_size, 1 + self.n_step, context=context, device=device, arrays=self._in_numpy)

    def targets(self, batch: SequenceBatch) -> Array:
        """R = r_1 + γ r_2 + … + γ^n max_a Q'(s_n, a), [batch].

        Where the episode ends before, at record k, the sum does too: after a truncation with γ^k max Q'(s_k, ·), after
        a termination with nothing. Double: the maximum is taken by Q, and valued by Q'.
        """
        start = self.frames.context
        following = self.frames.at(batch.observation, batch.is_first, self._bootstrap_position(batch))
        values = self.q.target.forward(following)
        if self.double:
            value = values[row_numbers(values), self.q.online.forward(following).argmax(1)]
        else:
            value = row_maximum(values)
        live = (1.0 - flags(batch.is_terminal[:, start:])) * self.discount
        return first_n_step_return(batch.reward[:, start:], live, batch.is_last[:, start:], value)

    def _bootstrap_position(self, batch: SequenceBatch) -> int | Array:
        """The record that the return ends with: the n-th, or the episode's last."""
        first = self.frames.context + 1
        if self.n_step == 1:
            return first
        ends = flags(batch.is_last[:, first:])
        ends[:, -1] = 1.0
        return first + ends.argmax(1)  # of equals the first

    # The update -------------------------------------------------------------------------------------------------------

    @property
    def updates_per_env_step(self) -> float:
        return 1.0 / self.train_every

    def update(self, batch: SequenceBatch, *, phase: PhaseView) -> Metrics:
        """One gradient step; new priorities; now and then the target moves."""
        if self._captured is not None:
            outputs = self._captured(_inputs(batch))
            metrics: Metrics = TensorMetrics(METRICS, outputs["metrics"])
            priority = outputs.get("priority")
        else:
            metrics, priority = self._learn(batch)
        if priority is not None and phase.data_source is not None:
            assert batch.indices is not None
            indices = torch.as_tensor(batch.indices[:, self.frames.context])
            self._priorities.write(phase.data_source, indices, torch.as_tensor(priority))
        self._updates += 1
        if self._updates % self.target_every == 0:
            self.q.move_target(self.target_rate)
        return metrics

    def _train_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """`_learn` in the form in which it can be captured as a CUDA graph."""
        observation, rest = split_observation(inputs)
        metrics, priority = self._learn(SequenceBatch(observation=observation, **rest))
        assert isinstance(metrics, TensorMetrics)
        outputs = {"metrics": metrics.values_vector}
        return outputs if priority is None else outputs | {"priority": priority}

    def _changing_tensors(self) -> list[Tensor]:
        assert self.optimizer is not None
        return [*self.q.parameters(), *self.q.buffers(), *self.optimizer.state_tensors()]

    def _learn(self, batch: SequenceBatch) -> tuple[Metrics, Array | None]:
        """A step of the optimiser; values to watch, and new priorities where the batch was drawn by priority."""
        optimizer = self.optimizer
        assert optimizer is not None
        if self._in_numpy:
            batch = _converted(batch, as_array)
            loss, backward, error, watched = self.td_loss(batch)
            optimizer.attach_gradients()  # the backward pass sets them all
        else:
            with self._autocast, torch.no_grad():
                loss, backward, error, watched = self.td_loss(batch)
            optimizer.zero_grad()
        backward()
        optimizer.step(loss=loss)
        priority = None if batch.weight is None else self._priority(batch.is_last, error)
        if self._in_numpy:
            return dict(zip(METRICS, (*watched.tolist(), optimizer.norm), strict=True)), priority
        return TensorMetrics(METRICS, torch.cat([watched, optimizer.last_grad_norm[None]])), priority

    def td_loss(self, batch: SequenceBatch) -> tuple[Array, Callable[[], None], Array, Array]:
        """The mean loss of R - Q(s, a), its backward pass, the errors, and values to watch.

        Only the values of the chosen actions have a derivative, and it is known: the error, for Huber's loss cut off at
        ±1. So that autograd need not find it, it is written out. Everything is a tensor, or everything NumPy's.
        """
        start = self.frames.context
        target = self.targets(batch)
        values, backward = self.q.online.with_backward(self.frames.at(batch.observation, batch.is_first, start))
        rows, action = row_numbers(values), batch.action[:, start, 0]
        weight = 1.0 - flags(batch.is_last[:, start])  # nothing follows an episode's last record
        if batch.weight is not None:
            weight = weight * batch.weight
        chosen = values[rows, action]
        error = chosen - target
        slope = clip(error, -1.0, 1.0) if self.huber else 2.0 * error
        pull = weight * slope
        # Huber: error²/2, and |error| - 1/2 beyond ±1. MSE: error².
        losses = pull * (error - 0.5 * slope if self.huber else 0.5 * error)
        derivative = library(values).zeros_like(values)
        derivative[rows, action] = pull / self.batch_size
        size = abs(error)
        watched = means(losses, chosen, target, size)
        return watched[0], partial(backward, derivative), size, watched

    def _priority(self, is_last: Array, error: Array) -> Array:
        xp, floor = library(error), self.priority_floor
        priority = xp.where(is_last[:, self.frames.context], 0.0, error + floor)
        # An update that was left out because of a NaN must not leave its mark here.
        return xp.nan_to_num(priority, nan=floor, posinf=floor)

    def batch_losses(self, batch: SequenceBatch) -> Mapping[str, Tensor]:
        return {"td": self.td_loss(batch)[0]}

    def diagnose(self, batch: Any) -> str:
        return super().diagnose(_converted(batch, torch.as_tensor))

    def log_metrics(self, step: int, writer: MetricsSink) -> None:
        writer.scalar("workflow/epsilon", self.epsilon(step))

    # Saving -----------------------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        exploration, priorities = json.dumps(self._rng.bit_generator.state), self._priorities.state_dict()
        own = {"updates": self._updates, "exploration": exploration, "priorities": priorities}
        return super().get_state() | own

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._updates = state["updates"]
        self._rng.bit_generator.state = json.loads(state["exploration"])
        self._priorities.load_state_dict(state["priorities"])


def _converted(batch: SequenceBatch, convert: Callable[[Array], Array]) -> SequenceBatch:
    """The same batch on the same memory, as arrays or as tensors."""
    if convert(batch.reward) is batch.reward:
        return batch
    values = {name: getattr(batch, name) for name in LEARNED_FROM}
    values = {name: None if value is None else convert(value) for name, value in values.items()}
    observation = {key: convert(value) for key, value in batch.observation.items()}
    return replace(batch, observation=observation, **values)


def _inputs(batch: SequenceBatch) -> dict[str, Tensor]:
    """The same batch as a flat dict: the form in which a captured step is fed."""
    inputs = {OBSERVATION_PREFIX + key: value for key, value in batch.observation.items()}
    inputs |= {name: getattr(batch, name) for name in LEARNED_FROM if getattr(batch, name) is not None}
    return inputs
