"""Acting with a latent world model: the agent's state is the latent state after its last observation.

PlaNet and the Dreamers differ in how they choose an action from a latent state; what they share stands here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from rl_lab.components.actions import ActionCodec
from rl_lab.components.planners.base import Plan, Planner
from rl_lab.components.world_models.base import LatentState, StateSpaceModel
from rl_lab.kernels.graphs import CapturedStep
from rl_lab.records import OBSERVATION_PREFIX, Fields, FieldSpec, Observation, split_observation
from rl_lab.simulation.rssm import RSSMSimulator
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import WorkflowContext

DECODED = "decoded"  # among the outputs of acting: the action as the environment takes it
PLAN = "plan."  # prefix of what the planner remembers, in the agent's state


class WorldModelActing(Workflow):
    """Filters observations into latent states. A subclass says in `_act` how it chooses an action there, or plans it.

    With `stored_latents` each record keeps the latent state that the agent had there.
    """

    model: RSSMSimulator  # what is planned in
    planner: Planner | None = None

    def __init__(self, *, stored_latents: bool) -> None:
        self.stored_latents = stored_latents

    def _bind_context(self, context: WorkflowContext) -> None:
        self.encoder = context.component("encoder", nn.Module)
        self.rssm = context.component("rssm", StateSpaceModel)
        self.codec = ActionCodec(context.action_spec)
        self.latent_specs = self.rssm.stored_specs() if self.stored_latents else {}
        self._act_graphs: dict[tuple[Mode, int], CapturedStep] = {}

    def _embed(self, observation: Mapping[str, Tensor]) -> Tensor:
        """The embedding of an observation, as acting and planning need it."""
        return self.encoder(observation)

    def initial_state(self, num_envs: int) -> AgentState:
        latent = self.rssm.initial(num_envs)
        planner = self.planner
        memory = planner.initial_memory(num_envs) if planner is not None and planner.warm_start else {}
        state = _agent_state(latent, latent.deter.new_zeros(num_envs, self.codec.encoded_size))
        return state | {PLAN + name: value for name, value in memory.items()}

    @torch.no_grad()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """Filter the new observation into the latent state and choose an action from it."""
        seen = {OBSERVATION_PREFIX + key: torch.as_tensor(value) for key, value in observation.items()}
        if self.context.compile and "memory" not in state:
            outputs = self._captured_act(seen | state, mode)
        else:
            outputs = self._act({name: value.to(self.context.device) for name, value in seen.items()} | state, mode)
        return outputs.pop(DECODED).cpu().numpy(), outputs

    @abstractmethod
    def _act(self, inputs: Mapping[str, Tensor], mode: Mode) -> dict[str, Tensor]:
        """From observation and state to the action, as the environment takes it, and the next state."""

    def _filtered_step(self, inputs: Mapping[str, Tensor]) -> LatentState:
        """The latent state after the new observation."""
        embed = self._embed(split_observation(inputs)[0])
        return self.rssm.observe_step(_latent(inputs), inputs["action"], embed)[0]

    def _decided(self, latent: LatentState, action: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of `_act` for an encoded action; what a planner remembers stays as it is."""
        return {DECODED: self.codec.decode(action), **_agent_state(latent, action), **_plan_memory(inputs)}

    def _captured_act(self, inputs: Mapping[str, Tensor], mode: Mode) -> dict[str, Tensor]:
        """`_act` as a CUDA graph, one for each mode and number of environments."""
        key = (mode, inputs["action"].shape[0])
        if key not in self._act_graphs:
            step = CapturedStep(lambda tensors: self._act(tensors, mode), list, modules=self.context.modules)
            self._act_graphs[key] = step
        # The next call overwrites the graph's outputs; a state belongs to the caller.
        return {name: value.clone() for name, value in self._act_graphs[key](inputs).items()}

    @torch.no_grad()
    def plan(self, observation: Observation, state: AgentState) -> tuple[Plan, LatentState]:
        device = self.context.device
        inputs = {OBSERVATION_PREFIX + key: torch.as_tensor(value, device=device) for key, value in observation.items()}
        return self._planned(inputs | state)

    def _planned(self, inputs: Mapping[str, Tensor]) -> tuple[Plan, LatentState]:
        """Filter the new observation into the latent state, and plan from there."""
        assert self.planner is not None
        memory = {name.removeprefix(PLAN): value for name, value in _plan_memory(inputs).items()}
        with self.context.autocast():
            seen = split_observation(inputs)[0]
            latent = self.model.observe(seen, previous=_latent(inputs), action=inputs["action"])
            memory = memory or self.planner.initial_memory(len(inputs["action"]))
            plan = self.planner.plan(latent, memory, observation=seen)
        return plan, latent

    def _state_after(self, plan: Plan, latent: LatentState, inputs: Mapping[str, Tensor]) -> AgentState:
        """The agent's state when the plan's first action is taken."""
        memory = {PLAN + name: value for name, value in plan.memory.items() if PLAN + name in inputs}
        return _agent_state(latent, plan.action) | memory

    def record_specs(self) -> dict[str, FieldSpec]:
        return self.latent_specs

    def record_fields(self, state: AgentState) -> Fields:
        if not self.latent_specs:
            return {}
        return {name: value.cpu().numpy() for name, value in self.rssm.to_stored(_latent(state)).items()}


def _plan_memory(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if name.startswith(PLAN)}


def _latent(state: Mapping[str, Tensor]) -> LatentState:
    return LatentState(state["deter"], state["stoch"], state.get("memory"))


def _agent_state(latent: LatentState, action: Tensor) -> AgentState:
    state = {"deter": latent.deter.float(), "stoch": latent.stoch.float(), "action": action.float()}
    return state if latent.memory is None else state | {"memory": latent.memory.float()}
