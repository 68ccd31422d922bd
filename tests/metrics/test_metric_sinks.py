from __future__ import annotations

import sys

import numpy as np
import pytest

from rl_lab.errors import ConfigError
from rl_lab.metrics.logger import MetricsLogger
from rl_lab.metrics.sinks import MlflowSink, TensorBoardSink, WandbSink, flatten


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_forgets_what_came_after_the_checkpoint(tmp_path):
    """After a resume the curve is that of the run that was never killed."""
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"

    def log(logger, step, value):
        logger.log(env_steps=step, updates=0, wall_s=0.0, phase="p", values={"train/loss": value})

    first = MetricsLogger(path, [TensorBoardSink(folder=folder)])
    log(first, 10, 1.0)
    position = first.position()
    for step in (20, 30, 40):
        log(first, step, -1.0)
    first.close()
    second = MetricsLogger(path, [TensorBoardSink(folder=folder)])
    second.truncate(position)
    log(second, 20, 2.0)
    second.close()
    assert [(event.step, event.value) for event in read_events(folder).Scalars("train/loss")] == [(10, 1.0), (20, 2.0)]


def test_tensorboard_plays_videos(tmp_path):
    """A video arrives as an animated image."""
    sink = TensorBoardSink(folder=tmp_path)
    sink.video("eval/video", tmp_path / "x.mp4", np.zeros((5, 16, 16, 3), np.uint8), 7, 10.0)
    sink.close()
    (image,) = read_events(tmp_path).Images("eval/video")
    assert image.step == 7
    assert image.encoded_image_string.startswith(b"GIF89a")


@pytest.mark.parametrize(
    ("sink", "module", "extra"), [(WandbSink, "wandb", "wandb"), (MlflowSink, "mlflow.tracking", "mlflow")]
)
def test_a_missing_dashboard_names_its_extra(tmp_path, monkeypatch, sink, module, extra):
    """The message says what to install and how to switch it off."""
    monkeypatch.setitem(sys.modules, module.split(".")[0], None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"logging\.{extra}.*pip install 'rl-lab\[{extra}\]'"):
        sink(folder=tmp_path)


def test_flatten_names_leaves_by_their_path():
    """Configs are sent to dashboards with dotted names."""
    assert flatten({"a": {"b": {"c": 1}}, "d": [1, 2]}) == {"a.b.c": 1, "d": [1, 2]}
