"""Videos: mp4 where ffmpeg is at hand, GIF elsewhere."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

SMALLEST_SIDE = 192  # smaller frames are enlarged: 64 pixels are hard to see, and the codec would blur their colours


def write_video(path: Path, frames: np.ndarray, fps: float = 30.0) -> Path:
    """Write frames [time, height, width, 3] uint8; returns the file that was written.

    An mp4 that every browser plays (H.264, yuv420p, even sizes). Without ffmpeg the same name with .gif.
    """
    frames = prepare_frames(frames)
    path = Path(path).with_suffix(".mp4")
    path.parent.mkdir(parents=True, exist_ok=True)
    ffmpeg = _ffmpeg()
    if ffmpeg is None:
        path = path.with_suffix(".gif")
        path.write_bytes(encode_gif(frames, fps))
        return path
    height, width = frames.shape[1:3]
    writer = ffmpeg.write_frames(
        str(path),
        (width, height),
        fps=fps,
        codec="libx264",
        pix_fmt_in="rgb24",
        pix_fmt_out="yuv420p",
        quality=None,
        macro_block_size=1,
        ffmpeg_log_level="error",
        output_params=["-crf", "22", "-preset", "veryfast", "-movflags", "+faststart"],
    )
    writer.send(None)
    try:
        for frame in frames:
            writer.send(np.ascontiguousarray(frame))
    finally:
        writer.close()
    return path


def encode_gif(frames: np.ndarray, fps: float) -> bytes:
    """An endless GIF of frames [time, height, width, 3]."""
    from PIL import Image

    # One palette for all frames: smaller files, no flicker. A few frames side by side stand for the others.
    sample = frames[np.linspace(0, len(frames) - 1, min(len(frames), 8)).astype(int)]
    palette = Image.fromarray(np.concatenate(sample, axis=1)).quantize(128)
    images = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    duration = max(20, round(1000.0 / fps))  # browsers slow down what is faster than 50 frames a second
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=duration, loop=0)
    return buffer.getvalue()


def prepare_frames(frames: np.ndarray) -> np.ndarray:
    """Check the frames, make them RGB, enlarge small ones by a whole factor and pad to even sizes."""
    frames = np.asarray(frames)
    if frames.ndim != 4 or frames.shape[-1] not in (1, 3) or frames.dtype != np.uint8 or 0 in frames.shape:
        raise ValueError(
            f"A video needs frames of shape [time, height, width, 3] and dtype uint8; "
            f"these have the shape {list(frames.shape)} and dtype {frames.dtype}."
        )
    if frames.shape[-1] == 1:
        frames = np.repeat(frames, 3, axis=-1)
    factor = -(-SMALLEST_SIDE // max(frames.shape[1:3]))
    if factor > 1:
        frames = frames.repeat(factor, axis=1).repeat(factor, axis=2)
    odd_height, odd_width = frames.shape[1] % 2, frames.shape[2] % 2
    if odd_height or odd_width:
        frames = np.pad(frames, ((0, 0), (0, odd_height), (0, odd_width), (0, 0)), mode="edge")
    return frames


def _ffmpeg() -> Any:
    """imageio_ffmpeg if it has a working ffmpeg, else None."""
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        return None
    return imageio_ffmpeg
