from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

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


def test_wandb_goes_on_under_the_same_id(tmp_path, monkeypatch):
    """The id comes from the run directory, so a resumed run is the same W&B run; the user's arguments win."""
    calls = []
    run = SimpleNamespace(log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("finish"))
    started = []
    fake = SimpleNamespace(init=lambda **arguments: started.append(arguments) or run, Video=lambda path, format: path)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = tmp_path / "dreamer" / "20250102-s0"
    sink = WandbSink(folder=folder, config={"size": "1m"}, project="mine", mode="offline")
    sink.scalars({"train/loss": 1.0}, 10)
    sink.video("eval", tmp_path / "x.mp4", np.zeros((1, 2, 2, 3), np.uint8), 20, 30.0)
    sink.close()
    (arguments,) = started
    assert arguments["id"] == "dreamer-20250102-s0"
    assert arguments["resume"] == "allow"
    assert (arguments["project"], arguments["mode"]) == ("mine", "offline")
    assert calls == [({"train/loss": 1.0}, 10), ({"eval": str(tmp_path / "x.mp4")}, 20), "finish"]


def test_mlflow_goes_on_in_the_same_run(tmp_path, monkeypatch):
    """The MLflow run's id is kept in the run directory and used again."""
    client = MagicMock()
    client.create_run.return_value.info.run_id = "run-1"
    monkeypatch.setitem(sys.modules, "mlflow", MagicMock())
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=lambda **_: client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=lambda *values: values))
    for _ in range(2):
        sink = MlflowSink(folder=tmp_path, config={"a": {"b": 1}})
        sink.scalars({"train/loss[0]": 1.0}, 10)
        sink.close()
    assert client.create_run.call_count == 1
    client.log_param.assert_called_once_with("run-1", "a.b", "1")
    (metric,) = client.log_batch.call_args.kwargs["metrics"]
    assert (metric[0], metric[1], metric[3]) == ("train/loss_0_", 1.0, 10)
    client.set_terminated.assert_called_with("run-1")
