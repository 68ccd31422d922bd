"""Diffuser (Janner et al., 2022): plans are drawn from a diffusion model of trajectories, and followed.

What later work corrected is in it: several candidates and a critic that chooses among them (Diffusion Veteran), rows
that lie several env steps apart, and execution by a PD controller or inverse dynamics, because the diffused actions
themselves do not follow the diffused states closely enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_lab.components.diffusion.guidance import Guidance, Inpainting
from rl_lab.components.diffusion.model import Sampler
from rl_lab.components.diffusion.trajectories import TrajectoryModel
from rl_lab.components.diffusion.trajectory_value import TrajectoryValue, ValueGuidance
from rl_lab.components.dynamics.inverse import InverseDynamics
from rl_lab.errors import ConfigError
from rl_lab.metrics.values import Metrics, pack
from rl_lab.nn.optimizers import gradient_step
from rl_lab.records import (
    OBSERVATION_PREFIX,
    BatchSpec,
    FieldSpec,
    Illustration,
    Observation,
    SequenceBatch,
)
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import HookResult, PhaseSteps, PhaseView, WorkflowContext
from rl_lab.workflows.diffuser_pictures import Denoising, picture_plans

Execution = Literal["pd", "inverse_dynamics", "actions"]
RETURN = "return_to_go"  # the field that `label_returns` writes


class Candidates(NamedTuple):
    """Plans for some environments, normalised, and what the critic expects of each."""

    rows: Float[Tensor, "env candidate horizon dim"]
    value: Float[Tensor, "env candidate"]
    chosen: Int[Tensor, " env"]


class Diffuser(Workflow):
    """Methods appear in the order: planning, following a plan, the trajectory model, the critic.

    `update_world_model` trains the diffusion model of trajectories, `update_controller` the critic of noisy
    trajectories and the inverse dynamics. A plan is made where there is none and after `replan_every` env steps.
    """

    name: ClassVar[str] = "diffuser"
    other_hooks: ClassVar[tuple[str, ...]] = ("label_returns",)

    def __init__(
        self,
        *,
        batch_size: int,
        returns: Literal["window", "episode"],  # that the critic learns: within a window, or to the episode's end
        discount: float,  # of them, for each env step
        terminal_penalty: float,  # added to the last reward of an episode that ended by itself (returns: episode)
        candidates: int,
        select: Literal["critic", "first"],  # among the candidates
        sampler: Sampler,
        sampling_steps: int | None,  # None: every level
        temperature: float,  # of the noise
        guide_scale: float,  # of the critic's gradient; 0: no guidance
        guide_steps: int,  # ascents at each level
        guide_stop: int,  # no guidance in the last levels
        execution: Execution,
        stiffness: float,  # of the PD controller
        damping: float,
        replan_every: int | None,  # env steps; None: when the plan is over
    ) -> None:
        if candidates < 1 or batch_size < 1 or not 0.0 < discount <= 1.0 or guide_steps < 1:
            raise ConfigError(
                f"batch_size={batch_size}, candidates={candidates}, guide_steps={guide_steps}, discount={discount}: "
                "expected at least 1 of each, and a discount above 0 and at most 1."
            )
        if replan_every is not None and replan_every < 1:
            raise ConfigError(f"replan_every={replan_every}: expected null or at least 1 env step.")
        self.batch_size, self.returns, self.discount = batch_size, returns, discount
        self.terminal_penalty, self.candidates, self.select = terminal_penalty, candidates, select
        self.sampler: Sampler = sampler
        self.sampling_steps, self.temperature = sampling_steps, temperature
        self.guide_scale, self.guide_steps, self.guide_stop = guide_scale, guide_steps, guide_stop
        self.execution, self.stiffness, self.damping = execution, stiffness, damping
        self.replan_every = replan_every

    def _bind_context(self, context: WorkflowContext) -> None:
        self.trajectories = context.component("trajectories", TrajectoryModel)
        self.value = context.component("value", TrajectoryValue)
        self.inverse = None
        if "inverse_dynamics" in context.components:
            self.inverse = context.component("inverse_dynamics", InverseDynamics)
        self._check_execution()

    def _check_execution(self) -> None:
        model = self.trajectories
        if self.execution == "pd" and model.state_size != 2 * model.action_size:
            raise ConfigError(
                f"workflow.execution=pd needs states of positions and then velocities, as many as there are actions "
                f"({model.action_size}); the state has {model.state_size} entries. Choose "
                "components.trajectories.state_keys, or execution=inverse_dynamics."
            )
        if self.execution == "actions" and model.stride != 1:
            raise ConfigError(
                f"workflow.execution=actions takes the actions of the plan's rows, which lie {model.stride} env steps "
                "apart: components.trajectories.stride=1, or another execution."
            )
        if self.execution == "inverse_dynamics" and self.inverse is None:
            raise ConfigError("workflow.execution=inverse_dynamics needs components.inverse_dynamics.")

    def check_phases(self, phases: Sequence[PhaseSteps]) -> None:
        """The critic's returns to the end of an episode must have been labelled."""
        labelled = self.returns == "window"
        for phase in phases:
            labelled = labelled or "label_returns" in phase.hooks
            if "update_controller" in phase.hooks and not labelled:
                raise ConfigError(
                    f"{phase.place}: update_controller learns returns to the end of the episode "
                    "(workflow.returns=episode), and no phase before it has label_returns among its hooks."
                )

    # Planning ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def draw(self, observation: Mapping[str, Tensor], *, watch: Denoising | None = None) -> Candidates:
        """Candidates from these observations [env, …], guided by the critic, and the one that it chooses."""
        model, count = self.trajectories, self.candidates
        spread = {key: value.repeat_interleave(count, 0) for key, value in observation.items()}
        envs = len(next(iter(observation.values())))
        hooks: Guidance = ValueGuidance(
            model.inpainting(spread), self.value, model.model.schedule, scale=self.guide_scale,
            steps=self.guide_steps, stop=self.guide_stop,
        )  # fmt: skip
        if watch is not None:
            watch.inner = hooks
            hooks = watch
        rows = model.draw(
            hooks, envs * count, sampler=self.sampler, steps=self.sampling_steps, temperature=self.temperature
        )
        value = self.value.expected_return(rows).view(envs, count)
        chosen = value.argmax(1) if self.select == "critic" else torch.zeros_like(value[:, 0], dtype=torch.int64)
        return Candidates(rows.view(envs, count, *rows.shape[1:]), value, chosen)

    def initial_state(self, num_envs: int) -> AgentState:
        """No plan. A plan is kept in the environment's own units."""
        model = self.trajectories
        plan = model.seen.new_zeros(num_envs, model.horizon, model.dim)
        age = torch.zeros(num_envs, dtype=torch.int64, device=plan.device)
        return {"plan": plan, "age": age, "planned": plan[:, 0, 0].clone()}

    @torch.no_grad()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """Plan where it is time to, and follow the plan for a step."""
        model = self.trajectories
        seen = {key: torch.as_tensor(value, device=self.context.device) for key, value in observation.items()}
        due = (state["planned"] == 0) | (state["age"] >= (self.replan_every or model.span))
        plan, age = state["plan"].clone(), torch.where(due, 0, state["age"])
        if due.any():
            drawn = self.draw({key: value[due] for key, value in seen.items()})
            best = drawn.rows[torch.arange(len(drawn.chosen), device=plan.device), drawn.chosen]
            plan[due] = model.normalizer.inverse(best)
        action = self._follow(plan, age, model.state.join(seen))
        decoded: np.ndarray = model.codec.decode(action.clamp(-1.0, 1.0)).cpu().numpy()
        return decoded, {"plan": plan, "age": age + 1, "planned": torch.ones_like(state["planned"])}

    # Following a plan -------------------------------------------------------------------------------------------------

    def _follow(
        self, plan: Float[Tensor, "env horizon dim"], age: Int[Tensor, " env"], state: Float[Tensor, "env state"]
    ) -> Float[Tensor, "env action"]:
        """The encoded action towards the state that the plan has for the next env step."""
        model, actions = self.trajectories, self.trajectories.action_size
        if self.execution == "actions":
            return plan[torch.arange(len(plan), device=plan.device), age.clamp(max=model.horizon - 1), :actions]
        target = waypoint(plan[..., actions:], (age + 1) / model.stride)
        if self.execution == "pd":
            towards = target - state
            return self.stiffness * towards[:, :actions] + self.damping * towards[:, actions:]
        assert self.inverse is not None
        return self.inverse(self._normal_state(state), self._normal_state(target))

    def _normal_state(self, state: Float[Tensor, "*lead state"]) -> Float[Tensor, "*lead state"]:
        padding = state.new_zeros(*state.shape[:-1], self.trajectories.action_size)
        return self.trajectories.normalizer(torch.cat([padding, state], -1))[..., self.trajectories.action_size :]

    # The trajectory model ---------------------------------------------------------------------------------------------

    def batch_spec(self) -> BatchSpec:
        fields = [OBSERVATION_PREFIX + key for key in self.context.observation_spec]
        fields += ["action", "reward", *self.record_specs()]
        return BatchSpec(
            self.batch_size, self.trajectories.span + 1, fields=tuple(fields), device=str(self.context.device)
        )

    def _rows(self, batch: SequenceBatch, phase: PhaseView) -> Float[Tensor, "batch horizon dim"]:
        source = self.context.data_sources[phase.data_source or ""]
        if source.statistics is None:
            raise ConfigError(
                f"data_sources.{phase.data_source} does not know the limits of its data: Diffuser learns from a "
                "dataset (data_source=offline)."
            )
        self.trajectories.fit(source.statistics)
        self.trajectories.remember(self.trajectories.state.join(batch.observation)[:, 0])
        return self.trajectories.rows(batch.observation, batch.action)

    def update_world_model(self, batch: SequenceBatch, *, phase: PhaseView) -> Metrics:
        """One gradient step of the diffusion model of trajectories."""
        loss = self.trajectories.loss(self._rows(batch, phase))
        step = gradient_step(self.context.optimizers["trajectories"], loss)
        self.trajectories.after_update()
        return pack(
            {"loss/trajectories": loss.detach(), **{f"optimizer/{name}": value for name, value in step.items()}}
        )

    # The critic -------------------------------------------------------------------------------------------------------

    def record_specs(self) -> dict[str, FieldSpec]:
        return {RETURN: FieldSpec((), "float32")} if self.returns == "episode" else {}

    def label_returns(self, *, phase: PhaseView) -> HookResult:
        """Write the discounted return from each record to the end of its episode into the dataset's records."""
        source = self.context.data_sources[phase.data_source or ""]
        names = ("reward", "is_last", "is_terminal")
        scan = source.scan(start=0, count=len(source), fields=names)
        reward, is_last, is_terminal = (scan.fields[name] for name in names)
        to_go, after = np.zeros(len(reward), np.float32), 0.0
        for index in reversed(range(len(reward))):
            to_go[index] = after = 0.0 if is_last[index] else after
            received = reward[index] + (self.terminal_penalty if is_terminal[index] else 0.0)
            after = received + self.discount * after  # of the record before, which this reward followed
        source.update(scan.indices, {RETURN: to_go})
        return HookResult({"return_to_go": float(to_go.mean())})

    def controller_losses(self, batch: SequenceBatch, rows: Float[Tensor, "batch horizon dim"]) -> dict[str, Tensor]:
        """Of the critic and, where there are any, the inverse dynamics."""
        model = self.trajectories
        if self.returns == "episode":
            returns = batch.extras[RETURN][:, 0]
        else:
            weights = self.discount ** torch.arange(model.span, device=rows.device)
            returns = (weights * batch.reward[:, 1 : model.span + 1]).sum(1)
        losses = {"value": self.value.loss(model.model.schedule, Inpainting(rows, model.known()), rows, returns)}
        if self.inverse is not None:
            states = self._normal_state(model.state.join(batch.observation))
            action = model.codec.encode(batch.action[:, :-1])
            losses["inverse_dynamics"] = self.inverse.loss(states[:, :-1], states[:, 1:], action)
        return losses

    def update_controller(self, batch: SequenceBatch, *, phase: PhaseView) -> Metrics:
        """One gradient step of the critic of noisy trajectories and the inverse dynamics."""
        losses = self.controller_losses(batch, self._rows(batch, phase))
        step = gradient_step(self.context.optimizers["controller"], torch.stack(list(losses.values())).sum())
        return pack({
            **{f"loss/{name}": value.detach() for name, value in losses.items()},
            **{f"optimizer/{name}": value for name, value in step.items()},
        })  # fmt: skip

    def batch_losses(self, batch: SequenceBatch) -> Mapping[str, Tensor]:
        rows = self.trajectories.rows(batch.observation, batch.action)
        return {"trajectories": self.trajectories.loss(rows), **self.controller_losses(batch, rows)}

    # Pictures ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def illustrate(self, batch: SequenceBatch) -> list[Illustration]:
        """A plan as the noise is taken away, and the candidates with what the critic expects of them."""
        watch = Denoising()
        drawn = self.draw({key: value[:, 0] for key, value in batch.observation.items()}, watch=watch)
        happened = self.trajectories.state.join(batch.observation)
        return picture_plans(self.trajectories, watch, drawn.value, drawn.chosen, happened)


def waypoint(states: Float[Tensor, "env horizon state"], place: Float[Tensor, " env"]) -> Float[Tensor, "env state"]:
    """The states at a fractional row, between its neighbours; after the last row, the last."""
    place = place.clamp(max=states.shape[1] - 1)
    before = place.long().clamp(max=states.shape[1] - 2)
    rows, share = torch.arange(len(states), device=states.device), (place - before).unsqueeze(-1)
    return torch.lerp(states[rows, before], states[rows, before + 1], share)
