"""Every format gives back what was written, and says clearly what it cannot read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dataset_helpers import assert_same, camera_episodes, vector_episodes

from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.files import FORMATS, open_dataset, write_dataset
from rl_lab.datasets.formats.base import ReadOptions
from rl_lab.errors import DataError

WRITABLE = [name for name in FORMATS if name != "run"]
REWARDLESS = [name for name in WRITABLE if name not in ("minari",)]  # Minari's files always have rewards


def written(path: Path, episodes: list[Episode], format_name: str) -> Path:
    target = path / f"data{FORMATS[format_name].suffix}"
    return write_dataset(target, iter(episodes), Attributes("Pendulum-v1"), format_name=format_name)


@pytest.mark.parametrize("format_name", WRITABLE)
def test_round_trip_of_vectors(format_name: str, tmp_path: Path) -> None:
    episodes = vector_episodes()
    path = written(tmp_path, episodes, format_name)
    reader = open_dataset(path)
    assert_same(episodes, list(reader.episodes()))
    assert reader.attributes.environment == "Pendulum-v1"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]  # nothing temporary is left


@pytest.mark.parametrize("format_name", [name for name in WRITABLE if name != "csv"])
def test_round_trip_of_images_and_classes(format_name: str, tmp_path: Path) -> None:
    episodes = camera_episodes()
    assert_same(episodes, list(open_dataset(written(tmp_path, episodes, format_name)).episodes()))


@pytest.mark.parametrize(
    ("suffix", "format_name"), [(".h5", "hdf5"), (".hdf5", "hdf5"), (".pth", "pt"), ("", "folder")]
)
def test_a_suffix_says_the_format(suffix: str, format_name: str, tmp_path: Path) -> None:
    path = write_dataset(tmp_path / f"data{suffix}", vector_episodes(), Attributes())
    assert FORMATS[format_name].recognises(path)
    assert_same(vector_episodes(), list(open_dataset(path).episodes()))


def test_an_unknown_suffix_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'\.mat'.*\.h5 \(hdf5\).*\.csv \(csv\)"):
        write_dataset(tmp_path / "data.mat", vector_episodes(), Attributes())


@pytest.mark.parametrize("format_name", REWARDLESS)
def test_data_without_rewards_have_none(format_name: str, tmp_path: Path) -> None:
    episodes = vector_episodes(rewarded=False)
    assert_same(episodes, list(open_dataset(written(tmp_path, episodes, format_name)).episodes()))


def test_a_dataset_is_never_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path, vector_episodes(), "npz")
    with pytest.raises(DataError, match="exists already"):
        write_dataset(path, vector_episodes(), Attributes())


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def breaking():
        yield vector_episodes()[0]
        raise RuntimeError("the environment died")

    for name in WRITABLE:
        with pytest.raises(RuntimeError):
            write_dataset(tmp_path / f"data{FORMATS[name].suffix}", breaking(), Attributes(), format_name=name)
    assert list(tmp_path.iterdir()) == []


def test_columns_of_other_programs_are_recognised(tmp_path: Path) -> None:
    """D4RL's names: flat over episodes, boundaries at terminals and timeouts, the last episode unfinished."""
    path = tmp_path / "flat.npz"
    np.savez(
        path,
        observations=np.arange(14.0).reshape(7, 2),
        actions=np.zeros((7, 1), np.float32),
        rewards=np.arange(7.0),
        terminals=np.array([0, 0, 1, 0, 0, 0, 0], bool),
        timeouts=np.array([0, 0, 0, 0, 1, 0, 0], bool),
    )
    episodes = list(open_dataset(path).episodes())
    assert [episode.decisions for episode in episodes] == [3, 2, 2]
    assert [episode.terminated for episode in episodes] == [True, False, False]
    ended, cut, _ = (episode.with_last_observation("auto") for episode in episodes)
    assert (ended.decisions, cut.decisions) == (3, 1)  # what terminated keeps its last reward
    np.testing.assert_array_equal(ended.observation["observation"][-1], ended.observation["observation"][-2])


