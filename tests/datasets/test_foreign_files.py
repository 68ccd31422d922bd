"""Files as other programs write them, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from dataset_helpers import assert_same, camera_episodes, vector_episodes

from rl_lab.datasets.episode import Attributes
from rl_lab.datasets.files import open_dataset, write_dataset
from rl_lab.datasets.formats.base import ReadOptions
from rl_lab.errors import DataError

h5py = pytest.importorskip("h5py")


def test_a_cut_off_hdf5_is_named(tmp_path: Path) -> None:
    whole = write_dataset(tmp_path / "whole.hdf5", vector_episodes(), Attributes())
    cut = tmp_path / "cut.hdf5"
    cut.write_bytes(whole.read_bytes()[:1500])
    with pytest.raises(DataError, match=r"cut.hdf5: cannot be read .*truncated"):
        open_dataset(cut)


def test_plain_d4rl(tmp_path: Path) -> None:
    """Without next_observations, with infos that are left alone."""
    path = tmp_path / "d4rl.h5"
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = np.arange(12.0).reshape(6, 2), np.zeros((6, 1))
        file["rewards"], file["terminals"] = np.ones(6), np.array([0, 0, 1, 0, 0, 0], bool)
        file["timeouts"] = np.array([0, 0, 0, 0, 0, 1], bool)
        file["infos/qpos"], file["metadata/algorithm"] = np.zeros((6, 9)), "SAC"
    first, second = open_dataset(path).episodes()
    assert (first.decisions, first.terminated, first.observations) == (3, True, 3)
    assert (second.decisions, second.terminated) == (3, False)


def test_minari_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    minari = pytest.importorskip("minari")
    from minari.dataset.minari_dataset import MinariDataset

    episodes = vector_episodes()
    path = write_dataset(tmp_path / "ours", episodes, Attributes("Pendulum-v1"), format_name="minari")
    theirs = MinariDataset(path / "data")
    assert theirs.total_steps == sum(episode.decisions for episode in episodes)
    for episode, own in zip(theirs.iterate_episodes(), episodes, strict=True):
        np.testing.assert_array_equal(episode.observations["vector"], own.observation["vector"])
        np.testing.assert_array_equal(episode.rewards, own.reward)
        assert bool(episode.terminations[-1]) == own.terminated
    assert minari.__version__


def test_jpegs_of_minari_are_decoded(tmp_path: Path) -> None:
    """Smooth pictures come back nearly as they were, and a note says so."""
    pytest.importorskip("minari")
    import gymnasium
    from minari.data_collector import EpisodeBuffer
    from minari.dataset._storages.hdf5_storage import HDF5Storage

    space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    ramp = np.broadcast_to(np.linspace(0, 255, 64).astype(np.uint8)[:, None, None], (64, 64, 3))
    buffer = EpisodeBuffer(
        observations=[ramp] * 4, actions=[0, 1, 0], rewards=[0.0, 0.0, 1.0], terminations=[False, False, True],
        truncations=[False] * 3,
    )  # fmt: skip
    folder = tmp_path / "data"
    storage = HDF5Storage.new(folder, space, gymnasium.spaces.Discrete(2))
    storage.update_episodes([buffer])
    reader = open_dataset(tmp_path)
    (episode,) = reader.episodes()
    assert episode.terminated
    assert np.abs(episode.observation["observation"][0].astype(int) - ramp).max() < 20
    assert "JPEGs" in reader.notes[0]


def test_lerobot_2_1_with_a_video(tmp_path: Path) -> None:
    """One table and one film an episode; the state by its usual name."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    import imageio.v3 as imageio

    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": None},
        "observation.images.front": {"dtype": "video", "shape": [32, 32, 3], "names": None},
        "action": {"dtype": "float32", "shape": [1], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
    }
    (tmp_path / "meta").mkdir()
    info = {"codebase_version": "v2.1", "fps": 10, "chunks_size": 1000, "features": features,
            "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"}  # fmt: skip
    (tmp_path / "meta" / "info.json").write_text(json.dumps(info))
    lines = [json.dumps({"episode_index": number, "length": 4, "tasks": ["push"]}) for number in range(2)]
    (tmp_path / "meta" / "episodes.jsonl").write_text("\n".join(lines))
    for number in range(2):
        rows = {
            "observation.state": [[float(number), float(t)] for t in range(4)], "action": [[0.5]] * 4,
            "next.done": [False] * 3 + [True], "episode_index": [number] * 4, "frame_index": list(range(4)),
        }  # fmt: skip
        table = tmp_path / "data" / "chunk-000" / f"episode_{number:06d}.parquet"
        table.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(rows), table)
        film = tmp_path / "videos" / "chunk-000" / "observation.images.front" / f"episode_{number:06d}.mp4"
        film.parent.mkdir(parents=True, exist_ok=True)
        frames = np.stack([np.full((32, 32, 3), 60 * t + 20, np.uint8) for t in range(4)])
        imageio.imwrite(film, frames, plugin="FFMPEG", fps=10, macro_block_size=1)
    mapping = {"observation.state": "observation.state", "observation.camera": "observation.images.front"}
    reader = open_dataset(tmp_path, options=ReadOptions(mapping))
    first, second = reader.episodes()
    np.testing.assert_array_equal(second.observation["state"][:, 0], 1.0)
    levels = first.observation["camera"].mean((1, 2, 3))
    np.testing.assert_allclose(levels, [20, 80, 140, 200], atol=6)
    assert first.terminated
    assert any("does not tell time limits" in note for note in reader.notes)


