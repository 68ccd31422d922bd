from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rl_lab.metrics.logger import DAMAGED, MetricsLogger, format_row


class RecordingSink:
    name = "recorder"

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def scalars(self, values, step):
        self.calls.append(("scalars", dict(values), step))

    def video(self, name, path, frames, step, fps):
        self.calls.append(("video", name, path, step))

    def resume(self, purge_step):
        self.calls.append(("resume", purge_step))

    def close(self):
        self.calls.append(("close",))


class BrokenSink(RecordingSink):
    name = "broken"

    def scalars(self, values, step):
        raise RuntimeError("no network")


def log(logger: MetricsLogger, step: int, **values: float) -> None:
    metrics = {f"train/{name}": value for name, value in values.items()}
    logger.log(env_steps=step, updates=step // 2, wall_s=0.5, phase="train", values=metrics)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_row_starts_with_the_counters_and_sorts_the_metrics(tmp_path):
    """The order of keys does not depend on the order in which metrics arrived."""
    values = {"b/x": 1.0, "a/y": 2.0}
    line = format_row(env_steps=3, updates=1, wall_s=0.1234567, phase="p", values=values)
    assert list(json.loads(line)) == ["env_steps", "updates", "wall_s", "phase", "a/y", "b/x"]
    backwards = dict(reversed(values.items()))
    assert line == format_row(env_steps=3, updates=1, wall_s=0.1234567, phase="p", values=backwards)


def test_floats_keep_every_bit_and_rows_are_valid_json(tmp_path):
    """Two runs can be compared exactly; NaN and infinities are null, which every JSON reader takes."""
    logger = MetricsLogger(tmp_path / "metrics.jsonl")
    log(logger, 10, third=1 / 3, tiny=5e-324, np=np.float32(0.1), nan=math.nan, inf=-math.inf)
    logger.close()
    (row,) = rows(tmp_path / "metrics.jsonl")
    assert row["train/third"] == 1 / 3
    assert row["train/tiny"] == 5e-324
    assert row["train/np"] == float(np.float32(0.1))
    assert row["train/nan"] is None
    assert row["train/inf"] is None


def test_scalar_goes_into_the_next_row_only(tmp_path):
    """A scalar that a workflow writes by itself stands in one row."""
    logger = MetricsLogger(tmp_path / "metrics.jsonl")
    logger.scalar("workflow/temperature", 0.5)
    log(logger, 10, loss=1.0)
    log(logger, 20, loss=1.0)
    first, second = rows(tmp_path / "metrics.jsonl")
    assert first["workflow/temperature"] == 0.5
    assert "workflow/temperature" not in second


def test_a_metric_cannot_hide_a_counter(tmp_path):
    """A metric named like a column of the row is refused."""
    with pytest.raises(ValueError, match="env_steps"):
        format_row(env_steps=1, updates=1, wall_s=0.0, phase="p", values={"env_steps": 3.0})


def test_truncate_gives_the_file_of_a_run_that_was_never_killed(tmp_path):
    """Rows after the checkpoint vanish, and writing goes on at that place."""
    path, straight = tmp_path / "metrics.jsonl", tmp_path / "straight.jsonl"
    first = MetricsLogger(path)
    for step in (10, 20, 30):
        log(first, step, loss=step / 7)
        if step == 20:
            position, checksum = first.position(), first.checksum
    first.close()
    resumed, whole = MetricsLogger(path), MetricsLogger(straight)
    assert resumed.truncate(position, checksum) is None
    for step in (30, 40):
        log(resumed, step, loss=step / 7)
    for step in (10, 20, 30, 40):
        log(whole, step, loss=step / 7)
    assert path.read_bytes() == straight.read_bytes()


@pytest.mark.parametrize("torn", [b'{"env_steps": 30, "upd', b"\x00\x00\x00", b'{"a": ' + b"1" * 200_000])
def test_a_torn_last_line_is_repaired(tmp_path, torn):
    """A kill in the middle of a write leaves half a line; opening the file removes it."""
    path = tmp_path / "metrics.jsonl"
    logger = MetricsLogger(path)
    log(logger, 10, loss=1.0)
    logger.close()
    with open(path, "ab") as file:
        file.write(torn)
    logger = MetricsLogger(path)
    log(logger, 20, loss=2.0)
    logger.close()
    assert [row["env_steps"] for row in rows(path)] == [10, 20]


def test_lost_rows_are_told_and_the_damaged_file_is_kept(tmp_path):
    """A file that was cut short in the middle of a row: the whole rows stay."""
    path = tmp_path / "metrics.jsonl"
    logger = MetricsLogger(path)
    for step in (10, 20, 30):
        log(logger, step, loss=1.0)
    position, checksum = logger.position(), logger.checksum
    logger.close()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 20])
    logger = MetricsLogger(path)
    assert "rows are missing" in logger.truncate(position, checksum)
    assert [row["env_steps"] for row in rows(path)] == [10, 20]
    assert (tmp_path / DAMAGED).read_bytes() == content[: len(content) - 20]
    assert logger.truncate(logger.position(), logger.checksum) is None


@pytest.mark.parametrize("damage", [b"\x00\xff\n\n{", b'{"env'])
def test_a_damaged_row_is_told_and_left_out(tmp_path, damage):
    """Bytes that changed in the middle of the file, which keeps its length."""
    path = tmp_path / "metrics.jsonl"
    logger = MetricsLogger(path)
    for step in (10, 20, 30):
        log(logger, step, loss=1.0)
    position, checksum = logger.position(), logger.checksum
    logger.close()
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + damage + content[middle + len(damage) :])
    logger = MetricsLogger(path)
    assert "checksum differs" in logger.truncate(position, checksum)
    log(logger, 40, loss=1.0)
    assert [row["env_steps"] for row in rows(path)] == [10, 30, 40]
    assert (tmp_path / DAMAGED).exists()


def test_sinks_hear_of_rows_and_of_the_purge(tmp_path):
    """A resumed run tells each sink the first step that is not valid any more; NaN is not sent."""
    sink = RecordingSink()
    logger = MetricsLogger(tmp_path / "metrics.jsonl", [sink])
    log(logger, 10, loss=1.0, bad=math.nan)
    position = logger.position()
    log(logger, 20, loss=2.0)
    logger.truncate(position)
    logger.close()
    assert sink.calls == [
        ("scalars", {"train/loss": 1.0}, 10),
        ("scalars", {"train/loss": 2.0}, 20),
        ("resume", 11),
        ("close",),
    ]


def test_a_failing_sink_does_not_end_the_run(tmp_path, caplog):
    """A dashboard that fails is dropped with a warning that names it."""
    good = RecordingSink()
    logger = MetricsLogger(tmp_path / "metrics.jsonl", [BrokenSink(), good])
    log(logger, 10, loss=1.0)
    log(logger, 20, loss=2.0)
    logger.close()
    assert len(rows(tmp_path / "metrics.jsonl")) == 2
    assert sum(call[0] == "scalars" for call in good.calls) == 2
    assert [record.getMessage() for record in caplog.records if "broken stopped: no network" in record.getMessage()]


def test_video_is_written_beside_the_metrics(tmp_path):
    """Videos go to videos/ with the env steps in the name, and to the sinks."""
    sink = RecordingSink()
    logger = MetricsLogger(tmp_path / "metrics.jsonl", [sink])
    path = logger.video("eval/episode", np.zeros((4, 16, 16, 3), np.uint8), 1200)
    assert path.parent == tmp_path / "videos"
    assert path.stem == "eval-episode-0000001200"
    assert path.stat().st_size > 0
    assert sink.calls == [("video", "eval/episode", path, 1200)]
