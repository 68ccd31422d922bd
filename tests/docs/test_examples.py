"""The example plugin works: its algorithm trains, its encoder takes its place, its environment plays anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from documents import PLUGIN

from rl_lab.environments import EnvironmentSettings, inspect_environment, make_vector_env
from rl_lab.experiment.agent import load
from rl_lab.experiment.prepare import prepare
from rl_lab.experiment.train import run_training

CONFIGS = [PLUGIN / "my_lab" / "configs"]
QUIET = ["logging.console=off", "logging.tensorboard=false", "evaluation.video=false", "evaluation.episodes=1"]


@pytest.fixture(autouse=True)
def _plugin_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))


def test_the_algorithm_trains_and_acts(tmp_path: Path) -> None:
    """From a warm-up with random actions through updates to a loaded agent."""
    small = ["+experiment=tiny_q", "training.total_timesteps=600", *QUIET, f"run_root={tmp_path}"]
    outcome = run_training(small, config_dirs=CONFIGS)
    assert outcome.code == 0
    assert '"train/loss/q"' in (outcome.folder / "metrics.jsonl").read_text()
    agent = load(outcome.folder)
    action, _ = agent.act(agent.observation_space.sample(), agent.initial_state(num_envs=1))
    assert agent.action_space.contains(action)


def test_the_encoder_is_picked_by_one_line(tmp_path: Path) -> None:
    """It follows `size`, and brings no keys of the encoder whose place it takes."""
    choice = "components/encoders@components.encoder=fourier"
    config = prepare(["+experiment=dreamer_v3_cartpole", choice], config_dirs=CONFIGS).config
    assert config["components"]["encoder"]["units"] == 64
    assert set(config["components"]["encoder"]) == {
        "_target_", "observation", "frequencies", "scale", "units", "layers",
    }  # fmt: skip


def test_the_environment_plays_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that registers an environment is enough, wherever it lies."""
    monkeypatch.chdir(tmp_path)
    file = PLUGIN / "my_lab" / "envs.py"
    settings = EnvironmentSettings(id="PointGoal-v0", module=str(file), num_envs=2, backend="process", workers=1)
    assert not inspect_environment(settings).notes
    envs = make_vector_env(settings, seed=0)
    try:
        step = envs.reset()
        assert step.observation["camera"].shape == (2, 64, 64, 3)
        assert step.observation["velocity"].shape == (2, 2)
    finally:
        envs.close()


def test_the_checker_looks_at_a_users_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings become notes of the plan; `environment.check=false` leaves it alone."""
    (tmp_path / "unseeded_env.py").write_text(
        "import gymnasium, random\n"
        "class Unseeded(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,))\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None): return [random.random()], {}\n"
        "    def step(self, action): return [random.random()], 0.0, False, False, {}\n"
        "gymnasium.register(id='Unseeded-v0', entry_point=Unseeded, max_episode_steps=9)\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = EnvironmentSettings(id="Unseeded-v0", module="unseeded_env.py")
    assert any("The same seed and actions" in note for note in inspect_environment(settings).notes)
    unchecked = EnvironmentSettings(id="Unseeded-v0", module="unseeded_env.py", check=False)
    assert not inspect_environment(unchecked).notes
