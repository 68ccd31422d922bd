"""The base class of every algorithm: acting, collecting, episode tracking. An algorithm adds its losses and updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rl_lab import ranks
from rl_lab.components.acting import Acts, AgentState, Mode, clear_memory
from rl_lab.components.controller_manager import RANDOM_ROLE
from rl_lab.components.planners.base import Plan
from rl_lab.metrics.values import Metrics, pack
from rl_lab.records import (
    OBSERVATION_PREFIX,
    Batch,
    BatchSpec,
    CollectResult,
    EpisodeEnd,
    EpisodeSummary,
    Fields,
    FieldSpec,
    Illustration,
    ImaginedRollout,
    Observation,
    RecordBlock,
    SequenceBatch,
    VectorStep,
)
from rl_lab.simulation.simulator import ModelState
from rl_lab.workflows.context import MetricsSink, PhaseSteps, PhaseView, WorkflowContext
from rl_lab.workflows.diagnosis import find_nonfinite
from rl_lab.workflows.random_actions import RandomActions, legal_action


class Workflow:
    """One algorithm. Subclasses override what they need; `initialize` and one update are required."""

    name: ClassVar[str]
    update_hooks: ClassVar[tuple[str, ...]] = ("update_world_model", "update_controller")  # hooks that take a batch
    # Further hooks of its own, called as hook(phase=…): they return None, metrics or a HookResult.
    other_hooks: ClassVar[tuple[str, ...]] = ()
    named_hooks: ClassVar[tuple[str, ...]] = ("distill",)  # updates that run only in phases that name them

    # Whether several ranks can share out an update: its losses are plain means over the batch, its statistics reduced.
    data_parallel: ClassVar[bool] = False
    # Entries of `state_dict` with a row for each environment, and random streams, which every rank has for itself.
    env_entries: ClassVar[tuple[str, ...]] = ("agent", "episode_return", "episode_start", "in_flight")
    random_entries: ClassVar[tuple[str, ...]] = ("random_actions",)

    def check_phases(self, phases: Sequence[PhaseSteps]) -> None:
        """Refuse a curriculum that this algorithm cannot follow, with a ConfigError, before anything is built."""

    def initialize(self, context: WorkflowContext) -> None:
        self.context = context
        self._bind_context(context)
        if context.train_envs is not None and context.initial is not None:
            self._start_collection(context.train_envs.num_envs, context.initial)

    def _bind_context(self, context: WorkflowContext) -> None:
        """Take what the algorithm needs out of the context, under its own names."""

    # Acting -----------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> AgentState:
        """The memory before the first observation: zeros."""
        return {}

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """Choose actions for a batch of environments. `train` explores; `eval` is greedy where there is a mode."""
        raise NotImplementedError(f"{type(self).__name__} does not act")

    def explore(self, observation: Observation, state: AgentState, phase: PhaseView) -> tuple[np.ndarray, AgentState]:
        """The actions of `collect`. A workflow may let the phase's `controller` choose another actor than its own."""
        return self.act(observation, state, mode="train")

    def reset_state(self, state: AgentState, is_first: np.ndarray) -> AgentState:
        """Clear the memory of the environments that start an episode."""
        return clear_memory(state, is_first)

    def record_specs(self) -> dict[str, FieldSpec]:
        """Fields that the workflow stores with each record beyond the standard ones."""
        return {}

    def record_fields(self, state: AgentState) -> Fields:
        """The values of those fields after `act` returned `state`."""
        return {}

    # Collecting -------------------------------------------------------------------------------------------------------

    def _start_collection(self, num_envs: int, initial: VectorStep) -> None:
        self._episode_return = np.zeros(num_envs, np.float64)
        self._decisions = 0
        self._episode_start = np.zeros(num_envs, np.int64)  # at which decision the running episode began
        self._random_actions = RandomActions(self.context.action_spec, num_envs, self.context.seed)
        self._no_flags = np.zeros(num_envs, bool)
        self._no_flags.flags.writeable = False  # one array stands in every record
        self._field_names = {key: OBSERVATION_PREFIX + key for key in initial.observation}
        self.restart(initial)

    def restart(self, initial: VectorStep) -> None:
        """Go on from this step of the training environments, without memory."""
        self._current = initial
        self._in_flight: np.ndarray | None = None  # the actions of a step that was sent and not received yet
        self._state = self.initial_state(len(initial.is_first))
        self._any_first = bool(initial.is_first.any())
        self._acting_role: str | None = None  # of the controller that has this memory; None: the workflow itself

    def who_acts(self, role: str | None) -> Acts:
        """The actor for a role that a phase or an evaluation names: a controller that can act, else the workflow."""
        return self.context.controllers.acting(role) or self

    def collect_step(self, step: int, *, phase: PhaseView) -> CollectResult | None:
        """One decision in every environment; returns the records that it completed.

        With `training.overlap` the step is only begun: its outcome is received at the start of the next call.
        """
        envs = self.context.train_envs
        assert envs is not None
        result = CollectResult([], envs.num_envs)
        if self._in_flight is not None:
            self._receive(result)
        action = self._decide(result, phase)
        if self.context.overlap:
            self._in_flight = action
            envs.send(action)
        else:
            self._arrive(envs.step(action), result)
            result.following = self._current
        return result

    @property
    def in_flight(self) -> bool:
        """Whether the environments are at a step whose outcome was not received yet."""
        return self._in_flight is not None

    def finish_step(self) -> CollectResult:
        """Receive the step that the environments are at: what it ended, and no new decision."""
        result = CollectResult([], 0)
        if self._in_flight is not None:
            self._receive(result)
        return result

    def _decide(self, result: CollectResult, phase: PhaseView) -> np.ndarray:
        """Choose actions for the present observations; the records of these decisions go into `result`."""
        current, names = self._current, self._field_names
        fields = {names[key]: value for key, value in current.observation.items()}
        if phase.controller_role == RANDOM_ROLE:
            action = legal_action(self._random_actions.draw(), current.observation, self.context.action_spec)
            self._acting_role, self._state = None, self.initial_state(len(current.is_first))
        else:
            actor = self._take_over(phase.controller_role)
            state = actor.reset_state(self._state, current.is_first) if self._any_first else self._state
            if actor is self:
                action, self._state = self.explore(current.observation, state, phase)
            else:
                action, self._state = actor.act(current.observation, state, mode="train")
            if self._state and actor is self:  # what is stored beyond the standard fields comes from the memory
                fields.update(self.record_fields(self._state))
        fields["action"], fields["reward"], fields["is_first"] = action, current.reward, current.is_first
        fields["is_last"] = fields["is_terminal"] = self._no_flags
        result.blocks.append(RecordBlock(fields))
        return action

    def _take_over(self, role: str | None) -> Acts:
        """The actor of a role. When another one takes over, it starts without memory."""
        actor = self.who_acts(role)
        acting_role = None if actor is self else role
        if acting_role != self._acting_role:
            self._acting_role, self._state = acting_role, actor.initial_state(len(self._current.is_first))
        return actor

    def _receive(self, result: CollectResult) -> None:
        assert self.context.train_envs is not None
        self._in_flight = None
        self._arrive(self.context.train_envs.receive(), result)

    def _arrive(self, following: VectorStep, result: CollectResult) -> None:
        """Take over what the last decision led to; episodes that it ended go into `result`."""
        self._decisions += 1
        np.add(self._episode_return, following.reward, out=self._episode_return)
        self._current, self._any_first = following, following.ended is not None
        if following.ended is not None:
            self._close_episodes(following.ended, result)

    def _close_episodes(self, ended: EpisodeEnd, result: CollectResult) -> None:
        """Append the last records of the episodes that ended, and their summaries."""
        count = len(ended.indices)
        fields = {self._field_names[key]: value for key, value in ended.observation.items()}
        fields["reward"], fields["is_terminal"] = ended.reward, ended.is_terminal
        fields["is_first"], fields["is_last"] = np.zeros(count, bool), np.ones(count, bool)
        result.blocks.append(RecordBlock(fields, ended.indices))
        returns, starts, now = self._episode_return, self._episode_start, self._decisions
        # Item by item: mostly one episode ends at a time, and a fancy index costs more than this.
        rewards, terminals = ended.reward.tolist(), ended.is_terminal.tolist()
        for index, reward, terminal in zip(ended.indices.tolist(), rewards, terminals, strict=True):
            length = now - int(starts[index])
            result.episodes.append(EpisodeSummary(index, float(returns[index]) + reward, length, terminal))
            returns[index] = 0.0
            starts[index] = now

    def random_action(self) -> np.ndarray:
        """Uniform actions for the training environments, from the run's own random stream."""
        return legal_action(self._random_actions.draw(), self._current.observation, self.context.action_spec)

    # Learning ---------------------------------------------------------------------------------------------------------

    @property
    def updates_per_env_step(self) -> float:
        """Updates per env step where the phases do not say."""
        return 1.0

    def batch_spec(self) -> BatchSpec | None:
        """The batches that the updates take."""
        return None

    def phase_batch_spec(self, phase: PhaseView) -> BatchSpec | None:
        """The batches of one phase, where its options decide what is trained."""
        return self.batch_spec() or self.context.controllers.batch_spec(str(self.context.device))

    def update_world_model(self, batch: SequenceBatch, *, phase: PhaseView) -> Metrics:
        raise NotImplementedError(f"{type(self).__name__} has no update_world_model")

    def update_controller(self, batch: SequenceBatch, *, phase: PhaseView) -> Metrics:
        raise NotImplementedError(f"{type(self).__name__} has no update_controller")

    def distill(self, batch: Batch, *, phase: PhaseView) -> Metrics:
        """One gradient step of the controllers in the roles `distill_target` and `prior`: to do as the batch did."""
        taught = {role: self._teach(role, batch, phase) for role in self.context.controllers.distilled}
        if len(taught) == 1:
            return next(iter(taught.values()))
        return pack({f"{role}/{name}": value for role, part in taught.items() for name, value in part.items()})

    def _teach(self, role: str, batch: Batch, phase: PhaseView) -> Metrics:
        """One gradient step of a controller that learns by itself."""
        source = self.context.data_sources.get(phase.data_source or "")
        return self.context.controllers.learn(role, batch, source.statistics if source is not None else None)

    def imagine(self, batch: SequenceBatch, *, context: int) -> ImaginedRollout:
        """Observe the first `context` records of each sequence, then predict the others from their actions alone."""
        raise NotImplementedError(f"{type(self).__name__} has no model to imagine with")

    def illustrate(self, batch: SequenceBatch) -> list[Illustration]:
        """Further pictures of the model, from sequences of held-out episodes."""
        return []

    def plan(self, observation: Observation, state: AgentState) -> tuple[Plan, ModelState]:
        """For workflows that plan: the plan that `act` would follow now, with its candidates, and the model state it
        starts from."""
        raise NotImplementedError(f"{type(self).__name__} does not plan")

    def plan_phase(self, step: int) -> str | None:
        """The name of a phase to jump to now, or None."""
        return None

    def log_metrics(self, step: int, writer: MetricsSink) -> None:
        """Write values of the workflow's own when metrics are logged."""

    def batch_losses(self, batch: Any) -> Mapping[str, Tensor]:
        """The loss terms of a batch by name, without stepping an optimiser; it lets `diagnose` trace a bad value."""
        raise NotImplementedError(f"{type(self).__name__} does not expose its losses")

    def diagnose(self, batch: Batch) -> str:
        """Say which loss and which tensor was the first to be NaN or infinite."""
        return find_nonfinite(self, batch)

    def close(self) -> None:
        """Release what the workflow took from the context for itself (`make_envs`)."""

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State beyond that of components, controllers, optimisers and data sources. Plain values and tensors only."""
        if not hasattr(self, "_state"):
            return {}
        return {
            "agent": dict(self._state),
            "acting_role": self._acting_role,
            "episode_return": torch.from_numpy(self._episode_return.copy()),
            "decisions": self._decisions,
            "episode_start": torch.from_numpy(self._episode_start.copy()),
            "random_actions": self._random_actions.state_dict(),
            "in_flight": None if self._in_flight is None else torch.from_numpy(self._in_flight.copy()),
        }

    def dealt_state(self, states: Sequence[dict[str, Any]], own: slice) -> dict[str, Any]:
        """A state for `load_state_dict` of this rank, from the `states` that another number of ranks saved. `own`: the
        environments of this rank among all. Their entries are dealt out anew; a rank that is new keeps its random
        streams; everything else is the first rank's."""
        mine = states[ranks.rank()] if ranks.rank() < len(states) else self.state_dict()
        rows = {name: ranks.dealt([state[name] for state in states], own) for name in self.env_entries}
        return states[0] | {name: mine[name] for name in self.random_entries} | rows

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, after `restart` with the step that the environments stand at."""
        if not state or not hasattr(self, "_state"):
            return
        self._state = {name: value.to(self.context.device) for name, value in state["agent"].items()}
        self._acting_role = state["acting_role"]
        self._any_first = bool(self._current.is_first.any())
        self._episode_return = state["episode_return"].numpy().copy()
        self._decisions, self._episode_start = state["decisions"], state["episode_start"].numpy().copy()
        self._random_actions.load_state_dict(state["random_actions"])
        if state.get("in_flight") is not None:  # the environments stand before this step: they take it again
            assert self.context.train_envs is not None
            self._in_flight = state["in_flight"].numpy().copy()
            self.context.train_envs.send(self._in_flight)
