"""The offline source: windows stay in their episodes, batches go on exactly, and bad data are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.data_sources.base import SourceContext
from rl_lab.data_sources.offline import OfflineSource
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.files import FORMATS, write_dataset
from rl_lab.environments.adapter import SpaceAdapter
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import CheckpointError, ConfigError, DataError
from rl_lab.records import BatchSpec, FieldSpec

LENGTHS = (4, 7, 12)
FLAGS = dict.fromkeys(("is_first", "is_last", "is_terminal"), FieldSpec((), "bool"))
SPEC = BatchSpec(16, 3)


def numbered_episodes(**changes: Any) -> list[Episode]:
    """Observations that say which episode and record they are; actions in [-2, 2] that count the records."""
    episodes = []
    for number, length in enumerate(LENGTHS):
        place = np.stack([np.full(length + 1, number), np.arange(length + 1)], -1).astype(np.float32)
        action = np.linspace(-2.0, 2.0, length, dtype=np.float32)[:, None]
        fields = {"observation": {"vector": place}, "action": action, "reward": np.arange(1.0, length + 1)}
        episodes.append(Episode(**{**fields, "terminated": number == 1, **changes}))
    return episodes


def dataset(path: Path, name: str = "data.npz", **changes: Any) -> Path:
    return write_dataset(path / name, numbered_episodes(**changes), Attributes())


def context(folder: Path, *, seed: int = 0, size: int = 2, **extra: FieldSpec) -> SourceContext:
    """An environment with a vector of two and one action in [-2, 2]."""
    settings = EnvironmentSettings(id="Pendulum-v1")
    adapter = SpaceAdapter(spaces.Box(-9, 9, (size,)), spaces.Box(-2, 2, (1,)), settings)
    vector, action, reward = FieldSpec((size,), "float32"), FieldSpec((1,), "float32"), FieldSpec((), "float32")
    fields = {"observation.vector": vector, "action": action, "reward": reward, **FLAGS, **extra}
    return SourceContext(fields, 1, "cpu", seed, folder, actions=adapter.action_converter, environment=settings)


def prepared(path: Path, folder: Path, *, seed: int = 0, **settings: Any) -> OfflineSource:
    source = OfflineSource(path=str(path), **settings)
    source.prepare(context(folder, seed=seed))
    return source


@pytest.mark.parametrize(
    ("format_name", "memory"),
    [*((name, "ram") for name in FORMATS if name != "run"), ("npz", "disk"), ("folder", "disk")],
)
def test_no_window_crosses_an_episode(
    format_name: str, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each window is three consecutive records of one episode, and all windows are drawn."""
    for module in ("rl_lab.datasets.storage", "rl_lab.datasets.loading"):
        monkeypatch.setattr(f"{module}.SMALL_FIELD", 100)  # observations are read from files
    path = write_dataset(tmp_path / "data", numbered_episodes(), Attributes(), format_name=format_name)
    source = prepared(path, tmp_path / "run", memory=memory, short_episodes="skip", format=format_name)
    assert (source._storage.file_bytes() > 0) == (memory == "disk")
    seen = set()
    for _ in range(30):
        batch = source.sample(SPEC)
        place = batch.observation["vector"].numpy()
        assert (place[:, :, 0] == place[:, :1, 0]).all()
        np.testing.assert_array_equal(np.diff(place[:, :, 1]), 1.0)
        np.testing.assert_array_equal(batch.is_first.numpy(), place[:, :, 1] == 0)
        lengths = np.array(LENGTHS)[place[:, :, 0].astype(int)]
        np.testing.assert_array_equal(batch.is_last.numpy(), place[:, :, 1] == lengths)
        np.testing.assert_array_equal(batch.reward.numpy(), place[:, :, 1])
        seen |= {tuple(row) for row in place[:, 0].tolist()}
    assert len(seen) == sum(length - 1 for length in LENGTHS)
    source.close()


