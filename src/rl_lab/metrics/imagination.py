"""What the model imagined beside what happened: pictures, videos and the error by step."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.metrics.charts import COLOURS, IMAGINED, REAL, Panel, Series, png_chart
from rl_lab.metrics.imagination_images import image_picture, image_video, unit_images
from rl_lab.metrics.imagination_vectors import vector_picture, vector_video
from rl_lab.metrics.video import write_video
from rl_lab.records import ImaginedRollout

BASELINE = "if nothing changed any more"  # the error of repeating the last observation that was seen
MEASURES = {
    "image": "mean absolute error per pixel, on a scale from 0 (same) to 1 (black against white)",
    "vector": "root mean squared error over the entries, in the units of the observation",
}


def write_imagination(rollout: ImaginedRollout, folder: Path, *, fps: float = 8.0) -> list[Path]:
    """Draw a rollout into `folder`; returns the files, the main picture and video first.

    The leading key (an image where there is one) is picture.png and video.mp4, every other key picture-<key>.png and
    video-<key>.mp4. errors.png has the error by step and the rewards, imagination.json the numbers. Images are uint8
    or floats from 0 to 1, [batch, time, height, width, channels]; any other array is drawn as a vector.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    steps = rollout.real_reward.shape[1]
    if not 0 < rollout.context < steps:
        raise ValueError(
            f"context is {rollout.context}, but the rollout has {steps} steps: "
            "observe at least one step and leave at least one to imagine."
        )
    keys, skipped = _drawable(rollout)
    numbers: dict[str, Any] = {"context": rollout.context, "horizon": steps - rollout.context}
    numbers["sequences"] = int(rollout.real_reward.shape[0])
    numbers["keys"], numbers["skipped"] = {}, skipped
    files: list[Path] = []
    for position, key in enumerate(keys):
        suffix = "" if position == 0 else "-" + (re.sub(r"[^A-Za-z0-9_.]+", "_", key) or str(position))
        kind = kind_of(rollout.real[key])
        entry = {"kind": kind, **_errors(rollout, key, kind)}
        picture, video = _draw_key(rollout, key, kind, entry, folder, suffix, fps)
        numbers["keys"][key] = {**entry, "picture": picture.name, "video": video.name}
        files += [picture, video]
    if rollout.imagined_reward is not None:
        numbers["reward"] = _reward_errors(rollout.real_reward, rollout.imagined_reward, rollout.context)
    files.append(_error_chart(rollout, numbers, folder / "errors.png"))
    target = folder / "imagination.json"
    target.write_text(json.dumps(_plain(numbers), indent=1, allow_nan=False) + "\n")
    return [*files, target]


def kind_of(values: np.ndarray) -> str:
    return "image" if values.ndim == 5 else "vector"


def _drawable(rollout: ImaginedRollout) -> tuple[list[str], dict[str, str]]:
    """The keys that can be compared, images first, and why the others cannot."""
    skipped = {key: "the model does not predict it" for key in rollout.real if key not in rollout.imagined}
    for key in set(rollout.real) & set(rollout.imagined):
        real, imagined = rollout.real[key].shape, rollout.imagined[key].shape
        if real != imagined:
            skipped[key] = f"the observation is {list(real)}, the prediction {list(imagined)}"
    keys = [key for key in rollout.real if key not in skipped]
    return sorted(keys, key=lambda key: kind_of(rollout.real[key]) != "image"), skipped


def _errors(rollout: ImaginedRollout, key: str, kind: str) -> dict[str, Any]:
    """The error of every step over all sequences, and that of a forecast that nothing changes."""
    real, imagined = rollout.real[key], rollout.imagined[key]
    if kind == "image":
        real, imagined = unit_images(real), unit_images(imagined)
    else:
        real, imagined = real.astype(np.float64), imagined.astype(np.float64)
    real, imagined = (values.reshape(*values.shape[:2], -1) for values in (real, imagined))
    still = real[:, rollout.context - 1 : rollout.context]
    if kind == "image":
        by_step = np.abs(imagined - real).mean((0, 2))
        baseline = np.abs(still - real).mean((0, 2))
    else:
        by_step = np.sqrt(np.square(imagined - real).mean((0, 2)))
        baseline = np.sqrt(np.square(still - real).mean((0, 2)))
    return {
        "measure": MEASURES[kind],
        "error": by_step,
        "baseline": baseline,
        "error_mean": float(by_step[rollout.context :].mean()),
        "baseline_mean": float(baseline[rollout.context :].mean()),
        "steps_better": int((by_step < baseline)[rollout.context :].sum()),
    }


