"""A run from a stranger executes nothing; a run that was made here opens as it always did."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.overrides import QUIET
from tests.torture.forged import vouch_for
from tests.torture.hostile import MARKER, hostile_changes, hostile_run

import rl_lab as library
from rl_lab.experiment.trust import UntrustedRunError, open_config
from rl_lab.orchestration.provenance import key_file, origin_of
from rl_lab.orchestration.run_directory import RunDirectory

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stranger(random_run: Path, tmp_path: Path) -> Path:
    """A copy of a run, as it comes out of an archive."""
    return Path(shutil.copytree(random_run, tmp_path / "stranger", symlinks=True))


def test_no_hostile_run_executes_anything(random_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused with one line that names what it asked for."""
    refused = 0
    for number, (name, _) in enumerate(hostile_changes(tmp_path)):
        folder = tmp_path / str(number)
        change = dict(hostile_changes(folder))[name]
        run = RunDirectory(hostile_run(random_run, folder, change))
        monkeypatch.chdir(folder)
        with pytest.raises(UntrustedRunError, match="was not made here, and") as told:
            open_config(run, trust=False)
        assert "--trust" in str(told.value), name
        assert "\n" not in str(told.value), name
        assert not (folder / MARKER).exists(), name
        refused += 1
        shutil.rmtree(folder)
    assert refused >= 100


