"""Environments that hang, die or return nonsense: one true line each, before anything is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.torture import bad_environments
from tests.torture.bad_environments import RENDERS, VALUES

from rl_lab.environments import EnvironmentSettings, inspect_environment, make_vector_env
from rl_lab.environments.sync import SyncVectorEnv
from rl_lab.errors import EnvironmentFailure, RLLabError

MODULE = str(Path(bad_environments.__file__))


def settings(name: str, **options: object) -> EnvironmentSettings:
    """As a user names them: by the file that registers them, which only the worker imports."""
    options = {"module": MODULE, "num_envs": 1, "startup_timeout": 3.0, **options}
    return EnvironmentSettings(id=name, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("deed", ["hang-step", "exit-init", "crash-reset", "sys_exit-step", "raise_empty-reset"])
def test_what_ends_a_process_does_not_end_the_run(deed: str, check: bool) -> None:
    """The probe plays in a process of its own, with a limit, whether or not the checker is asked for."""
    words = {"hang": "no answer for 3 s", "exit": "exited with status 3", "crash": "SIGSEGV", "sys_exit": "SystemExit"}
    expected = words.get(deed.partition("-")[0], "raised ")
    name = f"BadEnv-{deed}-v0"
    with pytest.raises(EnvironmentFailure, match=expected) as told:
        inspect_environment(settings(name, check=check))
    assert name in str(told.value)
    assert "\n" not in str(told.value)
    assert ("bad_environments.py, line" in str(told.value)) == (not deed.startswith("exit"))  # os._exit leaves no trace


@pytest.mark.parametrize("name", [f"BadEnv-{name}-v0" for name in VALUES])
def test_nonsense_is_refused(name: str) -> None:
    """Broadcast observations, texts for numbers, None for flags: the environment is named, and what it returned."""
    if "nan" not in name:  # whoever plays looks for it, as it comes with time
        with pytest.raises(RLLabError, match=name):
            inspect_environment(settings(name, check=False))
    envs = make_vector_env(settings(name, backend="sync", check=False), seed=0)
    envs.reset()
    with pytest.raises(RLLabError, match=name):
        envs.step(np.zeros((1, 1), np.int32))


def test_sys_exit_in_this_process_is_the_environments_error() -> None:
    """It is counted, restarted, and in the end told: the process goes on."""
    from rl_lab.environments.runner import SeedPlan

    envs = SyncVectorEnv(settings=settings("BadEnv-sys_exit-step-v0").resolved(), seeds=SeedPlan(0, "train", 1))
    envs.reset()
    action = np.zeros((1, 1), np.int32)
    envs.step(action)
    envs.step(action)
    with pytest.raises(EnvironmentFailure, match="failed 3 times"):
        envs.step(action)
    assert envs.restarts == 3


def test_sys_exit_in_the_first_reset_is_the_environments_error() -> None:
    """Nothing was played yet: the run ends with a line that names the environment."""
    envs = make_vector_env(settings("BadEnv-sys_exit-reset-v0", backend="sync", check=False), seed=0)
    with pytest.raises(EnvironmentFailure, match="BadEnv-sys_exit-reset-v0 raised SystemExit"):
        envs.reset()


def test_a_module_that_exits_is_told(tmp_path: Path) -> None:
    """An import that ends the process is a wrong setting, with the place that raised."""
    from rl_lab.environments.factory import import_user_module
    from rl_lab.errors import ConfigError

    (tmp_path / "leaving.py").write_text("import sys\nsys.exit()\n")
    with pytest.raises(ConfigError, match=r"SystemExit \(.*leaving\.py, line 2\)"):
        import_user_module(str(tmp_path / "leaving.py"))


@pytest.mark.parametrize("backend", ["sync", "process"])
@pytest.mark.parametrize("name", RENDERS)
def test_a_picture_that_cannot_be_drawn_is_a_note(name: str, backend: str) -> None:
    """Floats and grey become bytes; what is no picture is told once asked for, and nothing ends."""
    envs = make_vector_env(settings(f"OddRender-{name}-v0", backend=backend), seed=0, render=True)
    envs.reset()
    frame = envs.render()
    envs.step(np.zeros((1, 1), np.int32))
    told = [event["message"] for event in envs.drain_events()]
    envs.close()
    if name in ("not_implemented", "odd_frames", "text"):
        assert frame is None
        assert len(told) == 1
        assert "render()" in told[0]
    else:
        assert frame is not None
        assert (frame.shape, frame.dtype, told) == ((32, 32, 3), np.uint8, [])
        assert frame.max() == {"float_frames": 255, "large_float_frames": 200, "grey_frames": 9}[name]


@pytest.mark.parametrize("name", ["OddRender-not_implemented-v0", "HumanOnly-v0"])
def test_a_run_without_a_film_is_complete(tmp_path: Path, name: str) -> None:
    """render() is not implemented, or rgb_array is refused when it is made; and video is on by default."""
    import json

    from rl_lab.experiment.train import run_training

    overrides = [f"environment.id={name}", f"environment.module={MODULE}", "training.total_timesteps=20"]
    quiet = ["logging.console=off", "logging.tensorboard=false", "evaluation.episodes=1"]
    outcome = run_training(["+experiment=random", *overrides, *quiet, f"run_root={tmp_path}"])
    assert outcome.code == 0
    assert json.loads((outcome.folder / "run.json").read_text())["status"] == "completed"
    assert (outcome.folder / "report.html").is_file()
    told = (outcome.folder / "events.jsonl").read_text()
    assert "NotImplementedError" in told
    assert ("refuses render_mode='rgb_array'" in told) == (name == "HumanOnly-v0")
    assert not (outcome.folder / "videos").exists()


def test_a_module_that_registers_nothing_is_told(tmp_path: Path) -> None:
    """The usual reason for an unknown id: the package wants a call."""
    (tmp_path / "quiet_package.py").write_text("def register_envs(): pass\n")
    with pytest.raises(RLLabError, match=r"was imported and registered nothing; does it need a call\?"):
        inspect_environment(settings("Nowhere-v0", module=str(tmp_path / "quiet_package.py")))
    with pytest.raises(RLLabError, match=r"was imported and registered \d+ others\."):
        inspect_environment(settings("Nowhere-v0"))