def _reward_errors(real: np.ndarray, imagined: np.ndarray, context: int) -> dict[str, Any]:
    real, imagined, ahead = real.astype(np.float64), imagined.astype(np.float64), slice(context, None)
    by_step = np.abs(imagined - real).mean(0)
    return {
        "measure": "mean absolute error of the predicted reward",
        "error": by_step,
        "error_mean": float(by_step[ahead].mean()),
        "real_sum_mean": float(real[:, ahead].sum(1).mean()),
        "imagined_sum_mean": float(imagined[:, ahead].sum(1).mean()),
    }


def _draw_key(
    rollout: ImaginedRollout, key: str, kind: str, entry: dict[str, Any], folder: Path, suffix: str, fps: float
) -> tuple[Path, Path]:
    real, imagined, context = rollout.real[key], rollout.imagined[key], rollout.context
    picture, video = folder / f"picture{suffix}.png", folder / f"video{suffix}.mp4"
    if kind == "image":
        image_picture(picture, key, real, imagined, context)
        frames = image_video(real, imagined, context)
    else:
        vector_picture(picture, key, real, imagined, context, entry["error"], entry["baseline"])
        frames = vector_video(key, real, imagined, context)
    return picture, write_video(video, frames, fps)


def _error_chart(rollout: ImaginedRollout, numbers: dict[str, Any], path: Path) -> Path:
    """The error of every key by step, then the rewards (and whether the episode goes on) of the first sequence."""
    panels = [error_panel(key, entry, rollout.context) for key, entry in numbers["keys"].items()]
    ahead = steps_ahead(rollout.real_reward.shape[1], rollout.context)
    if rollout.imagined_reward is not None:
        real, imagined = (rewards[0].astype(np.float64) for rewards in (rollout.real_reward, rollout.imagined_reward))
        rewards = [
            Series(ahead, real, "what happened", REAL),
            Series(ahead, imagined, "what the model predicted", IMAGINED, dashes=(0, (4, 1.5))),
        ]
        limits = _around(np.concatenate([real, imagined, [0.0]]))
        panels.append(_panel(rewards, "Reward of each step (first sequence)", ahead, "", limits=limits))
    if rollout.imagined_continue is not None:
        goes_on = Series(ahead, rollout.imagined_continue[0], "predicted", COLOURS[2])
        title = "Probability that the episode goes on (first sequence)"
        panels.append(_panel([goes_on], title, ahead, "", limits=(-0.02, 1.05)))
    return png_chart(path, panels, columns=1 if len(panels) < 3 else 2, width=7.5 if len(panels) < 3 else 11.0)


def error_panel(key: str, entry: dict[str, Any], context: int) -> Panel:
    """The error by step of one key: the imagination against a forecast that nothing changes."""
    ahead = steps_ahead(len(entry["error"]), context)
    series = [
        Series(ahead, entry["error"], "imagination", IMAGINED),
        Series(ahead[context - 1 :], entry["baseline"][context - 1 :], BASELINE, "#8a93a0", dashes=(0, (4, 1.5))),
    ]
    what = "pixel error, 0 to 1" if entry["kind"] == "image" else "error (RMSE)"
    return _panel(series, f"How far off is the imagined '{key}'?", ahead, what, from_zero=True)


def _panel(
    series: list[Series],
    title: str,
    ahead: np.ndarray,
    y_label: str,
    *,
    from_zero: bool = False,
    limits: tuple[float, float] | None = None,
) -> Panel:
    shaded = (float(ahead[0]), 0.5)
    label = "steps ahead of the last thing seen"
    return Panel(series, title, label, y_label, shaded, "the model could see", from_zero=from_zero, y_limits=limits)


def _around(values: np.ndarray) -> tuple[float, float] | None:
    """Limits with a little room; None where nothing is finite."""
    finite = values[np.isfinite(values)]
    room = 0.08 * max(float(np.ptp(finite)), 1e-6) if len(finite) else 0.0
    return (float(finite.min()) - room, float(finite.max()) + room) if len(finite) else None


def steps_ahead(steps: int, context: int) -> np.ndarray:
    """0 for the last step that was observed, +1 for the first imagined one."""
    return np.arange(steps) - (context - 1)


def _plain(value: Any) -> Any:
    """JSON without NaN: numbers to nine digits, null for what is not finite."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(entry) for entry in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value
