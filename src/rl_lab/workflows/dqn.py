"""DQN (Mnih et al., 2015): Q-learning from replayed transitions, towards a copy of the network that lags behind.

With the additions that have proved themselves, each a setting: double Q-learning (van Hasselt et al., 2016), dueling
networks (Wang et al., 2016; in the network), returns over several steps, and prioritised replay (Schaul et al., 2016;
in the data source).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_lab.components.controllers.q_networks import QNetwork
from rl_lab.components.frame_stack import FrameStack
from rl_lab.components.return_computers import first_n_step_return
from rl_lab.errors import ConfigError
from rl_lab.metrics.values import Metrics, pack
from rl_lab.nn.arrays import Array, as_tensor, flags, library, mean, row_numbers
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.records import BatchSpec, CollectResult, Observation, SequenceBatch
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import MetricsSink, PhaseView, WorkflowContext

METRICS = ("loss/td", "q/value", "q/target", "q/error_size", "optimizer/grad_norm")
SEED_DOMAIN = 5  # keeps the stream of exploration apart from the run's other ones


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
        self._inference = torch.inference_mode()
        self._autocast = nullcontext() if context.autocast_dtype is None else context.autocast()
        # See rl_lab.nn.arrays: on the CPU, a plain network is run by NumPy.
        self._in_numpy = context.device.type == "cpu" and context.autocast_dtype is None
        self._in_numpy = self._in_numpy and self.q.online.takes_arrays and not self.frames.specs

    # Exploring --------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> AgentState:
        return self.frames.initial(num_envs, self.context.device)

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """The best action, or with probability ε any."""
        seen: Mapping[str, Array] = observation
        if not self._in_numpy:
            tensors = {key: torch.as_tensor(value, device=self.context.device) for key, value in observation.items()}
            seen, state = self.frames.push(tensors, state)
        epsilon = self._epsilon if mode == "train" else self.eval_epsilon
        if epsilon == 0.0:
            return self._greedy(seen), state
        shape = (2, len(next(iter(observation.values()))), 1)
        # Evaluation seeds torch's stream, so that its episodes can be repeated; training has one of its own.
        draws = self._rng.random(shape) if mode == "train" else torch.rand(shape, dtype=torch.float64).numpy()
        explore, action = draws[0] < epsilon, self._greedy(seen)
        if explore.any():
            np.copyto(action, (draws[1] * self.q.actions).astype(np.int32), where=explore)
        return action, state

    def _greedy(self, seen: Mapping[str, Array]) -> np.ndarray:
        if self._in_numpy:
            values = self.q.online.forward(seen)
        else:
            with self._inference:
                values = self.q.online.forward(seen).cpu().numpy()
        best: np.ndarray = values.argmax(-1).astype(np.int32)[:, None]
        return best

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
        context = self.frames.context
        return BatchSpec(self.batch_size, 1 + self.n_step, context=context, device=str(self.context.device))

    @torch.no_grad()
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
            value = library(values).amax(values, 1)
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
        assert self.optimizer is not None
        with self._autocast:
            loss, backward, error, metrics = self.td_loss(_arrays(batch) if self._in_numpy else batch)
        self.optimizer.zero_grad()
        backward()
        self.optimizer.step(loss=loss)
        if batch.weight is not None and phase.data_source is not None:
            self._write_priorities(phase.data_source, batch, as_tensor(error))
        self._updates += 1
        if self._updates % self.target_every == 0:
            self.q.move_target(self.target_rate)
        return pack(dict(zip(METRICS, (*metrics, self.optimizer.last_grad_norm), strict=True)))

    @torch.no_grad()
    def td_loss(self, batch: SequenceBatch) -> tuple[Array, Callable[[], None], Array, Array]:
        """The mean loss of R - Q(s, a), its backward pass, the errors, and values to watch.

        Only the values of the chosen actions have a derivative, and it is known: the error, for Huber's loss cut off at
        ±1. So that autograd need not find it, it is written out. Everything is a tensor, or everything NumPy's.
        """
        start = self.frames.context
        target = self.targets(batch)
        values, backward = self.q.online.with_backward(self.frames.at(batch.observation, batch.is_first, start))
        xp, rows, action = library(values), row_numbers(values), batch.action[:, start, 0]
        weight = 1.0 - flags(batch.is_last[:, start])  # nothing follows an episode's last record
        if batch.weight is not None:
            weight = weight * batch.weight
        chosen = values[rows, action]
        error = chosen - target
        slope = error.clip(-1.0, 1.0) if self.huber else 2.0 * error
        # Huber: error²/2, and |error| - 1/2 beyond ±1. MSE: error².
        losses = weight * (slope * (error - 0.5 * slope) if self.huber else error * error)
        derivative = xp.zeros_like(values)
        derivative[rows, action] = weight * slope / self.batch_size
        size = abs(error)
        metrics = tuple(map(mean, (losses, chosen, target, size)))
        return metrics[0], partial(backward, derivative), size, metrics

    def _write_priorities(self, source: str, batch: SequenceBatch, error: Tensor) -> None:
        assert batch.indices is not None
        start = self.frames.context
        priority = torch.where(batch.is_last[:, start], 0.0, error + self.priority_floor)
        # An update that was left out because of a NaN must not leave its mark here.
        priority = priority.nan_to_num(self.priority_floor, self.priority_floor)
        self.context.data_sources[source].update(batch.indices[:, start], {"priority": priority})

    def batch_losses(self, batch: SequenceBatch) -> Mapping[str, Tensor]:
        return {"td": self.td_loss(batch)[0]}

    def log_metrics(self, step: int, writer: MetricsSink) -> None:
        writer.scalar("workflow/epsilon", self.epsilon(step))

    # Saving -----------------------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        own = {"updates": self._updates, "exploration": json.dumps(self._rng.bit_generator.state)}
        return super().get_state() | own

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._updates = state["updates"]
        self._rng.bit_generator.state = json.loads(state["exploration"])


def _arrays(batch: SequenceBatch) -> SequenceBatch:
    """The same batch, in NumPy's terms."""
    names = ("action", "reward", "is_first", "is_last", "is_terminal", "weight")
    values: dict[str, Any] = {name: getattr(batch, name) for name in names}
    values = {name: None if value is None else value.numpy() for name, value in values.items()}
    observation: dict[str, Any] = {key: value.numpy() for key, value in batch.observation.items()}
    return SequenceBatch(observation=observation, **values)