def test_a_lerobot_table_without_its_end_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = write_dataset(tmp_path / "data", vector_episodes(), Attributes(), format_name="lerobot")
    table = next((path / "data").glob("*/*.parquet"))
    table.write_bytes(table.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"file-000.parquet: cannot be read"):
        list(open_dataset(path).episodes())


def test_diffusion_policys_zarr_by_a_mapping(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(tmp_path / "pusht.zarr"), mode="w", zarr_format=2)
    for name, value in {
        "img": np.zeros((5, 8, 8, 3), np.float32), "state": np.arange(10.0).reshape(5, 2), "action": np.zeros((5, 2)),
    }.items():  # fmt: skip
        group.create_array(f"data/{name}", data=value)
    group.create_array("meta/episode_ends", data=np.array([3, 5]))
    options = ReadOptions({"observation.vector": "state"})
    episodes = list(open_dataset(tmp_path / "pusht.zarr", options=options).episodes())
    assert [episode.decisions for episode in episodes] == [3, 2]
    assert [list(episode.observation) for episode in episodes] == [["vector"], ["vector"]]
    assert episodes[0].reward is None


def test_a_list_of_episodes_in_a_pt_file(tmp_path: Path) -> None:
    path = tmp_path / "list.pt"
    torch.save(
        [{"obs": torch.zeros(4, 2), "action": torch.ones(3, 1), ("next", "reward"): torch.arange(3.0)}] * 2, path
    )
    first, second = open_dataset(path).episodes()
    assert first.is_complete
    np.testing.assert_array_equal(second.reward, [0, 1, 2])


def test_code_in_a_pt_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "code.pt"
    torch.save({"obs": np.zeros(3), "action": Path("x")}, path)
    with pytest.raises(DataError, match=r"code.pt: cannot be read"):
        open_dataset(path)


def test_a_plain_csv(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("episode,t,obs_0,obs_1,action,reward,terminated\n0,0,1,2,0,1,0\n0,1,3,4,1,1,True\n1,0,5,6,1,0,0\n")
    first, second = open_dataset(path).episodes()
    np.testing.assert_array_equal(first.observation["observation"], [[1, 2], [3, 4]])
    assert first.action.dtype == np.int64
    assert (first.terminated, second.terminated) == (True, False)
    path.write_text("episode,obs_0,action\n0,1,0\n0,x,1\n")
    with pytest.raises(DataError, match=r"table.csv, field 'obs_0', row 1: 'x' is not a number"):
        list(open_dataset(path).episodes())
    path.write_text("episode,obs_0,action\n0,1,0\n0,1\n")
    with pytest.raises(DataError, match=r"table.csv, row 1: 2 values, expected 3"):
        list(open_dataset(path).episodes())


def test_formats_convert_into_each_other(tmp_path: Path) -> None:
    """Pictures through HDF5, zarr, LeRobot's PNGs and back."""
    episodes = camera_episodes()
    names = ("hdf5", "zarr", "lerobot", "robomimic", "pt")
    for number, name in enumerate(names):
        path = write_dataset(tmp_path / f"{number}.x", iter(episodes), Attributes(), format_name=name)
        episodes = list(open_dataset(path, format_name=name).episodes())
    assert_same(episodes, camera_episodes())


@pytest.mark.parametrize("place", ["data/state", "meta/episode_ends"])
@pytest.mark.parametrize("codecs", [["pickle"], ["vlen-utf8", "pickle"], ["vlen-bytes", "pickle"]])
def test_a_pickle_in_zarr_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, codecs: list[str]
) -> None:
    """Not even where the user has let numcodecs open pickles for something else."""
    pytest.importorskip("zarr")
    pickles = pytest.importorskip("numcodecs.pickles")
    monkeypatch.setattr(pickles, "ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)
    marker, root = tmp_path / "pwned", tmp_path / "evil.zarr"
    for name in ("", "data", "meta"):
        (root / name).mkdir(exist_ok=True)
        (root / name / ".zgroup").write_text('{"zarr_format": 2}')
    arrays = {"data/state": (4, "<f8"), "data/action": (4, "<f8"), "meta/episode_ends": (1, "<i8")}
    for name, (rows, dtype) in arrays.items():
        evil = name == place
        (root / name).mkdir()
        content = (
            b"cos\nsystem\n(Vtouch " + str(marker).encode() + b"\ntR." if evil else np.full(rows, 4, dtype).tobytes()
        )
        (root / name / "0").write_bytes(content)
        layout = {"shape": [rows], "chunks": [rows], "dtype": "|O" if evil else dtype, "fill_value": None, "order": "C"}
        filters = [{"id": codec} for codec in codecs] if evil else None
        header = {"zarr_format": 2, "compressor": None, "filters": filters, **layout}
        (root / name / ".zarray").write_text(json.dumps(header))
    with pytest.raises(DataError):
        list(open_dataset(root).episodes())
    assert not marker.exists()
