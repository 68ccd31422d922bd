"""Shared by all tests: tensor shapes are checked at run time, torch uses one thread, and small trained runs."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rl-lab-state-")  # the key of the runs that tests make

import torch  # after the number of threads
from tests.checks import check_annotations
from tests.overrides import QUIET, RANDOM, TINY_DREAMER

COMPILING = torch.cuda.is_available() or "RL_LAB_TESTS_COMPILE" in os.environ
if not COMPILING:  # the compiler cannot see through the checks
    if find_spec("triton") is not None:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        import rl_lab.kernels.triton.images

    checker = f"{check_annotations.__module__}.{check_annotations.__name__}"
    install_import_hook(["rl_lab.nn", "rl_lab.components"], checker)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heard() -> None:
    """Under nohup, and in the background of a script, a process begins with some of them ignored."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    """Every model a test compiles counts as a recompilation of the same code, and only a few are allowed."""
    if COMPILING:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def dreamer_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a very small DreamerV3. Tests that change a run work on a copy."""
    from rl_lab.experiment.train import run_training

    root = tmp_path_factory.mktemp("dreamer")
    outcome = run_training([*TINY_DREAMER, *QUIET, f"run_root={root}"])
    assert outcome.code == 0
    return outcome.folder


@pytest.fixture(scope="session")
def random_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the random workflow."""
    from rl_lab.experiment.train import run_training

    outcome = run_training([*RANDOM, *QUIET, f"run_root={tmp_path_factory.mktemp('random')}"])
    assert outcome.code == 0
    return outcome.folder


@pytest.fixture
def rl_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Calls the command line in this process, from an empty folder: (exit code, output, errors)."""
    from rl_lab.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RL_LAB_DEBUG", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
