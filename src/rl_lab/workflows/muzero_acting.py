"""Acting by tree search in a learned latent model, and what a search leaves in the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab import ranks
from rl_lab.components.actions import ActionCodec
from rl_lab.components.frame_stack import FrameStack
from rl_lab.components.planners.base import Plan, Planner
from rl_lab.components.planners.mcts import MCTS, Search
from rl_lab.kernels.graphs import CapturedStep
from rl_lab.records import OBSERVATION_PREFIX, CollectResult, Fields, FieldSpec, Observation, split_observation
from rl_lab.simulation.muzero import MuZeroSimulator
from rl_lab.simulation.simulator import ModelState
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import MetricsSink, PhaseView
from rl_lab.workflows.muzero_targets import ACTIONS, POLICY, VALUE
from rl_lab.workflows.schedule import StepSchedule

Step = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class SearchingWorkflow(Workflow):
    """Searches a tree at every decision. Another planner may take the search's place once the model is learned. A
    subclass learns, and sets the attributes."""

    planner: Planner
    simulator: MuZeroSimulator
    frames: FrameStack
    codec: ActionCodec
    temperature: StepSchedule  # of visit counts, while training
    simulations: StepSchedule | None  # while training; None: the planner's own
    _step: int  # env steps so far
    _records: int  # collected so far
    _graphs: dict[tuple[Any, ...], CapturedStep]  # on a GPU: of each kind of decision and update

    def initial_state(self, num_envs: int) -> AgentState:
        """Frames that were seen, and what the last search found, which is stored with the record."""
        state = self.frames.initial(num_envs, self.context.device)
        for name, spec in self.record_specs().items():
            state[name] = torch.zeros(num_envs, *spec.shape, device=self.context.device)
        return state | self.planner.initial_memory(num_envs)

    def record_specs(self) -> dict[str, FieldSpec]:
        if not isinstance(self.planner, MCTS):
            return {}
        edges = self.planner.edges
        specs = {POLICY: FieldSpec((edges,), "float32"), VALUE: FieldSpec((), "float32")}
        if not self.planner.enumerates:
            specs[ACTIONS] = FieldSpec((edges, self.codec.encoded_size), "float32")
        return specs

    def record_fields(self, state: AgentState) -> Fields:
        return {name: state[name].cpu().numpy() for name in self.record_specs()}

    @torch.no_grad()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """Search, and take the action that was visited most; `train` explores, and draws by the visit counts."""
        if not isinstance(self.planner, MCTS):
            plan, _ = self.plan(observation, state)
            _, memory = self._see(observation, state)
            return self.codec.decode(plan.action).cpu().numpy(), memory | plan.memory
        inputs = {OBSERVATION_PREFIX + key: torch.as_tensor(value) for key, value in observation.items()} | state
        inputs["temperature"] = torch.tensor(self.temperature(self._step))
        count = None if mode == "eval" or self.simulations is None else int(self.simulations(self._step))
        key = ("act", mode, count, len(inputs[VALUE]))
        outputs = self._run(key, lambda given: self._decide_by_search(given, mode, count), inputs)
        # A graph overwrites its outputs in the next call; a state belongs to the caller.
        memory = {name: value.clone() if value.is_cuda else value for name, value in outputs.items()}
        return memory.pop("action").cpu().numpy(), memory

    def _decide_by_search(self, inputs: Mapping[str, Tensor], mode: Mode, simulations: int | None) -> dict[str, Tensor]:
        """From observation, memory and temperature to the action, as the environment takes it, and the next memory."""
        assert isinstance(self.planner, MCTS)
        observation, memory = split_observation(inputs)
        seen, frames = self.frames.push(observation, memory)
        root, explore = self.simulator.observe(seen), mode == "train"
        search = self.planner.search(root, explore=explore, legal=self._legal(seen), simulations=simulations)
        draws = explore and self.planner.rule == "puct"
        edge = search.sample(memory["temperature"]) if draws else search.chosen
        action = self.codec.decode(search.actions[search.tree.rows, edge])
        return frames | self._found(search) | {"action": action}

    def _run(
        self, key: tuple[Any, ...], step: Step, inputs: dict[str, Tensor], changes: Callable[[], list[Tensor]] = list
    ) -> dict[str, Tensor]:
        """A step from tensors to tensors, on a GPU as a CUDA graph: one for each key. `changes` lists the tensors that
        it changes in place."""
        if not self.context.compile:
            return step({name: value.to(self.context.device) for name, value in inputs.items()})
        if key not in self._graphs:
            self._graphs[key] = CapturedStep(step, changes, modules=self.context.modules)
        return self._graphs[key](inputs)

    def _see(self, observation: Observation, state: AgentState) -> tuple[Mapping[str, Tensor], AgentState]:
        tensors = {key: torch.as_tensor(value, device=self.context.device) for key, value in observation.items()}
        return self.frames.push(tensors, state)

    def _legal(self, observation: Mapping[str, Tensor]) -> Tensor | None:
        mask = self.context.action_spec.mask
        return None if mask is None else observation[mask] > 0

    def _found(self, search: Search) -> AgentState:
        """The search statistics that are stored with the record."""
        found = {POLICY: search.policy, VALUE: search.value, ACTIONS: search.actions}
        return {name: found[name] for name in self.record_specs()}

    @torch.no_grad()
    def plan(self, observation: Observation, state: AgentState) -> tuple[Plan, ModelState]:
        seen, _ = self._see(observation, state)
        root = self.simulator.observe(seen)
        if isinstance(self.planner, MCTS):
            return self.planner.plan_from(self.planner.search(root, legal=self._legal(seen)), {}), root
        kept = {name: state[name] for name in self.planner.initial_memory(0)}
        return self.planner.plan(root, kept, observation=seen), root

    def collect_step(self, step: int, *, phase: PhaseView) -> CollectResult | None:
        self._step = step
        result = super().collect_step(step, phase=phase)
        if result is not None:
            self._records += sum(len(block.fields["reward"]) for block in result.blocks)
        return result

    def log_metrics(self, step: int, writer: MetricsSink) -> None:
        writer.scalar("workflow/temperature", self.temperature(step))

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"step": self._step, "records": self._records}

    def dealt_state(self, states: Sequence[dict[str, Any]], own: slice) -> dict[str, Any]:
        records = sum(state["records"] for state in states) // ranks.count()
        return super().dealt_state(states, own) | {"records": records}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if "records" in state:
            self._step, self._records = state["step"], state["records"]