def test_next_observations_give_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "flat.npz"
    states = np.arange(12.0).reshape(6, 2)
    np.savez(
        path, observations=states[[0, 1, 3, 4]], next_observations=states[[1, 2, 4, 5]],
        actions=np.zeros((4, 1)), rewards=np.zeros(4), terminals=[0, 0, 0, 1], timeouts=[0, 1, 0, 0],
    )  # fmt: skip
    first, second = open_dataset(path).episodes()
    np.testing.assert_array_equal(first.observation["observation"], states[:3])
    np.testing.assert_array_equal(second.observation["observation"], states[3:])


def test_actions_that_led_to_their_observation_are_moved(tmp_path: Path) -> None:
    """Dreamer's files: a zero action with the first observation of each episode."""
    path = tmp_path / "dreamer.npz"
    action = np.array([0, 1, 2, 0, 3, 4], np.float32)[:, None]
    flags = {"is_first": [1, 0, 0, 1, 0, 0], "is_last": [0, 0, 1, 0, 0, 1], "is_terminal": [0, 0, 1, 0, 0, 0]}
    np.savez(
        path, observation=np.arange(6.0)[:, None], action=action, reward=np.arange(6.0),
        **{name: np.array(value, bool) for name, value in flags.items()},
    )  # fmt: skip
    reader = open_dataset(path)
    first, second = reader.episodes()
    np.testing.assert_array_equal(first.action[:, 0], [1, 2])
    np.testing.assert_array_equal(first.reward, [1, 2])
    assert first.is_complete
    assert (first.terminated, second.terminated) == (True, False)
    assert any("led to" in note for note in reader.notes)
    kept = list(open_dataset(path, options=ReadOptions(alignment="after")).episodes())
    assert kept[0].decisions == 3


def test_a_mapping_names_the_fields(tmp_path: Path) -> None:
    path = tmp_path / "odd.npz"
    np.savez(path, pose=np.zeros((4, 2)), torque=np.ones((4, 1)), score=np.arange(4.0), stop=[0, 0, 0, 1])
    with pytest.raises(DataError, match="no observation was recognised among pose, score, stop, torque"):
        list(open_dataset(path).episodes())
    mapping = {"observation.vector": "pose", "action": "torque", "reward": "score", "terminated": "stop"}
    (episode,) = open_dataset(path, options=ReadOptions(mapping)).episodes()
    assert episode.terminated
    np.testing.assert_array_equal(episode.reward, np.arange(4.0))
    with pytest.raises(DataError, match=r"mapping.action='torqe': the data have no such field. Did you mean 'torque'"):
        list(open_dataset(path, options=ReadOptions({**mapping, "action": "torqe"})).episodes())
    with pytest.raises(DataError, match=r"mapping.rewrad is not something that a dataset holds"):
        list(open_dataset(path, options=ReadOptions({**mapping, "rewrad": "score"})).episodes())


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        open_dataset(tmp_path / "missing.npz")
    (tmp_path / "notes.md").write_text("hello")
    with pytest.raises(DataError, match="not a dataset of a known format"):
        open_dataset(tmp_path / "notes.md")
    objects = tmp_path / "objects.npz"
    np.savez(objects, observations=np.array([{}, {}], object), actions=np.zeros(2))
    with pytest.raises(DataError, match=r"objects.npz, field 'observations': an object array"):
        list(open_dataset(objects).episodes())
    whole = written(tmp_path, vector_episodes(), "npz")
    cut = tmp_path / "cut.npz"
    cut.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"cut.npz: cannot be read"):
        open_dataset(cut)
    table = written(tmp_path, vector_episodes(), "csv")
    table.write_bytes(table.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"data.csv: its last line is not complete"):
        list(open_dataset(table).episodes())
    folder = written(tmp_path, vector_episodes(), "folder")
    rows = folder / "observation.vector.rows"
    rows.write_bytes(rows.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"field 'observation.vector': the file ends in row 18 of 19"):
        open_dataset(folder)
    with pytest.raises(DataError, match=r"'zip' is not a dataset format"):
        open_dataset(whole, format_name="zip")


def test_columns_of_different_lengths_are_named(tmp_path: Path) -> None:
    path = tmp_path / "uneven.npz"
    np.savez(path, observations=np.zeros((5, 2)), actions=np.zeros((5, 1)), rewards=np.zeros(4), terminals=np.zeros(5))
    with pytest.raises(DataError, match="'rewards' has 4 rows and 'actions' has 5"):
        list(open_dataset(path).episodes())
