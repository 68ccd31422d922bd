"""A package from outside adds experiments and components by an entry point and a folder of configs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "little-plugin"
version = "0.1"
[project.entry-points."rl_lab.plugins"]
little = "little_plugin"
[tool.setuptools]
packages = ["little_plugin"]
[tool.setuptools.package-data]
little_plugin = ["configs/**/*.yaml"]
"""
WORKFLOW = """
from rl_lab.workflows.random import RandomWorkflow


class Lazy(RandomWorkflow):
    name = "lazy"
"""
EXPERIMENT = """# @package _global_
# A little experiment from outside
defaults:
  - random
  - override /workflow: lazy
  - _self_
environment: {id: CartPole-v1}
training: {total_timesteps: 40}
evaluation: {episodes: 1, video: false}
"""


@pytest.fixture(scope="module")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The little package, really installed, in a folder of its own."""
    source = tmp_path_factory.mktemp("source")
    configs = source / "little_plugin" / "configs"
    (configs / "experiment").mkdir(parents=True)
    (configs / "workflow").mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "little_plugin" / "__init__.py").write_text(WORKFLOW)
    (configs / "experiment" / "little.yaml").write_text(EXPERIMENT)
    (configs / "workflow" / "lazy.yaml").write_text("# Does little\n_target_: little_plugin.Lazy\n")
    target = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, capture_output=True)
    return target


def rl_lab(plugin_path: Path, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(plugin_path)}
    command = [sys.executable, "-m", "rl_lab", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plugin_is_listed(plugin_path: Path, tmp_path: Path) -> None:
    """With the name of the plugin that ships it."""
    output = rl_lab(plugin_path, tmp_path, "list")
    assert "A little experiment from outside  [plugin little]" in output


def test_a_plugin_trains(plugin_path: Path, tmp_path: Path) -> None:
    """Its experiment composes with the packaged groups and runs its own workflow."""
    rl_lab(plugin_path, tmp_path, "train", "+experiment=little", "logging.tensorboard=false")
    run = next(tmp_path.glob("experiments/little/*"))
    assert "little_plugin.Lazy" in (run / "config.yaml").read_text()
    assert (run / "summary.json").is_file()
