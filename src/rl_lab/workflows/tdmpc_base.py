"""Acting by planning in the latent space, and the windows to learn from: what TD-MPC and TD-MPC2 share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.actions import ActionCodec
from rl_lab.components.actors.tdmpc import TDMPCPolicy
from rl_lab.components.dynamics.tdmpc import TDMPCModel
from rl_lab.components.encoders.tdmpc import TDMPCEncoder
from rl_lab.components.planners.base import Plan, Planner
from rl_lab.components.q_functions.ensemble import QEnsemble
from rl_lab.errors import ConfigError, DataError
from rl_lab.kernels.graphs import CapturedStep, compile_block
from rl_lab.metrics.values import TensorMetrics
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.records import (
    OBSERVATION_PREFIX,
    BatchSpec,
    CollectResult,
    Observation,
    SequenceBatch,
    split_observation,
)
from rl_lab.simulation.simulator import ModelState
from rl_lab.simulation.tdmpc import QReduction, TDMPCSimulator, reduce_q
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.tdmpc_window import RolledOut, Window, make_window

Losses = dict[str, Tensor]
Step = Callable[[dict[str, Tensor]], dict[str, Tensor]]
WORLD_MODEL, BEHAVIOUR = ("encoder", "model"), ("q",)  # modules of the model optimiser, by the hook that trains them


class TDMPCBase(Workflow):
    """Encodes, plans and acts. A subclass has the losses, and says how two Qs are reduced to one value.

    The world model is encoder, dynamics, reward and termination; the behaviour is Qs and policy. `update` trains all of
    them at once, `update_world_model` and `update_controller` one of the two.
    """

    update_hooks = ("update", "update_world_model", "update_controller")
    named_hooks = ("distill", "clone")
    q_reduction: ClassVar[QReduction]  # of the two Qs that judge the policy and the planner's last states
    compiled: ClassVar[tuple[str, ...]]  # methods of the subclass
    plans_are_of_one_length: ClassVar[bool] = True  # else the planner would be compiled for each

    def __init__(self, *, batch_size: int, horizon: int, act_with: str, class_noise: float) -> None:
        if batch_size < 1 or horizon < 1:
            raise ConfigError(f"batch_size={batch_size}, horizon={horizon}: expected at least 1 of each.")
        if act_with not in ("planner", "policy"):
            raise ConfigError(f"act_with={act_with!r}: expected planner or policy.")
        if not 0.0 <= class_noise <= 1.0:
            raise ConfigError(f"class_noise={class_noise}: expected a share from 0 to 1.")
        self.batch_size, self.horizon, self.act_with, self.class_noise = batch_size, horizon, act_with, class_noise

    def _bind_context(self, context: WorkflowContext) -> None:
        self.encoder = context.component("encoder", TDMPCEncoder)
        self.model = context.component("model", TDMPCModel)
        self.policy = context.controller("policy", TDMPCPolicy)
        self.q = context.controller("q", QEnsemble)
        self.planner = context.controller("planner", Planner)
        self.codec = ActionCodec(context.action_spec)
        learns = bool(context.optimizers)  # not where it only acts
        self.model_optimizer = context.optimizer("model", FlatAdam) if learns else None
        self.policy_optimizer = context.optimizer("policy", FlatAdam) if learns else None
        self.simulator = TDMPCSimulator(
            encoder=self.encoder, model=self.model, policy=self.policy, q=self.q, q_reduction=self.q_reduction,
            autocast=context.autocast,
        )  # fmt: skip
        context.simulator.attach(self.simulator)
        self.planner.attach(context.simulator)
        self._metric_names: dict[str, tuple[str, ...]] = {}
        self._steps: dict[str, Step] = {
            "update": self._train_step,
            "update_world_model": self._world_model_step,
            "update_controller": self._controller_step,
        }
        self._act_graphs: dict[tuple[Any, ...], CapturedStep] = {}
        if context.compile:
            self.simulator.compile_blocks(context.planning_dtype)
            if self.plans_are_of_one_length:
                self.planner.compile_blocks()
            self._compile()

    def _compile(self) -> None:
        """Compiled pieces inside captured CUDA graphs. The plain methods stay the reference."""
        for name in ("_encode", "_advance", "_policy_values", *self.compiled):
            setattr(self, name, compile_block(getattr(self, name)))
        self._steps = {
            name: CapturedStep(step, self._changing_tensors, modules=self.context.modules)
            for name, step in self._steps.items()
        }

    # Acting -----------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> AgentState:
        """The plan of the decision before, which the next one starts from."""
        return self.planner.initial_memory(num_envs)

    @torch.no_grad()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """Plan, and take the first action; `train` adds noise as wide as the planner was unsure."""
        seen = {OBSERVATION_PREFIX + key: torch.as_tensor(value) for key, value in observation.items()}
        if self.context.compile:
            outputs = self._captured_act(seen | state, mode)
        else:
            outputs = self._act({key: value.to(self.context.device) for key, value in seen.items()} | state, mode)
        return outputs.pop("action").cpu().numpy(), outputs

    @torch.no_grad()
    def plan(self, observation: Observation, state: AgentState) -> tuple[Plan, ModelState]:
        seen = {key: torch.as_tensor(value, device=self.context.device) for key, value in observation.items()}
        latent = self.simulator.observe(seen)
        return self.planner.plan(latent, state, observation=seen), latent

    def _captured_act(self, inputs: dict[str, Tensor], mode: Mode) -> dict[str, Tensor]:
        """`_act` as a CUDA graph."""
        kind = self._plan_kind(len(next(iter(inputs.values()))), mode)
        if kind not in self._act_graphs:
            step = CapturedStep(lambda given: self._act(given, mode), list, modules=self.context.modules)
            self._act_graphs[kind] = step
        # The next call overwrites the graph's outputs; a state belongs to the caller.
        return {name: value.clone() for name, value in self._act_graphs[kind](inputs).items()}

    def _plan_kind(self, num_envs: int, mode: Mode) -> tuple[Any, ...]:
        """The facts that the shapes of a decision depend on: there is a graph for each."""
        return num_envs, mode

    def _act(self, inputs: Mapping[str, Tensor], mode: Mode) -> dict[str, Tensor]:
        """From observation and memory to the action, as the environment takes it, and the next memory."""
        observation, memory = split_observation(inputs)
        latent = self.simulator.observe(observation)
        if self.act_with == "policy":
            action = self.simulator.policy(latent) if mode == "train" else self.policy.mode(latent)
            return memory | {"action": self.codec.decode(action)}
        plan = self.planner.plan(latent, memory, observation=observation)
        action = plan.action if mode == "eval" else self._explore(plan)
        return plan.memory | {"action": self.codec.decode(action)}

    def _explore(self, plan: Plan) -> Float[Tensor, "env action"]:
        """Continuous entries move by the planner's final deviation, discrete ones are random now and then."""
        layout, noise = self.planner.layout, torch.randn_like(plan.action)
        return layout.sample(layout.keep_possible(plan.action, self.class_noise), plan.std[:, 0], noise)

    def collect_step(self, step: int, *, phase: PhaseView) -> CollectResult | None:
        result = super().collect_step(step, phase=phase)
        if not self.model.episodic and result is not None and any(episode.is_terminal for episode in result.episodes):
            raise DataError(
                "An episode ended before its time limit, but the model does not predict endings: "
                "components.model.episodic=false. Set it to true for this environment."
            )
        return result

    # Learning ---------------------------------------------------------------------------------------------------------

    def batch_spec(self) -> BatchSpec:
        return BatchSpec(self.batch_size, self.horizon + 1, device=str(self.context.device))

    def update(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step on the world model and the Qs, one on the policy."""
        return self._run("update", batch, phase)

    def update_world_model(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step on encoder, dynamics, reward and termination; Qs and policy stay as they are."""
        return self._run("update_world_model", batch, phase)

    def update_controller(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step on the Qs, one on the policy, at latents of the world model, which stays as it is."""
        return self._run("update_controller", batch, phase)

    def clone(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step of the policy towards the actions of a dataset, in squared error of its mode at latents of
        the encoder, which stays as it is: behaviour cloning. An episode's last record has no action."""
        with torch.no_grad():
            latent = self.encoder(dict(batch.observation))
        error = (self.policy.mode(latent) - self.codec.encode(batch.action)).square().mean(-1)
        decided = (~batch.is_last).float()
        loss = (decided * error).sum() / decided.sum().clamp(min=1.0)
        self._optimize(self.policy_optimizer, loss)
        assert self.policy_optimizer is not None
        return TensorMetrics.pack(
            {"loss/clone": loss, "optimizer/policy_grad_norm": self.policy_optimizer.last_grad_norm}
        )

    def _run(self, hook: str, batch: SequenceBatch, phase: PhaseView) -> TensorMetrics:
        outputs = self._steps[hook](self._inputs(batch))
        self._use_outputs(outputs, batch, phase)
        return TensorMetrics(self._metric_names[hook], outputs["metrics"])

    def _use_outputs(self, outputs: Mapping[str, Tensor], batch: SequenceBatch, phase: PhaseView) -> None:
        """Hand further outputs of a step on, outside of its graph."""

    @abstractmethod
    def _train_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]: ...

    @abstractmethod
    def _world_model_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]: ...

    @abstractmethod
    def _controller_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]: ...

    def _inputs(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """The tensors of a batch as a flat dict: the form in which a captured step is fed."""
        inputs = {OBSERVATION_PREFIX + key: value for key, value in batch.observation.items()}
        inputs |= {"action": batch.action, "reward": batch.reward}
        inputs |= {"is_last": batch.is_last, "is_terminal": batch.is_terminal}
        return inputs if batch.weight is None else inputs | {"weight": batch.weight}

    def _window(self, inputs: Mapping[str, Tensor]) -> Window:
        """The batch, time first, with its images shifted at random."""
        observation, rest = split_observation(inputs)
        return make_window(self.encoder.augment(observation), self.codec.encode(rest["action"]), rest)

    # What the losses are taken on -------------------------------------------------------------------------------------

    def roll_out(self, window: Window) -> RolledOut:
        """z_0 = h(s_0), z_{k+1} = d(z_k, a_k): every loss is taken on these, so every loss reaches the encoder."""
        latents, rewards = [self._encode(window.first)], []
        for action in window.action.unbind(0):
            latent, reward = self._advance(latents[-1], action)
            latents.append(latent)
            rewards.append(reward)
        return RolledOut(torch.stack(latents), torch.stack(rewards))

    def _encode(self, observation: dict[str, Tensor]) -> Tensor:
        return self.encoder(observation).float()

    def _advance(self, latent: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        following, reward = self.model.step(latent, action)
        return following.float(), reward.float()

    def policy_values(
        self, latents: Float[Tensor, "states batch latent"]
    ) -> tuple[Float[Tensor, "states batch"], Float[Tensor, "states batch"]]:
        """The policy's value in each state by two frozen Qs, and its entropy."""
        rows = latents.flatten(0, 1)
        count = rows.shape[0]
        noise, members = self.policy.draw_noise((count,)), self.q.draw_pair()
        keep = self.q.draw_keep(2, self.policy.choice_count * count)
        value, entropy = self._policy_values(rows, noise, members, keep)
        return value.view(latents.shape[:2]), entropy.view(latents.shape[:2])

    def _policy_values(
        self, latent: Tensor, noise: Tensor, members: Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        choices = self.policy.choices(latent, noise)
        count = choices.action.shape[0]
        rows = latent.expand(count, *latent.shape).flatten(0, 1)
        outputs = self.q(rows, choices.action.flatten(0, 1), keep=keep, members=members, frozen=True)
        values = reduce_q(self.q.mean(outputs), self.q_reduction).view(count, -1)
        return (choices.weight * values).sum(0), choices.entropy

    # Steps of the optimisers ------------------------------------------------------------------------------------------

    def _optimize(self, optimizer: FlatAdam | None, loss: Tensor, modules: Collection[str] | None = None) -> None:
        """One step on all parameters of an optimiser, or on those of some modules."""
        assert optimizer is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss, groups=modules)

    def _packed(self, hook: str, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """The metrics of a step as one vector; their names are kept for its hook."""
        assert self.model_optimizer is not None
        assert self.policy_optimizer is not None
        metrics["optimizer/model_grad_norm"] = self.model_optimizer.last_grad_norm
        if hook != "update_world_model":
            metrics["optimizer/policy_grad_norm"] = self.policy_optimizer.last_grad_norm
        packed = TensorMetrics.pack(metrics)
        self._metric_names[hook] = packed.names
        return {"metrics": packed.values_vector}

    def _powers(self, base: float, count: int) -> Float[Tensor, "count 1"]:
        """base^0, base^1, …: how much each step of a window counts."""
        return torch.tensor([[base**step] for step in range(count)], device=self.context.device)

    def _changing_tensors(self) -> list[Tensor]:
        """Everything that an update changes in place."""
        assert self.model_optimizer is not None
        assert self.policy_optimizer is not None
        modules = [*self.context.components.values(), *(module for _, module in self.context.controllers.items())]
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        return tensors + self.model_optimizer.state_tensors() + self.policy_optimizer.state_tensors()
