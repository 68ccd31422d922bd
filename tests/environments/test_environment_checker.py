"""The checker says what is wrong with a user's environment, and how to fix it."""

from __future__ import annotations

from typing import Any

import example_environments as examples
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.environments.checker import check_environment


class Broken(examples.Counter):
    """Counter with one thing wrong."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        if fault == "picture":
            self.observation_space = spaces.Box(-1, 1, (64, 64, 3), np.float32)
        if fault == "unbounded":
            self.action_space = spaces.Box(-np.inf, np.inf, (2,))
        if fault == "bytes":
            self.observation_space = spaces.Box(0, 255, (2,), np.uint8)
        if fault == "bounds":
            self.observation_space = spaces.Box(0, 1, (2,), np.float64)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.fault == "nan":
            observation = observation * np.nan
        if self.fault == "shape":
            observation = np.zeros(3)
        if self.fault == "picture":
            observation = np.zeros((64, 64, 3), np.float32)
        reward = {"reward": None, "infinite": np.inf, "objectives": np.zeros(2)}.get(self.fault, reward)
        if self.fault == "both":
            terminated = truncated = True
        if self.fault == "flag":
            terminated = 0
        if self.fault == "raises":
            raise KeyError("gear")
        if self.fault == "four":
            return observation, reward, terminated, info
        return observation, reward, terminated, truncated, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=seed)
        if self.fault == "picture":
            observation = np.zeros((64, 64, 3), np.float32)
        return observation if self.fault == "tuple" else (observation, info)


@pytest.mark.parametrize(
    ("fault", "severity", "words"),
    [
        ("nan", "error", "NaN"),
        ("shape", "error", "shape (3,)"),
        ("reward", "error", "not a number"),
        ("objectives", "error", "not a number"),
        ("infinite", "error", "reward was inf"),
        ("four", "error", "four values"),
        ("tuple", "error", "(observation, info)"),
        ("raises", "error", "KeyError"),
        ("bytes", "error", "float64"),
        ("bounds", "warning", "leaves its space"),
        ("both", "warning", "terminated and truncated"),
        ("flag", "warning", "not a bool"),
        ("unbounded", "warning", "no bounds"),
        ("picture", "warning", "looks like a picture"),
        ("none", "note", "float64 and becomes float32"),
        ("none", "note", "no render mode"),
    ],
)
def test_each_fault_is_found_and_explained(fault: str, severity: str, words: str) -> None:
    found = [item for item in check_environment(Broken(fault)) if words in item.what]
    assert found, [str(item) for item in check_environment(Broken(fault))]
    assert found[0].severity == severity
    assert found[0].fix


def test_unrepeatable_episodes_are_found() -> None:
    assert any("same seed and actions" in item.what for item in check_environment(examples.Unseeded()))
    assert any("used environment differs" in item.what for item in check_environment("ExampleLeaky-v0"))


def test_the_old_interface_is_recognised() -> None:
    (error, *_) = check_environment(examples.OldStyle())
    assert error.severity == "error"
    assert "takes no seed" in error.what


def test_what_cannot_be_built_is_a_finding() -> None:
    (finding,) = check_environment("CartPoole-v1")
    assert "CartPole-v1" in finding.what


@pytest.mark.parametrize("thorough", [True, False])
def test_good_environments_pass(thorough: bool) -> None:
    for name in ("CartPole-v1", "Pendulum-v1", "LunarLander-v3"):
        assert check_environment(name, thorough=thorough) == []
    assert [item.severity for item in check_environment(gymnasium.make("Acrobot-v1"))] == []
