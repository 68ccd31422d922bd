"""Bad data: one clear line that names the file or the setting, before the first update, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.files import write_dataset

Command = Callable[..., tuple[int, str, str]]
TRAIN = ("train", "environment.id=CartPole-v1", "logging.console=off", "logging.tensorboard=false")
CLONE = (*TRAIN, "+experiment=bc", "evaluation.video=false")
DQN = (*TRAIN, "+experiment=dqn", "+data_source@data_sources.demos=offline", "+data_source@data_sources.mix=mixture")
MIXTURE = (
    "training.phases=[{name: fill, type: warmup, duration_steps: 40, data_source: replay, workflow_hooks: [collect]},"
    " {name: mixed, type: offline, duration_updates: 5, data_source: mix, workflow_hooks: [update]}]"
)


def episode(length: int = 8, **changes: Any) -> Episode:
    """One of CartPole's, with changed fields."""
    vector = np.zeros((length + 1, 4), np.float32)
    action, reward = np.arange(length) % 2, np.ones(length, np.float32)
    return Episode(
        **{"observation": {"vector": vector}, "action": action, "reward": reward, "terminated": True, **changes}
    )


def vector(values: np.ndarray) -> dict[str, Any]:
    return {"observation": {"vector": values}}


def write_npz(path: Path, **changes: Any) -> None:
    write_dataset(path, [episode(**changes)], Attributes())


def write_truncated_hdf5(path: Path) -> None:
    whole = write_dataset(path.with_name("whole.hdf5"), [episode()], Attributes())
    path.write_bytes(whole.read_bytes()[:1500])


def with_nan() -> np.ndarray:
    values = np.zeros((9, 4), np.float32)
    values[5, 2] = np.nan
    return values


def empty(path: Path) -> None:
    np.savez(path, observations=np.zeros((0, 4)), actions=np.zeros(0), rewards=np.zeros(0), terminals=np.zeros(0))


FILES: dict[str, tuple[str, Callable[[Path], object], list[str], list[str]]] = {
    "missing file": ("data.npz", lambda path: None, [], ["data.npz", "no such file"]),
    "truncated hdf5": ("data.hdf5", write_truncated_hdf5, [], ["data.hdf5", "truncated"]),
    "object arrays": (
        "data.npz",
        lambda path: np.savez(path, observations=np.array([{}, {}], object), actions=np.zeros(2)),
        [],
        ["data.npz", "'observations'", "object array", "pickle"],
    ),
    "wrong shape": ("data.npz", lambda path: write_npz(path, **vector(np.zeros((9, 3)))), [], ["(3,)", "(4,)"]),
    "wrong dtype": ("data.npz", lambda path: write_npz(path, **vector(np.zeros((9, 4), "c8"))), [], ["complex64"]),
    "half an action": ("data.npz", lambda path: write_npz(path, action=np.full(8, 0.5)), [], ["whole numbers"]),
    "actions outside the space": (
        "data.npz", lambda path: write_npz(path, action=np.full(8, 2)), [], ["row 0", "[2]", "outside the action"],
    ),
    "empty dataset": ("data.npz", empty, [], ["data.npz", "no episodes", "empty"]),
    "episodes shorter than the window": (
        "data.npz", write_npz, ["controllers.policy.sequence_length=20"], ["windows of 20 records", "longest", "9"],
    ),
    "nan": ("data.npz", lambda path: write_npz(path, **vector(with_nan())), [], ["'observation.vector'", "row 5"]),
    "mapping of no field": (
        "data.npz",
        lambda path: np.savez(path, pose=np.zeros((8, 4)), push=np.zeros(8)),
        ["data_sources.demos.mapping={observation.vector: pose, action: pusch}"],
        ["mapping.action='pusch'", "Did you mean 'push'"],
    ),
    "no field recognised": (
        "data.npz", lambda path: np.savez(path, pose=np.zeros((8, 4)), push=np.zeros(8)), [], ["no observation"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_bad_files(rl_lab: Command, tmp_path: Path, case: str) -> None:
    """The file stays as it is, and no run directory is left behind."""
    name, write, overrides, words = FILES[case]
    path = tmp_path / name
    write(path)
    before = path.read_bytes() if path.exists() else None
    check(rl_lab(*CLONE, f"data_sources.demos.path={path}", *overrides), *words)
    assert (path.read_bytes() if path.exists() else None) == before
    assert not list(tmp_path.glob("experiments/*/*"))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("{demos: 0, replay: 0}", ["parts", "every weight is 0", "demos, replay"]),
        ("{demos: -1, replay: 1}", ["parts.demos", "-1"]),
        ("{demo: 1, replay: 1}", ["demo", "'demos'"]),
        ("{demos: 1}", ["reward", "mapping"]),
    ],
)
def test_bad_mixtures(rl_lab: Command, tmp_path: Path, parts: str, words: list[str]) -> None:
    """Weights of zero, negative ones, a part that does not exist, a field that a part lacks."""
    write_npz(tmp_path / "data.npz", reward=None)
    check(rl_lab(*DQN, "data_sources.demos.path=data.npz", f"data_sources.mix.parts={parts}", MIXTURE), *words)
    assert not list(tmp_path.glob("experiments/*/*"))


def check(result: tuple[int, str, str], *words: str) -> None:
    code, _, errors = result
    assert code == 2
    assert len(errors.strip().splitlines()) == 1, errors
    for word in words:
        assert word in errors
