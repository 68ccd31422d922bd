"""Wrong settings, unknown ids and missing libraries give one message that says how to fix them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_lab.environments import EnvironmentSettings, inspect_environment
from rl_lab.environments.families import FAMILIES, Family, family_of
from rl_lab.environments.inspection import choose_backend
from rl_lab.errors import ConfigError


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"id": "CartPole-v1", "num_env": 2}, "environment.num_env is not a setting. Did you mean 'num_envs'"),
        ({"id": "CartPole-v1", "backend": "proces"}, "Did you mean 'process'"),
        ({"id": "CartPole-v1", "num_envs": 0}, "environment.num_envs must be a whole number of at least 1"),
        ({"id": "CartPole-v1", "action_repeat": "2"}, "environment.action_repeat"),
        ({"id": "CartPole-v1", "time_limit": -1}, "environment.time_limit"),
        ({"id": "CartPole-v1", "worker_timeout": 0}, "environment.worker_timeout"),
        ({"id": "ALE/Pong-v5", "atari": {"preset": "dqm"}}, "Did you mean 'dqn'"),
        ({"id": "ALE/Pong-v5", "atari": {"stikcy": 0.1}}, "environment.atari.stikcy is not a setting"),
        ({"id": "ALE/Pong-v5", "atari": {"sticky": 2.0}}, "probability"),
        ({"num_envs": 2}, "environment.id is missing"),
    ],
)
def test_wrong_settings(node: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EnvironmentSettings.from_mapping(node)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CartPoole-v1", "Did you mean 'CartPole-v1'"),
        ("ALE/Pomg-v5", "Did you mean 'ALE/Pong-v5'"),
        ("dm_control/walker-wolk-v0", "Did you mean 'dm_control/walker-walk-v0'"),
        ("Gibberish", "environment.module"),
        ("no_such_package_at_all:Thing-v0", "cannot be imported"),
    ],
)
def test_unknown_ids(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        inspect_environment(EnvironmentSettings(id=name))


def test_wrong_constructor_arguments_are_named() -> None:
    from rl_lab.errors import EnvironmentFailure

    with pytest.raises(EnvironmentFailure, match=r"environment\.kwargs"):
        inspect_environment(EnvironmentSettings(id="CartPole-v1", kwargs={"gravitas": 3}))


def test_a_missing_library_names_the_extra_and_the_command() -> None:
    family = Family("Atari", "^ALE/", "ALE/Pong-v5", "atari", ("no_such_module",))
    assert not family.installed
    with pytest.raises(ConfigError, match=r"pip install 'rl-lab\[atari\]'"):
        family.require("ALE/Pong-v5")


def test_an_environment_of_the_old_interface_is_explained() -> None:
    """The error says what the checker found out: that the environment has the interface of before Gymnasium."""
    from rl_lab.errors import EnvironmentFailure

    with pytest.raises(EnvironmentFailure, match="takes no seed"):
        inspect_environment(EnvironmentSettings(id="example_environments:ExampleOldStyle-v0"))


def test_families_know_their_examples() -> None:
    for family in FAMILIES:
        assert family_of(family.example) is family
    assert family_of("my_package:Thing-v0") is None


def test_atari_presets_and_single_values() -> None:
    """A preset gives what the user does not."""
    plain = EnvironmentSettings(id="ALE/Pong-v5").resolved()
    assert (plain.image_size, plain.grayscale, plain.frame_stack, plain.action_repeat) == (64, False, 1, 4)
    assert (plain.time_limit, plain.atari.noop_max, plain.atari.sticky) == (108_000, 30, 0.0)
    node = {"id": "ALE/Pong-v5", "image_size": 96, "atari": {"preset": "dqn", "clip_reward": False}}
    dqn = EnvironmentSettings.from_mapping(node).resolved()
    assert (dqn.image_size, dqn.grayscale, dqn.frame_stack) == (96, True, 4)
    assert (dqn.atari.clip_reward, dqn.atari.terminal_on_life_loss) == (False, True)
    large = EnvironmentSettings.from_mapping({"id": "ALE/Pong-v5", "atari": {"preset": "dreamer_200m"}}).resolved()
    assert (large.image_size, large.atari.sticky, large.atari.full_action_set) == (96, 0.25, True)
    facts = inspect_environment(large)
    assert facts.observation_spec["image"].shape == (96, 96, 1)
    assert facts.action_spec.classes == (18,)
    assert facts.max_episode_steps == 27_000


def test_a_file_or_a_module_can_register_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """environment.module and Gymnasium's own module:Name syntax."""
    text = (
        "import gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('{name}', entry_point=CartPoleEnv, max_episode_steps=9)\n"
    )
    (tmp_path / "by_file.py").write_text(text.format(name="ByFile-v0"))
    (tmp_path / "by_module.py").write_text(text.format(name="ByModule-v0"))
    facts = inspect_environment(EnvironmentSettings(id="ByFile-v0", module=str(tmp_path / "by_file.py")))
    assert facts.max_episode_steps == 9
    monkeypatch.syspath_prepend(tmp_path)
    assert inspect_environment(EnvironmentSettings(id="by_module:ByModule-v0")).max_episode_steps == 9


def test_cheap_steps_stay_in_this_process() -> None:
    assert choose_backend(EnvironmentSettings(id="CartPole-v1"), 8) == "sync"
    assert choose_backend(EnvironmentSettings(id="CartPole-v1", backend="process"), 8) == "process"


def test_environments_do_not_load_torch() -> None:
    """Workers start quickly and small."""
    code = "import sys, rl_lab.environments, rl_lab.environments.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
