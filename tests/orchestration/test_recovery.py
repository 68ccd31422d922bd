"""Going back: poisoned checkpoints, abandoned futures, damaged logs, a run directory that is gone, full disks."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from orchestration_toys import build
from torch import nn

from rl_lab.errors import CheckpointError, NonFiniteError, RLLabError
from rl_lab.orchestration.nonfinite import nonfinite_parameter
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.run_directory import RunDirectory

JOINT = {"name": "joint", "duration": 1000, "workflow_hooks": ["collect", "world_model"]}


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    monkeypatch.setattr("rl_lab.metrics.report.write_report", lambda folder: folder / "report.html")


def events(run: RunDirectory) -> list[tuple[str, str]]:
    lines = map(json.loads, run.events_jsonl.read_text().splitlines())
    return [(line["kind"], line["message"]) for line in lines]


def poison_at(orchestrator: Orchestrator, update: int, value: float = math.inf) -> None:
    """A finite loss whose gradient makes the weight infinite, once, in the given update."""
    workflow = orchestrator.workflow
    learn, done = workflow._learn, []

    def overflow(name, batch):
        metrics = learn(name, batch)
        done.append(name)
        if len(done) == update:
            with torch.no_grad():
                workflow.layer.weight.fill_(value)
        return metrics

    workflow._learn = overflow


def test_the_first_bad_parameter_is_named():
    """NaN and infinity are found; what is large and finite is let through."""
    modules = {"a": nn.Linear(2, 2), "b": nn.Sequential(nn.Linear(2, 2))}
    with torch.no_grad():
        modules["a"].weight.fill_(3e38)
    assert nonfinite_parameter(modules) is None
    for value in (math.nan, math.inf, -math.inf):
        with torch.no_grad():
            modules["b"][0].bias[1] = value
        assert nonfinite_parameter(modules) == "b.0.bias"
    assert nonfinite_parameter({}) is None


def test_infinite_parameters_are_not_saved(tmp_path):
    """The checkpoint before them stands, and the run says which parameter it was."""
    orchestrator = build(tmp_path, [JOINT], total=40)
    poison_at(orchestrator, 11)  # then a checkpoint is due, at env step 24, and the next loss is still to come
    with pytest.raises(NonFiniteError, match=r"parameter layer\.weight is NaN or infinite after update 11"):
        orchestrator.run()
    assert list(orchestrator.checkpoints.available()) == [12]
    again = build(tmp_path, [JOINT], total=40, run=orchestrator.run_directory)
    assert again.resume()
    assert again.run() == 0


def test_a_rollback_leaves_infinite_parameters_behind(tmp_path):
    """It goes back by itself and reaches the end; the last checkpoint of a run is checked too."""
    for update in (11, 20):
        orchestrator = build(tmp_path, [JOINT], total=40, on_nonfinite="rollback")
        poison_at(orchestrator, update)
        assert orchestrator.run() == 0
        assert [kind for kind, _ in events(orchestrator.run_directory)].count("rollback") == 1
        assert nonfinite_parameter(orchestrator.modules) is None


def poison_file(path: Path) -> None:
    """A checkpoint as it could be written before parameters were looked at: whole, and useless."""
    from rl_lab.orchestration.checkpoint import MANIFEST, _describe

    state = torch.load(path / "agent.pt", weights_only=True)
    state["components"]["layer"]["weight"].fill_(math.inf)
    torch.save(state, path / "agent.pt")
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"] = {name: entry for name, entry in _describe(path).items() if name != MANIFEST}
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_a_run_resumes_from_an_older_checkpoint_where_the_latest_is_poisoned(tmp_path):
    """It says so, and what it went past is gone; asked for by name, a poisoned one is an error."""
    orchestrator = build(tmp_path, [JOINT], total=24)
    orchestrator.run()
    poison_file(orchestrator.checkpoints.folder / "step-24")
    again = build(tmp_path, [JOINT], total=40, run=orchestrator.run_directory)
    with pytest.raises(CheckpointError, match="step-24 holds parameters that are NaN or infinite"):
        again.resume(orchestrator.checkpoints.folder / "step-24")
    assert again.resume()
    assert again.clock == 12
    assert [kind for kind, _ in events(again.run_directory)] == ["poisoned", "resume"]
    assert list(again.checkpoints.available()) == [12]
    assert again.run() == 0


def test_rollbacks_try_older_checkpoints(tmp_path):
    """A checkpoint from which the same thing happened again is not gone back to for ever."""
    orchestrator = build(tmp_path, [JOINT], total=40, on_nonfinite="rollback")
    workflow = orchestrator.workflow
    workflow.bad_updates = set(range(14, 1000))  # from the same data the loss is never finite again
    with pytest.raises(NonFiniteError, match="3 rollbacks did not help"):
        orchestrator.run()
    went = [message.split()[3] for kind, message in events(orchestrator.run_directory) if kind == "rollback"]
    assert went[:2] == ["step-24", "step-12"]


def test_the_best_of_an_abandoned_future_is_gone(tmp_path):
    """Resumed at an earlier step, neither `best` nor a younger checkpoint may come back."""
    phases = [{**JOINT, "workflow_hooks": [*JOINT["workflow_hooks"], {"eval": {"every": 6}}]}]
    options = {"best_metric": "eval/return_mean", "select": "best"}
    orchestrator = build(tmp_path, phases, total=36, **options)
    assert orchestrator.run() == 0
    manifest = json.loads((orchestrator.checkpoints.folder / "best" / "manifest.json").read_text())
    assert manifest["step"] == 36
    again = build(tmp_path, phases, total=26, run=orchestrator.run_directory, **options)
    assert again.resume(orchestrator.checkpoints.folder / "step-24")
    assert list(again.checkpoints.available()) == [24]
    assert again.checkpoints.latest().name == "step-24"
    assert again.checkpoints.best() is None
    assert again.evaluation.best_score is None
    again.run()
    assert json.loads(again.run_directory.summary_json.read_text())["env_steps"] == 26


def test_a_rollback_forgets_the_best_of_what_it_gave_up(tmp_path, monkeypatch):
    """The best agent of step 18 is gone with the steps after 12; the next evaluation is the best again."""
    phases = [{**JOINT, "workflow_hooks": [*JOINT["workflow_hooks"], {"eval": {"every": 6}}]}]
    orchestrator = build(tmp_path, phases, total=36, on_nonfinite="rollback", best_metric="eval/return_mean")
    poison_at(orchestrator, 10)  # at env step 20
    seen = []

    def look(kind, message):
        seen.append((kind, orchestrator.clock, orchestrator.checkpoints.best(), orchestrator.evaluation.best_score))

    save = orchestrator.checkpoints.save_best
    saved = []
    monkeypatch.setattr(orchestrator.recorder, "event", look)
    monkeypatch.setattr(
        orchestrator.checkpoints,
        "save_best",
        lambda step, *rest, **more: (saved.append(step), save(step, *rest, **more)),
    )
    assert orchestrator.run() == 0
    assert seen == [("rollback", 12, None, None)]
    assert saved[:5] == [6, 12, 18, 12, 18]


@pytest.mark.parametrize("damage", ["cut", "flipped", "deleted"])
def test_a_damaged_log_is_told(tmp_path, damage):
    """The run goes on, and events.jsonl says what happened to metrics.jsonl."""
    orchestrator = build(tmp_path, [JOINT], total=24)
    orchestrator.run()
    run = orchestrator.run_directory
    content = run.metrics_jsonl.read_bytes()
    if damage == "cut":
        run.metrics_jsonl.write_bytes(content[: len(content) // 3])
    elif damage == "flipped":
        run.metrics_jsonl.write_bytes(content[:30] + bytes([content[30] ^ 1]) + content[31:])
    else:
        run.metrics_jsonl.unlink()
    again = build(tmp_path, [JOINT], total=40, run=run)
    assert again.resume()
    assert [kind for kind, message in events(run) if "metrics.jsonl" in message] == ["damaged"]
    assert again.run() == 0


@pytest.mark.parametrize("moment", ["collect_step", "log_metrics"])
def test_a_deleted_run_directory_is_noticed(tmp_path, moment):
    """It is an error, not a completed run; nothing is made anew in its place."""
    orchestrator = build(tmp_path, [JOINT], total=60)
    orchestrator.run_directory.require_present()
    original = getattr(orchestrator.workflow, moment)

    def delete(*arguments, **options):
        if orchestrator.scheduler.env_steps >= 16:
            shutil.rmtree(orchestrator.run_directory.path, ignore_errors=True)
        return original(*arguments, **options)

    setattr(orchestrator.workflow, moment, delete)
    with pytest.raises(RLLabError, match="is gone: it was deleted or moved"):
        orchestrator.run()
    assert not orchestrator.run_directory.path.exists()


def test_a_hang_up_saves_and_is_told(tmp_path):
    """SIGHUP, as when a terminal closes: a checkpoint, and run.json says interrupted."""
    orchestrator = build(tmp_path, [JOINT], total=40)
    collect = orchestrator.workflow.collect_step

    def hang_up(step, *, phase):
        if step == 10:
            os.kill(os.getpid(), signal.SIGHUP)
        return collect(step, phase=phase)

    orchestrator.workflow.collect_step = hang_up
    assert orchestrator.run() == 128 + signal.SIGHUP
    assert orchestrator.run_directory.info()["status"] == "interrupted"
    assert orchestrator.checkpoints.latest() is not None


def test_run_json_tells_of_a_full_disk(tmp_path, monkeypatch):
    """Where no new file can be written, the old one is changed in its place, and its hash with it."""
    from rl_lab.orchestration.provenance import origin_of

    run = RunDirectory.create(tmp_path, "x", 0)
    run.start(device="cpu", parameters={})

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_lab.orchestration.files.os.replace", full)
    run.finish("failed", "OSError: the disk is full" + 5000 * "!")
    assert run.info()["status"] == "failed"
    assert run.info()["error"].startswith("OSError: the disk is full")
    assert origin_of(run.path).changed == ()
