"""`rl-lab data`: record, inspect, convert, merge; wrong input is one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rl_lab.cli.main import main
from rl_lab.datasets.files import open_dataset


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "demos.npz"
    assert main(["data", "record", "expert:pendulum", "--episodes", "3", "--output", str(path)]) == 0
    return path


def test_recording_does_not_depend_on_how_many_play(tmp_path: Path, demos: Path) -> None:
    """Episode k is the same whoever plays beside it; another seed gives others."""
    whole = list(open_dataset(demos).episodes())
    main(["data", "record", "expert:pendulum", "--episodes", "1", "--output", str(tmp_path / "one.npz")])
    (first,) = open_dataset(tmp_path / "one.npz").episodes()
    np.testing.assert_array_equal(first.observation["vector"], whole[0].observation["vector"])
    main(["data", "record", "expert:pendulum", "--episodes", "1", "--seed", "1", "--output", str(tmp_path / "two.npz")])
    (other,) = open_dataset(tmp_path / "two.npz").episodes()
    assert not np.array_equal(first.observation["vector"], other.observation["vector"])


def test_noise_is_carried_out_and_the_clean_action_kept(tmp_path: Path) -> None:
    base = ["data", "record", "expert:pendulum", "--episodes", "1", "--noise", "0.5"]
    main([*base, "--output", str(tmp_path / "executed.npz")])
    main([*base, "--label", "clean", "--output", str(tmp_path / "clean.npz")])
    (executed,) = open_dataset(tmp_path / "executed.npz").episodes()
    (clean,) = open_dataset(tmp_path / "clean.npz").episodes()
    np.testing.assert_array_equal(executed.observation["vector"], clean.observation["vector"])
    assert not np.array_equal(executed.action, clean.action)


def test_the_agent_of_a_run_is_recorded(random_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "random.npz"
    assert main(["data", "record", str(random_run), "--episodes", "2", "--output", str(path)]) == 0
    assert len(list(open_dataset(path).episodes())) == 2
    assert main(["data", "record", str(random_run), "--episodes", "2", "--output", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_replay_of_a_run_is_a_dataset(random_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", str(random_run), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["decisions"] > 10
    assert summary["fields"]["action"]["dtype"] == "int32"


def test_inspect_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    action = rng.normal(size=(60, 1)).astype(np.float32)
    state = np.zeros((60, 2), np.float32)
    state[1:, 0] = np.cumsum(action[1:, 0])  # action t led to observation t
    state[7, 0] = np.nan
    images = rng.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    path = tmp_path / "odd.npz"
    np.savez(path, **{"obs.state": state, "obs.camera": images}, actions=action, rewards=np.ones(60))
    page = tmp_path / "page.html"
    assert main(["data", "inspect", str(path), "--page", str(page)]) == 0
    text = capsys.readouterr().out
    assert "1 numbers are NaN or infinite" in text
    assert "constant entries: 1" in text
    assert "seem to LEAD to their observation" in text
    assert "data:image/png;base64" in page.read_text()
    assert "recorded from" in page.read_text()


def test_convert_and_merge(demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, both = tmp_path / "folder", tmp_path / "both.npz"
    assert main(["data", "convert", str(demos), str(folder)]) == 0
    assert main(["data", "merge", str(demos), str(folder), "--output", str(both)]) == 0
    returns = [episode.reward.sum() for episode in open_dataset(both).episodes()]
    np.testing.assert_array_equal(returns[:3], returns[3:])
    main(["data", "record", "expert:cartpole", "--episodes", "1", "--output", str(tmp_path / "cart.npz")])
    command = ["data", "merge", str(demos), str(tmp_path / "cart.npz"), "--output", str(tmp_path / "no.npz")]
    assert main(command) == 2
    assert "cannot be merged" in capsys.readouterr().err
    assert not (tmp_path / "no.npz").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["rekord"], "Did you mean 'record'"),
        (["record", "expert:cartpol", "--episodes", "1", "--output", "x.npz"], "Did you mean 'cartpole'"),
        (["record", "expert:cartpole", "--episodes", "1", "--output", "x.xyz"], "no format has the suffix '.xyz'"),
        (["inspect", "missing.npz"], "missing.npz: no such file"),
        (["inspect", "demos.npz", "--map", "action"], "expected ROLE=NAME"),
    ],
)
def test_bad_input_is_one_line(
    command: list[str], said: str, demos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(demos.parent)
    assert main(["data", *command]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1
