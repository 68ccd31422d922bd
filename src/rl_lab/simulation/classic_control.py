"""The equations of Gymnasium's classic control tasks, batched. Exact: what Gymnasium computes, in the state's dtype.

Each task knows its observation, its dynamics, its reward and when an episode ends; reward and end depend on states
alone, so that a learned model of the dynamics can use them too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_lab.specs import ActionSpec


class ClassicControl(ABC):
    """One task. States [batch, state], encoded actions [batch, action]."""

    observation_size: ClassVar[int]
    action: ClassVar[ActionSpec]

    def decode(self, observation: Float[Tensor, "*batch observation"]) -> Float[Tensor, "*batch state"]:
        """The state that shows this observation."""
        return observation

    def encode(self, state: Float[Tensor, "*batch state"]) -> Float[Tensor, "*batch observation"]:
        """The observation of a state."""
        return state

    @abstractmethod
    def step(
        self, state: Float[Tensor, "batch state"], action: Float[Tensor, "batch action"]
    ) -> Float[Tensor, "batch state"]: ...

    def path(
        self, state: Float[Tensor, "batch state"], actions: Float[Tensor, "batch horizon action"]
    ) -> Float[Tensor, "batch states state"]:
        """The `horizon` + 1 states that these actions pass: what planners compute most."""
        states = [state]
        for action in actions.unbind(1):
            states.append(self.step(states[-1], action))
        return torch.stack(states, 1)

    @abstractmethod
    def reward(
        self,
        state: Float[Tensor, "batch state"],
        action: Float[Tensor, "batch action"],
        following: Float[Tensor, "batch state"],
    ) -> Float[Tensor, " batch"]: ...

    def terminated(self, following: Float[Tensor, "batch state"]) -> Bool[Tensor, " batch"]:
        return torch.zeros_like(following[:, 0], dtype=torch.bool)

    def distance(self, following: Float[Tensor, "batch state"]) -> Float[Tensor, " batch"]:
        """Distance of a state from the task's goal, about 0 to 1: a cost for short-sighted planners where all states
        within the horizon have the same reward."""
        return torch.zeros_like(following[:, 0])


class CartPole(ClassicControl):
    """State (x, ẋ, θ, θ̇); action 1 pushes to the right. Euler steps with the old velocities."""

    observation_size = 4
    action = ActionSpec("discrete", (1,), (2,))
    gravity, total_mass, half_length, pole_mass, force, tau = 9.8, 1.1, 0.5, 0.1, 10.0, 0.02
    max_x, max_angle = 2.4, 12 * 2 * math.pi / 360

    def __init__(self, *, sutton_barto_reward: bool = False) -> None:
        self.sutton_barto_reward = sutton_barto_reward

    def step(self, state: Tensor, action: Tensor) -> Tensor:
        _, x_dot, theta, theta_dot = state.unbind(-1)
        force = (action[:, 1] - action[:, 0]) * self.force
        cos, sin = theta.cos(), theta.sin()
        pole = self.pole_mass * self.half_length
        push = (force + pole * theta_dot.square() * sin) / self.total_mass
        inertia = self.half_length * (4.0 / 3.0 - self.pole_mass * cos.square() / self.total_mass)
        theta_acc = (self.gravity * sin - cos * push) / inertia
        x_acc = push - pole * theta_acc * cos / self.total_mass
        return state + self.tau * torch.stack([x_dot, x_acc, theta_dot, theta_acc], -1)

    def reward(self, state: Tensor, action: Tensor, following: Tensor) -> Tensor:
        if self.sutton_barto_reward:
            return -self.terminated(following).to(following.dtype)
        return torch.ones_like(following[:, 0])

    def terminated(self, following: Tensor) -> Tensor:
        return (following[:, 0].abs() > self.max_x) | (following[:, 2].abs() > self.max_angle)

    def distance(self, following: Tensor) -> Tensor:
        return ((following[:, 0] / self.max_x).square() + (following[:, 2] / self.max_angle).square()) / 2


class Pendulum(ClassicControl):
    """State (θ, θ̇), upright at 0, seen as (cos θ, sin θ, θ̇). The cost is that of the state before the step."""

    observation_size = 3
    action = ActionSpec("continuous", (1,))
    max_speed, tau = 8.0, 0.05

    def __init__(self, *, g: float = 10.0, torque: float = 2.0) -> None:
        self.gravity, self.torque = g, torque  # torque: that of action 1

    def decode(self, observation: Tensor) -> Tensor:
        return torch.stack([torch.atan2(observation[..., 1], observation[..., 0]), observation[..., 2]], -1)

    def encode(self, state: Tensor) -> Tensor:
        return torch.stack([state[..., 0].cos(), state[..., 0].sin(), state[..., 1]], -1)

    def step(self, state: Tensor, action: Tensor) -> Tensor:
        theta, speed = state.unbind(-1)
        speed = torch.add(speed, theta.sin(), alpha=1.5 * self.gravity * self.tau)
        speed = torch.add(speed, action[:, 0], alpha=3.0 * self.torque * self.tau).clamp(
            -self.max_speed, self.max_speed
        )
        return torch.stack([torch.add(theta, speed, alpha=self.tau), speed], -1)

    def path(self, state: Tensor, actions: Tensor) -> Tensor:
        """The same steps in fewer operations: angles and speeds stay apart, and torques are scaled at once."""
        theta, speed = state.unbind(-1)
        thetas, speeds = [theta], [speed]
        for push in (3.0 * self.torque * self.tau * actions[..., 0]).t().contiguous().unbind(0):
            speed = torch.add(speed, theta.sin(), alpha=1.5 * self.gravity * self.tau)
            speed = speed.add_(push).clamp_(-self.max_speed, self.max_speed)
            theta = torch.add(theta, speed, alpha=self.tau)
            thetas.append(theta)
            speeds.append(speed)
        return torch.stack(thetas + speeds).view(2, len(thetas), -1).permute(2, 1, 0)

    def reward(self, state: Tensor, action: Tensor, following: Tensor) -> Tensor:
        theta, speed = state.unbind(-1)
        angle = torch.remainder(theta + math.pi, 2 * math.pi) - math.pi
        return -(angle.square() + 0.1 * speed.square() + 0.001 * self.torque**2 * action[:, 0].square())


class _Hill(ClassicControl):
    """A car in a valley: state (p, v)."""

    observation_size = 2
    low, high, max_speed, gravity = -1.2, 0.6, 0.07, 0.0025
    goal: ClassVar[float]

    def __init__(self, *, goal_velocity: float = 0.0) -> None:
        self.goal_velocity = goal_velocity

    @abstractmethod
    def push(self, action: Tensor) -> Tensor: ...

    def step(self, state: Tensor, action: Tensor) -> Tensor:
        position, speed = state.unbind(-1)
        speed = speed + self.push(action) - self.gravity * (3 * position).cos()
        speed = speed.clamp(-self.max_speed, self.max_speed)
        position = (position + speed).clamp(self.low, self.high)
        return torch.stack([position, torch.where((position <= self.low) & (speed < 0), 0.0, speed)], -1)

    def terminated(self, following: Tensor) -> Tensor:
        return (following[:, 0] >= self.goal) & (following[:, 1] >= self.goal_velocity)

    def distance(self, following: Tensor) -> Tensor:
        """The energy that is still missing."""
        position, speed = following.unbind(-1)
        height = (1.0 - (3 * position).sin()) / 2  # from the goal's side of the hill down to the valley
        return height - speed.square() / (4 * self.gravity / 3)


class MountainCar(_Hill):
    """Actions push to the left, not at all, or to the right."""

    action = ActionSpec("discrete", (1,), (3,))
    goal = 0.5

    def push(self, action: Tensor) -> Tensor:
        return 0.001 * (action[:, 2] - action[:, 0])

    def reward(self, state: Tensor, action: Tensor, following: Tensor) -> Tensor:
        return -torch.ones_like(following[:, 0])


class MountainCarContinuous(_Hill):
    """The push is continuous and costs a little; 100 for the goal."""

    action = ActionSpec("continuous", (1,))
    goal = 0.45

    def push(self, action: Tensor) -> Tensor:
        return 0.0015 * action[:, 0]

    def reward(self, state: Tensor, action: Tensor, following: Tensor) -> Tensor:
        return 100.0 * self.terminated(following).to(following.dtype) - 0.1 * action[:, 0].square()


class Acrobot(ClassicControl):
    """Two links, a torque at their joint: state (θ1, θ2, θ̇1, θ̇2), seen as cosines, sines and speeds. One RK4 step."""

    observation_size = 6
    action = ActionSpec("discrete", (1,), (3,))
    tau, gravity = 0.2, 9.8
    max_speeds = (4 * math.pi, 9 * math.pi)

    def decode(self, observation: Tensor) -> Tensor:
        first = torch.atan2(observation[..., 1], observation[..., 0])
        second = torch.atan2(observation[..., 3], observation[..., 2])
        return torch.stack([first, second, observation[..., 4], observation[..., 5]], -1)

    def encode(self, state: Tensor) -> Tensor:
        first, second, speed1, speed2 = state.unbind(-1)
        return torch.stack([first.cos(), first.sin(), second.cos(), second.sin(), speed1, speed2], -1)

    def step(self, state: Tensor, action: Tensor) -> Tensor:
        torque, tau = action[:, 2] - action[:, 0], self.tau
        k1 = self._derivative(state, torque)
        k2 = self._derivative(state + tau / 2 * k1, torque)
        k3 = self._derivative(state + tau / 2 * k2, torque)
        k4 = self._derivative(state + tau * k3, torque)
        first, second, speed1, speed2 = (state + tau / 6 * (k1 + 2 * k2 + 2 * k3 + k4)).unbind(-1)
        wrapped = [torch.remainder(angle + math.pi, 2 * math.pi) - math.pi for angle in (first, second)]
        speeds = [speed.clamp(-limit, limit) for speed, limit in zip((speed1, speed2), self.max_speeds, strict=True)]
        return torch.stack([*wrapped, *speeds], -1)

    def _derivative(self, state: Tensor, torque: Tensor) -> Tensor:
        """Sutton & Barto's equations; lengths and masses are 1, centres at 0.5, moments of inertia 1."""
        first, second, speed1, speed2 = state.unbind(-1)
        cos, sin = second.cos(), second.sin()
        d1 = 0.25 + (1.25 + cos) + 2.0
        d2 = 0.25 + 0.5 * cos + 1.0
        phi2 = 0.5 * self.gravity * (first + second - math.pi / 2).cos()
        phi1 = -0.5 * speed2.square() * sin - speed2 * speed1 * sin
        phi1 = phi1 + 1.5 * self.gravity * (first - math.pi / 2).cos() + phi2
        acc2 = (torque + d2 / d1 * phi1 - 0.5 * speed1.square() * sin - phi2) / (1.25 - d2.square() / d1)
        return torch.stack([speed1, speed2, -(d2 * acc2 + phi1) / d1, acc2], -1)

    def reward(self, state: Tensor, action: Tensor, following: Tensor) -> Tensor:
        return self.terminated(following).to(following.dtype) - 1.0

    def terminated(self, following: Tensor) -> Tensor:
        return self._height(following) > 1.0

    def distance(self, following: Tensor) -> Tensor:
        return (1.0 - self._height(following)) / 3

    def _height(self, state: Tensor) -> Tensor:
        return -state[:, 0].cos() - (state[:, 0] + state[:, 1]).cos()


TASKS: dict[str, type[ClassicControl]] = {
    "CartPole-v1": CartPole,
    "Pendulum-v1": Pendulum,
    "MountainCar-v0": MountainCar,
    "MountainCarContinuous-v0": MountainCarContinuous,
    "Acrobot-v1": Acrobot,
}