def test_actions_become_the_agents(tmp_path: Path) -> None:
    """[-2, 2] becomes [-1, 1]; an episode's last record has none."""
    source = prepared(dataset(tmp_path), tmp_path / "run", episodes=1)
    batch = source.sample(BatchSpec(1, 5))
    np.testing.assert_allclose(batch.action[0, :, 0].numpy(), [-1, -1 / 3, 1 / 3, 1, 0], atol=1e-6)


def test_padding_repeats_the_ends(tmp_path: Path) -> None:
    """A window may begin before its episode and end after it; without last records, none is drawn from."""
    source = prepared(dataset(tmp_path), tmp_path / "run", episodes=1, records="decisions", pad_before=1, pad_after=2)
    windows = {tuple(row) for row in source.sample(BatchSpec(200, 3)).observation["vector"][:, :, 1].tolist()}
    assert windows == {(0, 0, 1), (0, 1, 2), (1, 2, 3), (2, 3, 3), (3, 3, 3)}


def test_a_stream_crosses_ends_as_replay_does(tmp_path: Path) -> None:
    source = prepared(dataset(tmp_path), tmp_path / "run", windows="stream")
    batch = source.sample(BatchSpec(64, 10))
    assert batch.is_first[:, 1:].any()


@pytest.mark.parametrize("prefetch", [False, True])
def test_batches_go_on_exactly(prefetch: bool, tmp_path: Path) -> None:
    """A source that was saved and loaded gives the batches of one that was not; other draws do not disturb them."""
    path, other = dataset(tmp_path), BatchSpec(4, 2)
    whole = prepared(path, tmp_path / "a", prefetch=prefetch)
    half = prepared(path, tmp_path / "b", prefetch=prefetch)
    for _ in range(3):
        whole.sample(SPEC)
        half.sample(SPEC)
        half.sample(other)
    state = half.state_dict(tmp_path)
    resumed = prepared(path, tmp_path / "c", prefetch=prefetch)
    resumed.load_state_dict(state, tmp_path)
    for _ in range(3):
        expected, seen = whole.sample(SPEC), resumed.sample(SPEC)
        np.testing.assert_array_equal(expected.indices, seen.indices)
        np.testing.assert_array_equal(expected.observation["vector"], seen.observation["vector"])
    assert not np.array_equal(whole.sample(SPEC).indices, prepared(path, tmp_path, seed=1).sample(SPEC).indices)


def test_another_dataset_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    source = prepared(dataset(tmp_path), tmp_path / "run")
    state = source.state_dict(tmp_path)
    shorter = prepared(dataset(tmp_path, "b.npz"), tmp_path / "run", episodes=2)
    with pytest.raises(CheckpointError, match="not the one that the run began with"):
        shorter.load_state_dict(state, tmp_path)


def test_fields_of_the_workflow_can_be_written(tmp_path: Path) -> None:
    """Latents, say: zeros at first, then what was written, also after a resume."""
    source = OfflineSource(path=str(dataset(tmp_path)))
    source.prepare(context(tmp_path, **{"latent.deter": FieldSpec((2,), "float32")}))
    batch = source.sample(SPEC)
    assert not batch.extras["latent.deter"].any()
    source.update(batch.indices, {"latent.deter": batch.observation["vector"] + 1.0})
    state = source.state_dict(tmp_path)
    resumed = OfflineSource(path=str(tmp_path / "data.npz"))
    resumed.prepare(context(tmp_path, **{"latent.deter": FieldSpec((2,), "float32")}))
    resumed.load_state_dict(state, tmp_path)
    for _ in range(20):
        again = resumed.sample(SPEC)
        written = again.extras["latent.deter"].abs().sum(-1) > 0
        np.testing.assert_array_equal(again.extras["latent.deter"][written], again.observation["vector"][written] + 1.0)
    with pytest.raises(DataError, match="'action' is not a field that this workflow adds"):
        source.update(batch.indices, {"action": batch.action})


