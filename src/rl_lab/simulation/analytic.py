"""Planning in the true equations of an environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.errors import ConfigError, nearest
from rl_lab.simulation.classic_control import TASKS, ClassicControl, Pendulum
from rl_lab.simulation.simulator import Evaluation, ModelState, SimulatedStep, Simulator, discounted

OBSERVATION_KEY = "vector"
IGNORED_ARGUMENTS = frozenset({"render_mode"})  # of the environment: they change no dynamics


class AnalyticSimulator(nn.Module, Simulator):
    """The task itself. Nothing is learned, so it has no parameters.

    `shaping` is a cost for each step times the task's `distance`: it tells apart what the rewards within the horizon do
    not (CartPole pays 1 for every way of not falling yet).
    """

    has_observation = True

    def __init__(
        self,
        task: ClassicControl,
        *,
        action_repeat: int = 1,
        shaping: float = 0.0,
        precision: Literal["float32", "float64"] = "float32",
    ) -> None:
        super().__init__()
        self.task, self.action_repeat, self.shaping = task, action_repeat, shaping
        self.dtype = torch.float64 if precision == "float64" else torch.float32

    def observe(
        self,
        observation: Mapping[str, Tensor],
        *,
        previous: ModelState | None = None,
        action: Tensor | None = None,
        is_first: Tensor | None = None,
    ) -> ModelState:
        return self.task.decode(observation[OBSERVATION_KEY].to(self.dtype))

    def observation(self, state: ModelState) -> dict[str, Tensor]:
        return {OBSERVATION_KEY: self.task.encode(state).float()}

    def step(self, state: ModelState, action: Float[Tensor, "batch action"]) -> SimulatedStep:
        state, reward, alive = self._once(state, action)
        for _ in range(1, self.action_repeat):
            following, further, goes_on = self._once(state, action)
            # An episode that has ended stays where it ended.
            state = torch.where(alive[:, None] > 0, following, state)
            reward, alive = reward + alive * further, alive * goes_on
        return SimulatedStep(state, reward, alive)

    def evaluate(
        self, state: ModelState, actions: Float[Tensor, "batch horizon action"], discount: float = 1.0
    ) -> Evaluation:
        """The dynamics step by step, then rewards and ends of all steps at once: far fewer operations."""
        if self.action_repeat > 1 or not self.steps_as(AnalyticSimulator):
            return super().evaluate(state, actions, discount)
        horizon, path = actions.shape[1], self.task.path(state, actions)
        following = path[:, 1:].flatten(0, 1)
        reward = self.task.reward(path[:, :-1].flatten(0, 1), actions.flatten(0, 1), following)
        if self.shaping:
            reward = reward - self.shaping * self.task.distance(following)
        goes_on = (~self.task.terminated(following)).to(reward.dtype)
        return discounted(reward.view(-1, horizon), goes_on.view(-1, horizon), discount, path[:, -1])

    def _once(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        following = self.task.step(state, action)
        reward = self.task.reward(state, action, following)
        if self.shaping:
            reward = reward - self.shaping * self.task.distance(following)
        return following, reward, (~self.task.terminated(following)).to(reward.dtype)


def make_task(
    *, environment: str, kwargs: Mapping[str, Any] | None = None, normalize_actions: bool = True
) -> ClassicControl:
    """The equations of an environment, with the arguments that it is built with."""
    if environment not in TASKS:
        raise ConfigError(
            f"There are no known dynamics for '{environment}'.{nearest(environment, TASKS)} Learn a model of others:"
            " +experiment=mbmpc."
        )
    task = TASKS[environment]
    arguments = {key: value for key, value in (kwargs or {}).items() if key not in IGNORED_ARGUMENTS}
    if task is Pendulum and not normalize_actions:
        arguments["torque"] = 1.0  # the agent's [-1, 1] is the torque itself
    try:
        return task(**arguments)
    except TypeError as error:
        raise ConfigError(f"environment.kwargs: the known dynamics of {environment} do not follow {error}.") from error


def make_analytic_simulator(
    *,
    environment: str,
    observation: Mapping[str, Any],
    action: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    action_repeat: int | Literal["auto"],
    normalize_actions: bool,
    shaping: float,
    precision: Literal["float32", "float64"],
) -> AnalyticSimulator:
    """The simulator of an environment whose equations are known, checked against what the agent sees and does."""
    task = make_task(environment=environment, kwargs=kwargs, normalize_actions=normalize_actions)
    seen = observation.get(OBSERVATION_KEY)
    if seen is None or tuple(seen["shape"]) != (task.observation_size,):
        found = ", ".join(f"{key} {list(spec['shape'])}" for key, spec in observation.items())
        raise ConfigError(
            f"The dynamics of {environment} need its own state, {OBSERVATION_KEY} [{task.observation_size}], but the "
            f"agent sees {found}. Use environment.observation=state and environment.frame_stack=1."
        )
    if action["kind"] != task.action.kind:
        raise ConfigError(f"The dynamics of {environment} need {task.action.kind} actions, got {action['kind']} ones.")
    repeat = 1 if action_repeat == "auto" else action_repeat
    return AnalyticSimulator(task, action_repeat=repeat, shaping=shaping, precision=precision)
