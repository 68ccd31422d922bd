"""What TD-MPC and TD-MPC2 share: acting by planning in the latent space, and the windows that they learn from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.actions import ActionCodec
from rl_lab.components.controllers.latent_policies import LatentPolicy
from rl_lab.components.controllers.q_ensembles import QEnsemble
from rl_lab.components.dynamics.latent import LatentModel
from rl_lab.components.encoders.latent import LatentEncoder
from rl_lab.components.planners.base import Plan, Planner
from rl_lab.errors import ConfigError, DataError
from rl_lab.metrics.values import TensorMetrics
from rl_lab.nn.capture import CapturedStep, compile_block
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.nn.precision import planning_dtype
from rl_lab.records import (
    OBSERVATION_PREFIX,
    BatchSpec,
    CollectResult,
    Observation,
    SequenceBatch,
    split_observation,
)
from rl_lab.simulation.simulator import ModelState
from rl_lab.simulation.tdmpc import TDMPCSimulator, reduce_pair
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext

Losses = dict[str, Tensor]


class Window(NamedTuple):
    """A stretch of `horizon` transitions, time first. Entry k of `action`, `reward` and `terminal` leads from k to k+1.

    A window may run past the end of an episode; `valid` and `alive` leave out what lies beyond it.
    """

    observation: dict[str, Tensor]  # [horizon + 1, batch, ...]
    action: Float[Tensor, "horizon batch action"]  # encoded
    reward: Float[Tensor, "horizon batch"]
    terminal: Float[Tensor, "horizon batch"]  # 1 where the transition ends the episode for good; never a truncation
    valid: Float[Tensor, "horizon batch"]  # 1 where the transition belongs to the episode that the window begins in
    alive: Float[Tensor, "states batch"]  # [horizon + 1]: 1 where the state does, and an action can be taken in it
    weight: Float[Tensor, " batch"] | None  # of prioritised replay

    @property
    def first(self) -> dict[str, Tensor]:
        return {key: value[0] for key, value in self.observation.items()}

    @property
    def following(self) -> dict[str, Tensor]:
        return {key: value[1:] for key, value in self.observation.items()}


class RolledOut(NamedTuple):
    """What the model predicts of a window from its first observation and its actions."""

    latents: Float[Tensor, "states batch latent"]  # z_0 … z_H
    reward: Float[Tensor, "horizon batch bins"]  # raw outputs


class LatentPlanning(Workflow):
    """Encodes, plans and acts. A subclass has the losses, and says what is made of two Qs (`pair`)."""

    update_hooks = ("update",)
    pair: Literal["mean", "min"]
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
        self.encoder = context.component("encoder", LatentEncoder)
        self.model = context.component("model", LatentModel)
        self.policy = context.controller("policy", LatentPolicy)
        self.q = context.controller("q", QEnsemble)
        self.planner = context.controller("planner", Planner)
        self.codec = ActionCodec(context.action_spec)
        learns = bool(context.optimizers)  # not where it only acts
        self.model_optimizer = context.optimizer("model", FlatAdam) if learns else None
        self.policy_optimizer = context.optimizer("policy", FlatAdam) if learns else None
        self.simulator = TDMPCSimulator(
            encoder=self.encoder, model=self.model, policy=self.policy, q=self.q, pair=self.pair,
            autocast=context.autocast,
        )  # fmt: skip
        context.simulator.attach(self.simulator)
        self.planner.attach(context.simulator)
        self._metric_names: tuple[str, ...] = ()
        self._step: Callable[[dict[str, Tensor]], dict[str, Tensor]] = self._train_step
        self._act_graphs: dict[tuple[Any, ...], CapturedStep] = {}
        if context.compile:
            self.simulator.compile_blocks(planning_dtype(context.device, context.autocast_dtype))
            if self.plans_are_of_one_length:
                self.planner.compile_blocks()
            self._compile()
            self._step = CapturedStep(self._train_step, self._changing_tensors)

    def _compile(self) -> None:
        """Compiled pieces inside one captured CUDA graph. The plain methods stay the reference."""
        for name in ("_encode", "_advance", "_policy_values", *self.compiled):
            setattr(self, name, compile_block(getattr(self, name)))

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
        return self.planner.plan(latent, state), latent

    def _captured_act(self, inputs: dict[str, Tensor], mode: Mode) -> dict[str, Tensor]:
        """`_act` as a CUDA graph."""
        kind = self._plan_kind(len(next(iter(inputs.values()))), mode)
        if kind not in self._act_graphs:
            self._act_graphs[kind] = CapturedStep(lambda given: self._act(given, mode), list)
        # The next call overwrites the graph's outputs; a state belongs to the caller.
        return {name: value.clone() for name, value in self._act_graphs[kind](inputs).items()}

    def _plan_kind(self, num_envs: int, mode: Mode) -> tuple[Any, ...]:
        """What the shapes of a decision depend on: there is a graph for each."""
        return num_envs, mode

    def _act(self, inputs: Mapping[str, Tensor], mode: Mode) -> dict[str, Tensor]:
        """From observation and memory to the action, as the environment takes it, and the next memory."""
        observation, memory = split_observation(inputs)
        latent = self.simulator.observe(observation)
        if self.act_with == "policy":
            action = self.simulator.policy(latent) if mode == "train" else self.policy.mode(latent)
            return memory | {"action": self.codec.decode(action)}
        plan = self.planner.plan(latent, memory)
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
        """One gradient step on the model and the values, one on the policy."""
        outputs = self._step(self._inputs(batch))
        return TensorMetrics(self._metric_names, outputs["metrics"])

    @abstractmethod
    def _train_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]: ...

    def _inputs(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """What the training step takes, as a flat dict: the form in which a captured step is fed."""
        inputs = {OBSERVATION_PREFIX + key: value for key, value in batch.observation.items()}
        inputs |= {"action": batch.action, "reward": batch.reward}
        inputs |= {"is_last": batch.is_last, "is_terminal": batch.is_terminal}
        return inputs if batch.weight is None else inputs | {"weight": batch.weight}

    def _window(self, inputs: Mapping[str, Tensor]) -> Window:
        observation, rest = split_observation(inputs)
        going_on = rest["is_last"].logical_not().float().t()
        valid = going_on[:-1].cumprod(0)
        living = rest["is_terminal"].logical_not().float().t()
        return Window(
            observation={key: value.transpose(0, 1) for key, value in observation.items()},
            action=self.codec.encode(rest["action"][:, :-1]).transpose(0, 1),
            reward=rest["reward"][:, 1:].t(),
            terminal=1.0 - living[1:],
            valid=valid,
            alive=torch.cat([living[:1], living[1:] * valid]),
            weight=rest.get("weight"),
        )

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
        """What the policy is worth in each state by two frozen Qs, and its entropy."""
        rows = latents.flatten(0, 1)
        count = rows.shape[0]
        noise, pair = self.policy.draw_noise((count,)), self.q.draw_pair()
        keep = self.q.draw_keep(2, self.policy.choice_count * count)
        value, entropy = self._policy_values(rows, noise, pair, keep)
        return value.view(latents.shape[:2]), entropy.view(latents.shape[:2])

    def _policy_values(self, latent: Tensor, noise: Tensor, pair: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        choices = self.policy.choices(latent, noise)
        count = choices.action.shape[0]
        rows = latent.expand(count, *latent.shape).flatten(0, 1)
        outputs = self.q(rows, choices.action.flatten(0, 1), keep=keep, members=pair, frozen=True)
        values = reduce_pair(self.q.mean(outputs), self.pair).view(count, -1)
        return (choices.weight * values).sum(0), choices.entropy

    # Steps of the optimisers ------------------------------------------------------------------------------------------

    def _optimize(self, optimizer: FlatAdam | None, loss: Tensor) -> None:
        assert optimizer is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)

    def _packed(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        assert self.model_optimizer is not None
        assert self.policy_optimizer is not None
        metrics["optimizer/model_grad_norm"] = self.model_optimizer.last_grad_norm
        metrics["optimizer/policy_grad_norm"] = self.policy_optimizer.last_grad_norm
        packed = TensorMetrics.pack(metrics)
        self._metric_names = packed.names
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
