"""Files that anybody may have made are read at once and without a traceback, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_lab.metrics.report import write_report
from rl_lab.metrics.run_files import number, read_run
from rl_lab.orchestration.files import read_json
from rl_lab.reading import parse_object, parse_yaml, read_bytes
from rl_lab.ui.defaults import main as differences
from rl_lab.ui.run_index import read_row

DEEP = 100_000
ODD_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
}
ODD_OBJECTS = {
    "deep": "[" * DEEP + "]" * DEEP,
    "huge number": '{"status": 1%s, "parameters": {"total": 1%s}, "env_steps": 1%s}' % (("0" * 400,) * 3),
    "half a character": '{"status": "\\ud800", "error": "\\udfff"}',
    "other types": '{"status": [1], "parameters": [1], "versions": 7, "argv": {"a": 1}, "error": {}, "resumed": 3}',
}
BOMB = "a: &a [x, x]\n" + "\n".join(f"{name}: &{name} [*{last}, *{last}]" for last, name in zip("abcdefg", "bcdefgh"))  # noqa: B905


@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.json"
    ODD_FILES[kind](path)
    with pytest.raises(OSError, match=r"not a file|directory|symbolic links"):
        read_bytes(path)
    assert read_json(path) is None


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "config.yaml", "events.jsonl"])
@pytest.mark.parametrize("kind", ODD_FILES)
def test_a_run_with_odd_files_is_shown_all_the_same(tmp_path: Path, name: str, kind: str) -> None:
    ODD_FILES[kind](tmp_path / name)
    read_row("x", tmp_path)
    assert read_run(tmp_path).rows == []


@pytest.mark.parametrize("content", ODD_OBJECTS)
def test_a_run_with_odd_values_has_a_row_and_a_report(tmp_path: Path, content: str) -> None:
    for name in ("run.json", "summary.json", "metrics.jsonl"):
        (tmp_path / name).write_text(ODD_OBJECTS[content])
    json.dumps(read_row("x", tmp_path))
    assert write_report(tmp_path).is_file()


def test_numbers_are_those_that_can_be_drawn() -> None:
    assert [number(value) for value in (2, -0.5, True, "7", float("nan"), 10**400, 1e300)] == [
        2.0, -0.5, None, None, None, None, None,
    ]  # fmt: skip


def test_objects_too_deep_to_read_are_none() -> None:
    assert parse_object('{"a":' * DEEP + "1" + "}" * DEEP) is None
    assert parse_object(b'{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, "aliases"),
        ("a: " + "[" * 100 + "]" * 100, "in each other"),
        ("a: 1\n" * 300_000, "bytes"),
        ("a: 2001-99-99", "month"),
        ("{[1]: 2}", "unhashable"),
        ("a: !!python/object/apply:os.system [x]", "constructor"),
    ],
)
def test_yaml_that_no_run_writes_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_yaml(text)
    (tmp_path / "config.yaml").write_text(text)
    assert read_run(tmp_path).config == {}


def test_differences_from_the_defaults_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(BOMB)
    monkeypatch.setattr("sys.argv", ["defaults", str(tmp_path / "config.yaml")])
    assert differences() == 2
    assert capsys.readouterr().err.count("\n") == 1
