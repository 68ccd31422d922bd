"""Checkpoints: whole or not at all, verified when read, and never executed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from orchestration_toys import ListSource

from rl_lab.errors import CheckpointError
from rl_lab.orchestration import checkpoint as module
from rl_lab.orchestration.checkpoint import CheckpointManager

STATE = {
    "components": {"layer": {"weight": torch.arange(4.0)}},
    "controllers": {},
    "workflow_state": {"rng": np.random.default_rng(0).bit_generator.state},
    "phase": {"env_steps": 3},
}


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(tmp_path / "checkpoints", workflow="toy", keep=2)


def test_what_is_saved_is_loaded(manager):
    """State, large integers of random streams and data sources come back."""
    source = ListSource()
    source.records = 5
    path = manager.save(10, STATE, {"replay": source})
    loaded = manager.load()
    assert (loaded.path, loaded.step, loaded.state["phase"]) == (path, 10, {"env_steps": 3})
    assert torch.equal(loaded.state["components"]["layer"]["weight"], torch.arange(4.0))
    assert loaded.state["workflow_state"] == STATE["workflow_state"]
    other = ListSource()
    loaded.restore_source("replay", other, slice(0, 2))
    assert (other.records, source.commits) == (5, 1)


def test_latest_moves_and_old_ones_go(manager):
    """The newest `keep` stay; a given-up future (after going back to an older one) goes too."""
    for step in (10, 20, 30):
        manager.save(step, STATE, {})
    assert list(manager.available()) == [20, 30]
    assert (manager.folder / "latest").resolve().name == "step-30"
    manager.save(25, STATE, {})
    assert list(manager.available()) == [20, 25]
    assert manager.latest().name == "step-25"


@pytest.mark.parametrize("removes", ["save", "forget_after"])
def test_a_death_while_one_is_removed_leaves_no_half_of_it(manager, monkeypatch, removes):
    """It loses its name before its files."""

    class Killed(BaseException):
        pass

    unlink, gone = os.unlink, []

    def die_at_the_second(path, **options):
        if gone:
            raise Killed
        unlink(path, **options)
        gone.append(path)

    for step in (10, 20):
        manager.save(step, STATE, {})
    monkeypatch.setattr(module.shutil.os, "unlink", die_at_the_second)
    with pytest.raises(Killed):
        manager.save(30, STATE, {}) if removes == "save" else manager.forget_after(10)
    monkeypatch.undo()
    for path in manager.available().values():
        assert manager.load(path).path == path
    manager.recover()
    assert [path.name for path in manager.folder.iterdir() if path.name.startswith(".")] == []


def test_saving_the_same_step_again_replaces_it(manager):
    """The final checkpoint may fall on a step that has one."""
    manager.save(10, STATE, {})
    manager.save(10, {**STATE, "phase": "new"}, {})
    assert manager.load().state["phase"] == "new"
    assert [path.name for path in manager.folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("moment", ["fill", "sync", "rename_old", "rename_new", "link"])
@pytest.mark.parametrize("step", [10, 20])
def test_a_death_at_any_moment_leaves_a_whole_checkpoint(manager, monkeypatch, moment, step):
    """Whatever the process was doing when it died, the next one finds a checkpoint and no left-overs."""

    class Killed(BaseException):
        pass

    def die(*arguments, **options):
        raise Killed

    manager.save(10, STATE, {})
    renames = []
    rename = os.rename

    def count_renames(source, target):
        renames.append(target)
        if (moment == "rename_old" and len(renames) == 1) or (moment == "rename_new" and len(renames) == 2):
            raise Killed
        rename(source, target)

    if moment == "fill":
        monkeypatch.setattr(module, "_describe", die)
    elif moment == "sync":
        monkeypatch.setattr(module, "_sync_tree", die)
    elif moment == "link":
        monkeypatch.setattr(os, "replace", die)
    else:
        monkeypatch.setattr(os, "rename", count_renames)
    if not (moment == "rename_new" and step == 20):  # a new step needs one rename only
        with pytest.raises(Killed):
            manager.save(step, {**STATE, "phase": "new"}, {})
    monkeypatch.undo()
    again = CheckpointManager(manager.folder, workflow="toy", keep=2)
    again.recover()
    assert again.load().state["phase"] in ({"env_steps": 3}, "new")
    assert not [path for path in manager.folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("kind", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("writer failed")])
def test_a_full_disk_costs_nothing(manager, monkeypatch, kind):
    """The partial folder goes, the previous checkpoint stays, and one message says what to do."""
    manager.save(10, STATE, {})

    def full(*arguments):
        raise kind

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"step 20 could not be written.*step-10, is whole.*Free some space"):
        manager.save(20, STATE, {})
    monkeypatch.undo()
    assert [path.name for path in sorted(manager.folder.iterdir())] == ["latest", "step-10"]
    assert manager.load().step == 10


def _truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["agent.pt", "training.pt", "sources/replay/rows.bin", "manifest.json"])
@pytest.mark.parametrize(("damage", "word"), [(_truncate, "truncated"), (Path.unlink, "missing"), (_flip, "damaged")])
def test_a_damaged_file_is_named_and_an_older_checkpoint_offered(manager, name, damage, word):
    """Never half a state, never a traceback of the reader."""
    manager.save(10, STATE, {"replay": ListSource()})
    path = manager.save(20, STATE, {"replay": ListSource()})
    damage(path / name)
    word = "damaged" if name == "manifest.json" and word == "truncated" else word
    with pytest.raises(CheckpointError, match=f"(?s){name}.*{word}.*step-10"):
        manager.load(path)


def test_a_dangling_latest_falls_back_to_what_is_there(manager):
    """The link is a convenience: a lost target does not lose the run."""
    manager.save(10, STATE, {})
    shutil.rmtree(manager.save(20, STATE, {}))
    assert manager.latest().name == "step-10"


def test_other_workflows_and_newer_versions_are_refused(manager):
    """Each with a message of its own."""
    path = manager.save(10, STATE, {})
    with pytest.raises(CheckpointError, match="made by the workflow 'toy', but this run is 'dreamer'"):
        CheckpointManager(manager.folder, workflow="dreamer").load()
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(CheckpointError, match="has checkpoint version 99"):
        manager.load()


def test_loading_executes_no_code(manager, tmp_path):
    """A checkpoint from a stranger is data."""
    path = manager.save(10, STATE, {})
    marker = tmp_path / "executed"

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(marker),))

    torch.save({"components": Trap()}, path / "agent.pt", pickle_module=pickle)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["agent.pt"] = {
        "bytes": (path / "agent.pt").stat().st_size,
        "crc32": module._checksum(path / "agent.pt"),
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"agent\.pt cannot be read"):
        manager.load()
    assert not marker.exists()


def test_no_checkpoint_at_all_says_so(manager):
    """A run that was stopped early has nothing to load."""
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        manager.load()


def test_best_holds_only_what_it_takes_to_act(manager):
    """It can act, but not go on with training."""
    manager.save(10, STATE, {"replay": ListSource()})
    path = manager.save_best(10, STATE, 1.5)
    assert set(manager.load(path, agent_only=True).state) == {"components", "controllers", "workflow_state"}
    with pytest.raises(CheckpointError, match="only what it takes to act"):
        manager.load(path)
