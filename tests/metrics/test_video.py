from __future__ import annotations

import numpy as np
import pytest

from rl_lab.metrics import video
from rl_lab.metrics.video import prepare_frames, write_video


def test_odd_sizes_become_a_playable_mp4(tmp_path):
    """yuv420p needs even sizes; odd ones are padded, and every frame is kept."""
    import imageio_ffmpeg

    frames = np.random.default_rng(0).integers(0, 255, (7, 201, 303, 3), dtype=np.uint8)
    path = write_video(tmp_path / "deep" / "video", frames, 10)
    assert path == tmp_path / "deep" / "video.mp4"
    count, _ = imageio_ffmpeg.count_frames_and_secs(str(path))
    reader = imageio_ffmpeg.read_frames(str(path))
    assert next(reader)["size"] == (304, 202)
    reader.close()
    assert count == 7


def test_a_gif_where_ffmpeg_is_missing(tmp_path, monkeypatch):
    """Without ffmpeg the same frames become a GIF, and the caller learns its name."""
    from PIL import Image

    monkeypatch.setattr(video, "_ffmpeg", lambda: None)
    frames = np.stack([np.full((32, 32, 3), value, np.uint8) for value in (0, 80, 160, 240)])
    path = write_video(tmp_path / "video.mp4", frames, 10)
    assert path.suffix == ".gif"
    assert Image.open(path).n_frames == 4  # type: ignore[attr-defined]


def test_small_frames_are_enlarged_sharply():
    """64 × 64 pixels are multiplied by a whole factor, so that they stay exact."""
    frames = np.random.default_rng(0).integers(0, 255, (2, 64, 64, 1), dtype=np.uint8)
    large = prepare_frames(frames)
    assert large.shape == (2, 192, 192, 3)
    np.testing.assert_array_equal(large[:, 1::3, 1::3, :1], frames)


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (8, 8, 3), (2, 8, 8, 4)])
def test_wrong_frames_are_named(tmp_path, shape):
    """The message has the shape that was seen and the one that is needed."""
    with pytest.raises(ValueError, match=r"\[time, height, width, 3\]"):
        write_video(tmp_path / "x.mp4", np.zeros(shape, np.uint8), 10)
