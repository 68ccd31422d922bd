"""The packaged configuration: every leaf is whole, every experiment composes, and defaults are those of the code."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import yaml

from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.experiment import registry
from rl_lab.experiment.config import compose, resolve
from rl_lab.experiment.settings import SECTIONS
from rl_lab.experiment.validation import load_target

FOLDERS = [registry.ConfigFolder("rl-lab", registry.OWN_CONFIGS)]
LEAVES = list(registry.entries(FOLDERS))
EXPERIMENTS = registry.names(FOLDERS, "experiment")
DIMS = {
    "observation": {"vector": {"kind": "vector", "shape": [4], "dtype": "float32", "classes": []}},
    "action": {"kind": "discrete", "shape": [1], "classes": [2]},
    "action_size": 2,
}


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: f"{leaf.group}/{leaf.name}")
def test_every_leaf_says_what_it_is(leaf: registry.ConfigEntry) -> None:
    """`rl-lab list` shows the first comment line; a leaf with a class names one that exists."""
    assert leaf.summary
    node = yaml.safe_load(leaf.path.read_text())
    if "_target_" in node:
        assert callable(load_target(leaf.name, node))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name: str) -> None:
    """Every interpolation resolves, and the run is called after its file."""
    config = compose([f"+experiment={name}"])
    config._dims = DIMS
    resolved = resolve(config)
    assert resolved["experiment"]["name"] == name
    assert resolved["workflow"]["_target_"]


def test_names_that_users_rely_on() -> None:
    """The generic experiment, the default one, and the tuned ones keep their names."""
    assert {"dreamer_v3", "dreamer_v3_cartpole", "dreamer_v3_walker_walk", "random"} <= set(EXPERIMENTS)
    assert compose([]).experiment.name == "dreamer_v3_cartpole"


def test_sections_have_the_defaults_of_their_classes() -> None:
    """config.yaml is the place where people look; it must not say anything else than the code."""
    root = yaml.safe_load((registry.OWN_CONFIGS / "config.yaml").read_text())
    for name, cls in SECTIONS.items():
        assert root[name] == {field.name: field.default for field in fields(cls)}  # type: ignore[arg-type]


def test_environment_settings_are_all_there() -> None:
    """environment/gymnasium.yaml lists every setting with its default (but fewer environments)."""
    node = yaml.safe_load((registry.OWN_CONFIGS / "environment" / "gymnasium.yaml").read_text())
    assert set(node) == {field.name for field in fields(EnvironmentSettings)}
    same = {name for name in node if name not in ("id", "num_envs", "atari", "kwargs")}
    defaults = {field.name: field.default for field in fields(EnvironmentSettings)}
    assert {name: node[name] for name in same} == {name: defaults[name] for name in same}


@pytest.mark.parametrize(
    "leaf", [leaf for leaf in LEAVES if leaf.group in ("workflow", "optimizer")], ids=lambda x: x.name
)
def test_hyper_parameters_exist(leaf: registry.ConfigEntry) -> None:
    """A hyper-parameter in YAML is an argument of the class that it configures."""
    node = yaml.safe_load(leaf.path.read_text())
    parameters = inspect.signature(load_target(leaf.name, node)).parameters
    assert set(node) - {"_target_", "modules", "defaults"} <= set(parameters)


def test_size_picks_a_preset() -> None:
    """`size` is one key; every size of a part follows it."""
    config = compose(["+experiment=dreamer_v3", "size=25m"])
    config._dims = DIMS
    components = resolve(config)["components"]
    assert (components["rssm"]["deter"], components["rssm"]["classes"], components["encoder"]["units"]) == (
        3072,
        24,
        384,
    )


def test_auto_size_follows_the_device() -> None:
    """On the CPU the generic experiment takes a size that two cores can train."""
    assert compose(["+experiment=dreamer_v3", "experiment.device=cpu"]).size == "1m"