@pytest.mark.parametrize("name", ["os.system in components", "eval in data_sources", "module", "module in the id"])
def test_every_command_asks_before_it_opens_a_run(
    rl_lab: Command, random_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Evaluating, imagining, going on and printing the configuration refuse; comparing reads numbers only."""
    folder = tmp_path / "run"
    hostile_run(random_run, folder, dict(hostile_changes(folder))[name])
    monkeypatch.chdir(folder)
    commands = [
        ["eval", folder], ["imagine", folder], ["train", f"training.resume_path={folder}"],
        ["train", "-c", "job", f"training.resume_path={folder}"],
        ["data", "record", folder, "--episodes", "1", "--output", tmp_path / "demos.npz"],
    ]  # fmt: skip
    for command in commands:
        code, _, errors = rl_lab(*command)
        assert (code, len(errors.splitlines())) == (2, 1), errors
        assert "was not made here" in errors
    with pytest.raises(UntrustedRunError):
        library.load(folder)
    assert rl_lab("compare", folder, "--out", tmp_path / "comparison")[0] == 0
    assert not (folder / MARKER).exists()


def test_the_users_word_opens_a_run(random_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With trust the module is imported: the refusal was about trust, not about the run."""
    folder = tmp_path / "run"
    hostile_run(random_run, folder, dict(hostile_changes(folder))["module file"])
    library.load(folder, trust=True)
    assert (folder / MARKER).exists()


def test_a_copied_run_of_packaged_parts_opens(stranger: Path) -> None:
    """It is a stranger's now, and asks for nothing that RL Lab does not ship."""
    assert not origin_of(stranger).is_local
    agent = library.load(stranger)
    agent.act(agent.observation_space.sample(), agent.initial_state())


def test_a_given_environment_needs_no_module(random_run: Path, tmp_path: Path) -> None:
    """Whoever hands an environment over does not have the run's own built."""
    import gymnasium

    folder = tmp_path / "run"
    hostile_run(random_run, folder, dict(hostile_changes(folder))["module"])
    library.load(folder, env=gymnasium.make("CartPole-v1"))
    assert not (folder / MARKER).exists()


def test_the_mark_stays_when_a_run_is_moved_and_goes_when_it_is_copied(random_run: Path, tmp_path: Path) -> None:
    """By path or by inode, on this machine and with this configuration alone."""
    made = Path(shutil.copytree(random_run, tmp_path / "made", symlinks=True))
    RunDirectory(made).write_config((made / "config.yaml").read_text(), mark=True)
    assert origin_of(made).is_local
    copied = Path(shutil.copytree(made, tmp_path / "copied", symlinks=True))
    assert not origin_of(copied).is_local
    moved = Path(shutil.move(made, tmp_path / "moved"))
    assert origin_of(moved).is_local
    config = moved / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    assert not origin_of(moved).is_local


def test_the_mark_needs_this_users_key(random_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same folder on another machine is a stranger's; the key is readable by its owner alone."""
    assert origin_of(random_run).is_local
    assert key_file().stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert not origin_of(random_run).is_local


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_a_flipped_byte_in_the_configuration_is_seen(stranger: Path, rl_lab: Command) -> None:
    """A run that would be another one is not opened."""
    flip_a_byte(stranger / "config.yaml")
    assert origin_of(stranger).changed == ("config.yaml",)
    for command in (["eval", stranger], ["train", f"training.resume_path={stranger}"]):
        code, _, errors = rl_lab(*command)
        assert (code, len(errors.splitlines())) == (2, 1), errors
        assert "config.yaml is not as the run wrote it" in errors


def test_a_flipped_byte_in_run_json_is_seen(stranger: Path) -> None:
    """Nothing is read from it that decides anything: the run goes on, says so, and keeps the damaged file."""
    from rl_lab.experiment.train import run_training

    flip_a_byte(stranger / "run.json")
    damaged = (stranger / "run.json").read_bytes()
    assert origin_of(stranger).changed == ("run.json",)
    assert run_training([f"training.resume_path={stranger}", "training.total_timesteps=88", *QUIET]).code == 0
    events = [json.loads(line) for line in (stranger / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "damaged" and "run.json" in event["message"] for event in events)
    assert (stranger / "run.damaged.json").read_bytes() == damaged
    assert origin_of(stranger).changed == ()


def test_a_run_that_goes_on_stays_trusted_only_where_it_was(stranger: Path) -> None:
    """Going on with a stranger's run does not make it this user's own."""
    from rl_lab.experiment.train import run_training

    assert run_training([f"training.resume_path={stranger}", "training.total_timesteps=88", *QUIET]).code == 0
    assert origin_of(stranger) == (False, ())
    trusted = [f"training.resume_path={stranger}", "training.total_timesteps=96", *QUIET]
    assert run_training(trusted, trust=True).code == 0
    assert origin_of(stranger).is_local


@pytest.mark.parametrize("place", ["scheduler", "loop"])
def test_a_forged_checkpoint_is_refused_in_one_line(stranger: Path, rl_lab: Command, place: str) -> None:
    """Whole by its manifest, of the right shape at first sight, and not to be computed with."""
    checkpoint = (stranger / "checkpoints" / "latest").resolve()
    content = torch.load(checkpoint / "training.pt", weights_only=True)
    if place == "scheduler":
        content["state"]["phase"]["progress"]["collect"]["start"][0] = {"x": 1}
    else:
        del content["state"]["loop"]["recorder"]
    torch.save(content, checkpoint / "training.pt")
    vouch_for(checkpoint)
    code, _, errors = rl_lab("train", f"training.resume_path={stranger}", "training.total_timesteps=88", *QUIET)
    assert (code, len(errors.splitlines())) == (2, 1), errors
    assert ("was not made here" if place == "scheduler" else "does not fit this run") in errors


def test_looking_a_run_over_takes_no_time(stranger: Path, random_run: Path) -> None:
    """A tenth of a second at most is promised, for a stranger's run and for one's own."""
    for folder in (stranger, random_run):
        open_config(RunDirectory(folder), trust=False)  # the targets of the packaged configurations are read once
        start = time.thread_time()
        open_config(RunDirectory(folder), trust=False)
        assert time.thread_time() - start < 0.1


def test_a_manifest_with_odd_values_is_no_mark(stranger: Path) -> None:
    """Whatever stands in it, it is looked at and not believed."""
    for content in ("", "[]", "{}", '{"files": 3, "marks": "x"}', '{"files": {"config.yaml": 7}, "marks": [1, "ü"]}'):
        (stranger / "manifest.json").write_text(content)
        assert not origin_of(stranger).is_local
    assert json.loads((stranger / "manifest.json").read_text())