@pytest.mark.parametrize("memory", ["ram", "disk"])
def test_all_records_are_read_from_end_to_end(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rl_lab.datasets.storage", "rl_lab.datasets.loading"):
        monkeypatch.setattr(f"{module}.SMALL_FIELD", 100)
    source = prepared(dataset(tmp_path), tmp_path / "run", memory=memory)
    parts = [
        source.scan(start=start, count=10, fields=["observation.vector", "is_first"]) for start in range(0, 30, 10)
    ]
    place = np.concatenate([episode.observation["vector"] for episode in numbered_episodes()])
    np.testing.assert_array_equal(np.concatenate([part.fields["observation.vector"] for part in parts]), place)
    np.testing.assert_array_equal(np.concatenate([part.indices for part in parts]), np.arange(len(place)))


def test_statistics_are_those_of_all_records(tmp_path: Path) -> None:
    source = prepared(dataset(tmp_path), tmp_path / "run")
    place = np.concatenate([episode.observation["vector"] for episode in numbered_episodes()])
    assert source.statistics is not None
    np.testing.assert_allclose(source.statistics["observation.vector"].mean, place.mean(0))
    np.testing.assert_allclose(source.statistics["observation.vector"].std, place.std(0))
    assert (source.statistics["action"].low, source.statistics["action"].high) == (-1.0, 1.0)
    assert source.statistics["action"].count == sum(LENGTHS)


def test_what_cannot_be_learned_from_is_refused(tmp_path: Path) -> None:
    """One line each, with what to do."""
    with pytest.raises(ConfigError, match=r"path .* or expert"):
        OfflineSource()
    with pytest.raises(DataError, match="no such file"):
        prepared(tmp_path / "missing.npz", tmp_path)
    path = dataset(tmp_path)
    with pytest.raises(DataError, match="The dataset is empty"):
        prepared(path, tmp_path, episodes=[5, 9])
    with pytest.raises(DataError, match=r"observation 'vector' has shape \(2,\), and the environment's has \(3,\)"):
        OfflineSource(path=str(path)).prepare(context(tmp_path, size=3))
    nan = numbered_episodes()
    nan[1].observation["vector"][3, 1] = np.nan
    bad = write_dataset(tmp_path / "nan.npz", nan, Attributes())
    with pytest.raises(DataError, match=r"nan.npz, episode 1, field 'observation.vector', row 3: holds NaN"):
        prepared(bad, tmp_path)
    far = [Episode({"vector": np.zeros((3, 2), np.float32)}, np.array([[0.0], [2.5]], np.float32), None, False)]
    outside = write_dataset(tmp_path / "outside.npz", far, Attributes())
    with pytest.raises(DataError, match=r"episode 0, row 1: the action \[1.25\] .* is outside the action space"):
        prepared(outside, tmp_path)
    two = [Episode({"vector": np.zeros((3, 2), np.float32)}, np.zeros((2, 2), np.float32), None, False)]
    with pytest.raises(DataError, match="an action has 2 entries, and the environment's has 1"):
        prepared(write_dataset(tmp_path / "two.npz", two, Attributes()), tmp_path)
    words = [Episode({"vector": np.zeros((3, 2), np.complex64)}, np.zeros((2, 1), np.float32), None, False)]
    with pytest.raises(DataError, match="observation 'vector' is complex64, and the environment's is float32"):
        prepared(write_dataset(tmp_path / "words.npz", words, Attributes()), tmp_path)


def test_windows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = prepared(dataset(tmp_path), tmp_path)
    with pytest.raises(DataError, match="1 of 3 episodes have fewer records than a window, 6"):
        source.check(BatchSpec(1, 6))
    with pytest.raises(DataError, match="the longest of 3 episodes has 13"):
        source.check(BatchSpec(1, 20))
    prepared(tmp_path / "data.npz", tmp_path, short_episodes="skip").check(BatchSpec(1, 6))


def test_rewards_are_missed_only_where_they_are_needed(tmp_path: Path) -> None:
    source = prepared(dataset(tmp_path, reward=None), tmp_path)
    with pytest.raises(DataError, match="no field 'reward'"):
        source.check(SPEC)
    source.check(SPEC._replace(fields=("observation.vector", "action")))
