"""What the workflows with a latent world model share: acting, replayed sequences, stored latents, open-loop pictures.

PlaNet and the Dreamers differ in their losses and in how they choose an action from a latent state; those stand in
their own files.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.actions import ActionCodec
from rl_lab.components.decoders import ObservationModel
from rl_lab.components.planners.base import Plan, Planner
from rl_lab.components.predictors import ContinuePredictor, RewardPredictor
from rl_lab.components.representation_learners.base import LatentState, StateSpaceModel, stack_states
from rl_lab.nn.capture import CapturedStep
from rl_lab.records import (
    OBSERVATION_PREFIX,
    BatchSpec,
    Fields,
    FieldSpec,
    ImaginedRollout,
    Observation,
    SequenceBatch,
    split_observation,
)
from rl_lab.simulation.latent import LatentSimulator
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext

# Of a probe's losses. They reach nothing else, and Adam's steps do not depend on it; so that a limit on the norm of all
# gradients together hardly sees them, it is small.
PROBE_SCALE = 0.01
DECODED = "decoded"  # among the outputs of acting: the action as the environment takes it
PLAN = "plan."  # prefix of what the planner remembers, in the agent's state


class Replayed(NamedTuple):
    """Sequences to train on, with what came before them."""

    observation: dict[str, Tensor]  # [batch, time, ...]
    prev_action: Float[Tensor, "batch time action"]  # the encoded action that led to each observation
    reward: Float[Tensor, "batch time"]
    is_first: Tensor
    is_last: Tensor
    is_terminal: Tensor
    initial: LatentState  # the latent state before the first record


class LatentWorkflow(Workflow):
    """Filters observations into latent states. A subclass adds `_choose`, its losses and its updates.

    With `stored_latents` each record keeps the latent state that the agent had there, a replayed sequence starts from
    the one before it, and updates write fresh ones back; without, it starts from nothing, as at an episode's start.
    """

    captures_acting: ClassVar[bool] = False  # whether choosing an action never waits for the device
    model: LatentSimulator  # what is planned in
    planner: Planner | None = None

    def __init__(self, *, batch_size: int, sequence_length: int, train_ratio: float, stored_latents: bool) -> None:
        self.batch_size, self.sequence_length, self.train_ratio = batch_size, sequence_length, train_ratio
        self.stored_latents = stored_latents

    def _bind_context(self, context: WorkflowContext) -> None:
        self.encoder = context.component("encoder", nn.Module)
        self.rssm = context.component("rssm", StateSpaceModel)
        self.decoder = context.component("decoder", ObservationModel)
        self.reward = context.component("reward", RewardPredictor)
        self.codec = ActionCodec(context.action_spec)
        self.latent_specs = self.rssm.stored_specs() if self.stored_latents else {}
        self._act_graphs: dict[tuple[Mode, int], CapturedStep] = {}

    # Acting -----------------------------------------------------------------------------------------------------------

    def _embed(self, observation: Mapping[str, Tensor]) -> Tensor:
        """What the model sees of an observation."""
        return self.encoder(observation)

    @abstractmethod
    def _choose_action(self, latent: LatentState, *, mode: Mode) -> Float[Tensor, "envs action"]:
        """An encoded action for each environment."""

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
        if self.captures_acting and self.context.compile and "memory" not in state:
            outputs = self._captured_act(seen | state, mode)
        else:
            outputs = self._act({name: value.to(self.context.device) for name, value in seen.items()} | state, mode)
        return outputs.pop(DECODED).cpu().numpy(), outputs

    def _act(self, inputs: Mapping[str, Tensor], mode: Mode) -> dict[str, Tensor]:
        """From observation and state to the action, as the environment takes it, and the next state."""
        with self.context.autocast():
            embed = self._embed(split_observation(inputs)[0])
            latent, _ = self.rssm.observe_step(_latent(inputs), inputs["action"], embed)
            action = self._choose_action(latent, mode=mode)
        return {DECODED: self.codec.decode(action), **_agent_state(latent, action), **_plan_memory(inputs)}

    def _captured_act(self, inputs: Mapping[str, Tensor], mode: Mode) -> dict[str, Tensor]:
        """`_act` as a CUDA graph, one for each mode and number of environments."""
        key = (mode, inputs["action"].shape[0])
        if key not in self._act_graphs:
            self._act_graphs[key] = CapturedStep(lambda tensors: self._act(tensors, mode), list)
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
            latent = self.model.observe(split_observation(inputs)[0], previous=_latent(inputs), action=inputs["action"])
            plan = self.planner.plan(latent, memory or self.planner.initial_memory(len(inputs["action"])))
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

    # Replayed sequences -----------------------------------------------------------------------------------------------

    def batch_spec(self) -> BatchSpec:
        context = 1 if self.latent_specs else 0
        return BatchSpec(self.batch_size, self.sequence_length, context=context, device=str(self.context.device))

    @property
    def updates_per_env_step(self) -> float:
        """The train ratio is the number of replayed records per environment step."""
        return self.train_ratio / (self.batch_size * self.sequence_length)

    def _inputs(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """What a training step takes, as a flat dict: the form in which a captured step is fed."""
        inputs = {OBSERVATION_PREFIX + key: value for key, value in batch.observation.items()}
        inputs |= {"action": batch.action, "reward": batch.reward, "is_first": batch.is_first}
        inputs |= {"is_last": batch.is_last, "is_terminal": batch.is_terminal}
        return inputs | {name: batch.extras[name][:, 0] for name in self.latent_specs}

    def _replayed(self, inputs: Mapping[str, Tensor]) -> Replayed:
        """Pair each record with the action before it. Of a context record only its latent and its action are used."""
        action, is_first = self.codec.encode(inputs["action"][:, :-1]), inputs["is_first"]
        if self.latent_specs:
            skip, initial = 1, self.rssm.from_stored(inputs)
        else:
            skip, initial = 0, self.rssm.initial(action.shape[0])
            action = torch.cat([torch.zeros_like(action[:, :1]), action], 1)
            is_first = torch.cat([torch.ones_like(is_first[:, :1]), is_first[:, 1:]], 1)
        # In one piece: encoder and decoder take all records as rows.
        observation = {key: value[:, skip:].contiguous() for key, value in split_observation(inputs)[0].items()}
        reward, is_last, is_terminal = (inputs[name][:, skip:] for name in ("reward", "is_last", "is_terminal"))
        return Replayed(observation, action, reward, is_first[:, skip:], is_last, is_terminal, initial)

    def _observation_losses(
        self, states: LatentState, embed: Tensor, observation: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The loss terms `observation` and, where a decoder only watches, `probe`; each part of them as a metric."""
        groups = {
            "observation": (self.decoder.metric_group, self.decoder.losses(states, embed, observation)),
            "probe": ("probe", self.decoder.probe_losses(states, observation)),
        }
        losses: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        for name, (prefix, parts) in groups.items():
            means = {f"{prefix}/{key}": part.mean() for key, part in parts.items()}
            if means:
                losses[name] = torch.stack(list(means.values())).sum()
            metrics |= means
        return losses, metrics

    # Fresh latents go back to the replay ------------------------------------------------------------------------------

    def _write_latents(self, batch: SequenceBatch, outputs: Mapping[str, Tensor], phase: PhaseView) -> None:
        """Where the replay keeps latents. It copies them from a GPU in the background, in the order of the calls."""
        if self.latent_specs and phase.data_source is not None and batch.indices is not None:
            latents = {name: outputs[name] for name in self.latent_specs}
            self.context.data_sources[phase.data_source].update(batch.indices[:, 1:], latents)

    def _model_tensors(self) -> list[Tensor]:
        """Everything that an update may change in place, the optimisers' own tensors aside."""
        modules = [*self.context.components.values(), *(module for _, module in self.context.controllers.items())]
        return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

    # Looking ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def imagine(self, batch: SequenceBatch, *, context: int) -> ImaginedRollout:
        """Filter `context` records from an empty memory, then predict the others from their actions alone."""
        action = self.codec.encode(batch.action)
        prev_action = torch.cat([torch.zeros_like(action[:, :1]), action[:, :-1]], 1)
        state, states = self.rssm.initial(batch.action.shape[0]), []
        with self.context.autocast():
            embed = self._embed(batch.observation)
            for t in range(action.shape[1]):
                if t < context:
                    state, _ = self.rssm.observe_step(state, prev_action[:, t].to(embed.dtype), embed[:, t])
                else:
                    state = self.rssm.predict_step(state, prev_action[:, t].to(embed.dtype))
                states.append(state)
            path = stack_states(states, 1)
            imagined = self.decoder.reconstruct(path)
            reward = self.reward.mean(self.reward(path.features)).float().cpu().numpy()
            predictor, continuation = self.context.components.get("continue"), None
            if isinstance(predictor, ContinuePredictor):
                likely = predictor.mean(predictor(path.features)) / predictor.discount
                continuation = likely.float().cpu().numpy()
        return ImaginedRollout(
            context=context,
            real={key: value.cpu().numpy() for key, value in batch.observation.items()},
            imagined={key: value.cpu().numpy() for key, value in imagined.items()},
            real_reward=batch.reward.cpu().numpy(),
            imagined_reward=reward,
            imagined_continue=continuation,
        )


def _plan_memory(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if name.startswith(PLAN)}


def _latent(state: Mapping[str, Tensor]) -> LatentState:
    return LatentState(state["deter"], state["stoch"], state.get("memory"))


def _agent_state(latent: LatentState, action: Tensor) -> AgentState:
    state = {"deter": latent.deter.float(), "stoch": latent.stoch.float(), "action": action.float()}
    return state if latent.memory is None else state | {"memory": latent.memory.float()}
