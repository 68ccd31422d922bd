"""The commands of `rl-lab`, as a person types them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rl_lab.cli.main import COMMANDS

Command = Callable[..., tuple[int, str, str]]


def test_help_lists_the_commands(rl_lab: Command) -> None:
    """Every command is on the first page."""
    code, output, _ = rl_lab("--help")
    assert code == 0
    assert all(name in output for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(rl_lab: Command, name: str) -> None:
    """--help ends with something to copy."""
    code, output, _ = rl_lab(name, "--help")
    assert code == 0
    assert f"example:\n  rl-lab {name}" in output


@pytest.mark.parametrize("console", ["plain", "off"])
def test_a_training_speaks_before_it_imports(rl_lab: Command, console: str) -> None:
    """Seconds pass before the plan is there; a quiet run stays quiet. What is wrong is told all the same."""
    code, output, errors = rl_lab("train", f"logging.console={console}", "experiment.sed=1")
    assert code == 2
    assert errors.count("\n") == 1
    assert output.startswith("Loading") == (console == "plain")


def test_light_commands_import_nothing_heavy() -> None:
    """--help and list answer at once: neither torch nor Hydra is loaded."""
    script = (
        "import sys; from rl_lab.cli.main import main; main(['--help']); main(['list']); main(['train', '--help']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'hydra', 'matplotlib')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_python_m_rl_lab_and_the_script_are_the_same() -> None:
    """`python -m rl_lab` and scripts/train.py end in the same place."""
    script = Path(__file__).parents[2] / "scripts" / "train.py"
    for command in ([sys.executable, "-m", "rl_lab", "train", "--help"], [sys.executable, str(script), "--help"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0
        assert "rl-lab train" in done.stdout


def test_list_shows_the_registry(rl_lab: Command) -> None:
    """Groups, leaves and environment families; one kind on demand."""
    code, output, _ = rl_lab("list")
    assert code == 0
    assert "dreamer_v3_cartpole" in output
    assert "ALE/Pong-v5" in output
    _, output, _ = rl_lab("list", "components")
    assert "components/encoders:" in output
    assert "experiment:" not in output


def test_cfg_job_prints_the_resolved_configuration(rl_lab: Command, tmp_path: Path) -> None:
    """Everything is resolved, shapes included, and nothing is written."""
    code, output, _ = rl_lab("train", "--cfg", "job", "experiment.seed=3")
    config = yaml.safe_load(output)
    assert code == 0
    assert config["experiment"] == {"name": "dreamer_v3_cartpole", "seed": 3, "device": "auto"}
    assert config["_dims"]["action_size"] == 2
    assert "${" not in output
    assert not list(tmp_path.iterdir())


def test_overrides_stand_anywhere(rl_lab: Command) -> None:
    """Before, between and after options."""
    code, output, _ = rl_lab("train", "experiment.seed=3", "--cfg", "job", "training.total_timesteps=77")
    assert code == 0
    assert yaml.safe_load(output)["training"]["total_timesteps"] == 77


def test_eval_prints_json(rl_lab: Command, dreamer_run: Path) -> None:
    """The numbers of summary.json, with every episode."""
    code, output, _ = rl_lab("eval", dreamer_run, "--episodes", "3", "--seed", "5", "--json")
    result = json.loads(output)
    assert code == 0
    assert len(result["returns"]) == 3
    assert result["eval/return_mean"] == pytest.approx(sum(result["returns"]) / 3)


def test_eval_finds_the_latest_run(rl_lab: Command, dreamer_run: Path) -> None:
    """`latest` and names are looked up under --run-root."""
    code, output, _ = rl_lab("eval", "latest", "--run-root", dreamer_run.parents[1], "--episodes", "1")
    assert code == 0
    assert "return" in output


def test_imagine_draws_and_refreshes_the_report(rl_lab: Command, dreamer_run: Path, tmp_path: Path) -> None:
    """Picture and video lie in the run's folder imagination/."""
    run = tmp_path / "copy"
    shutil.copytree(dreamer_run, run, symlinks=True)
    shutil.rmtree(run / "imagination")
    code, output, _ = rl_lab("imagine", run, "--horizon", "6")
    assert code == 0
    assert (run / "imagination" / "picture.png").is_file()
    assert "report.html" in output


def test_compare_writes_a_page(rl_lab: Command, dreamer_run: Path, random_run: Path, tmp_path: Path) -> None:
    """Two runs side by side."""
    code, _, _ = rl_lab("compare", dreamer_run, random_run, "--out", "both")
    assert code == 0
    assert list((tmp_path / "both").glob("*.html"))


def test_doctor_says_what_is_there(rl_lab: Command) -> None:
    """Versions, device, families, rendering."""
    code, output, _ = rl_lab("doctor")
    assert code == 0
    assert all(word in output for word in ("torch", "CPU", "Atari", "ffmpeg", "Plugins"))


def test_multirun_trains_one_run_for_each_value(rl_lab: Command, tmp_path: Path) -> None:
    """Through Hydra's sweeper; the runs are ordinary ones and Hydra leaves no folders in the way."""
    base = ["train", "-m", "+experiment=random", "environment.id=CartPole-v1", "training.total_timesteps=20"]
    quiet = ["logging.console=off", "logging.tensorboard=false", "evaluation.video=false", "evaluation.episodes=1"]
    code, _, errors = rl_lab(*base, *quiet, "experiment.seed=0,1")
    assert code == 0, errors
    runs = list(tmp_path.glob("experiments/random/*/summary.json"))
    assert sorted(path.parent.name[-3:] for path in runs) == ["-s0", "-s1"]
    assert {path.name for path in tmp_path.iterdir()} == {"experiments"}


def test_multirun_refuses_a_wrong_key(rl_lab: Command) -> None:
    """One clear line, as in a single run."""
    code, _, errors = rl_lab("train", "-m", "+experiment=random", "environment.id=CartPole-v1", "workflw.x=0,1")
    assert code == 2
    assert "'workflw'" in errors
    assert "Traceback" not in errors
