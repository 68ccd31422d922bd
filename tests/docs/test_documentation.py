"""What the documentation names exists: commands, settings, phases, files, links, classes, sizes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shutil
import subprocess
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import PLUGIN, ROOT, blocks, commands, pages, prose, shell_lines

from rl_lab.cli.main import COMMANDS, main
from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.environments.settings import AtariSettings, EnvironmentSettings
from rl_lab.experiment import registry
from rl_lab.experiment.config import compose, resolve
from rl_lab.experiment.resume import SAFE_KEYS, SAFE_SECTIONS
from rl_lab.experiment.settings import SECTIONS
from rl_lab.experiment.validation import validate
from rl_lab.nn.optimizers import LaProp
from rl_lab.orchestration.phases import PhaseNames, parse_phases
from rl_lab.workflows.dreamer_v1 import DreamerV1
from rl_lab.workflows.dreamer_v2 import DreamerV2
from rl_lab.workflows.dreamer_v3 import DreamerV3
from rl_lab.workflows.muzero import MuZero
from rl_lab.workflows.world_models import WorldModels

DIMS = {
    "observation": {"vector": {"kind": "vector", "shape": [4], "dtype": "float32", "classes": []}},
    "action": {"kind": "discrete", "shape": [1], "classes": [2]},
    "action_size": 2,
}
ACCEPTED = 77  # how a command leaves that was stopped after its options were parsed


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A reader's folder with the experiment files of the pages; training stops at the checked configuration."""
    for block in blocks("yaml"):
        if block.config_name and "defaults:" in block.text:
            path = tmp_path / "my_configs" / "experiment" / f"{block.config_name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    (tmp_path / "my_lab").symlink_to(PLUGIN / "my_lab")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PLUGIN))
    plugin = registry.ConfigFolder("my_lab", PLUGIN / "my_lab" / "configs")
    monkeypatch.setattr(registry, "plugin_folders", lambda: [plugin])
    trained: list[list[str]] = []

    def check(overrides: list[str], *, config_dirs: Any = (), trust: bool = False, requeue: bool = False) -> Any:
        trained.append(overrides)
        if any(line.startswith("training.resume_path=") for line in overrides):
            keys = [line.partition("=")[0] for line in overrides if not line.startswith("training.resume_path=")]
            assert all(key in SAFE_KEYS or key.startswith(SAFE_SECTIONS) for key in keys)
            return 0
        # The first value of a sweep.
        single = [re.sub(r"=(?:\w+\(log,|\w+\()*([\w.-]+),.*", r"=\1", line) for line in overrides]
        single = [line for line in single if not line.startswith("hydra")]
        config = compose(single, config_dirs=config_dirs)
        config._dims = DIMS
        validate(resolve(config) | ({} if config.environment.id else {"environment": {"id": "CartPole-v1"}}))
        return 0

    monkeypatch.setattr("rl_lab.experiment.train.train", check)
    monkeypatch.setattr("rl_lab.experiment.sweep.sweep", check)
    return trained


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_commands_are_accepted(
    arguments: list[str], reader: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every `rl-lab …` line: the command exists, its options parse, and a training's overrides compose and validate."""
    assert arguments[0] in COMMANDS
    if arguments[0] == "train" and "--cfg" not in arguments:
        assert main(arguments) == 0, capsys.readouterr().err
        assert len(reader) == 1
        return
    with pytest.raises(SystemExit) as stop:
        _parse_only(arguments, monkeypatch)
    assert stop.value.code == ACCEPTED, capsys.readouterr().err


def _parse_only(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command up to the point where its options are parsed."""
    import argparse

    for name in ("parse_args", "parse_intermixed_args"):
        plain = getattr(argparse.ArgumentParser, name)

        def parse(self: Any, *given: Any, plain: Any = plain, **named: Any) -> Any:
            plain(self, *given, **named)
            raise SystemExit(ACCEPTED)

        monkeypatch.setattr(argparse.ArgumentParser, name, parse)
    importlib.import_module(COMMANDS[arguments[0]][0]).run(arguments[1:])


def test_other_shell_lines_name_what_exists() -> None:
    """Targets of make and scripts that Python is given."""
    targets = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page, words in shell_lines():
        if words[0] == "make":
            assert words[1] in targets, (page, words)
        if words[0] == "python" and not words[1].startswith("-"):
            assert (ROOT / words[1]).is_file(), (page, words)


@pytest.mark.parametrize(
    "text", [block.text for block in blocks("yaml") if "phases:" in block.text], ids=lambda text: text[:30]
)
def test_curricula_load(text: str) -> None:
    """Every YAML block with training.phases is accepted."""
    node = yaml.safe_load(text)
    given = node.get("data_sources", {})
    names = PhaseNames(
        ("update", "update_world_model", "update_controller"),
        other_hooks=("encode", "assess", "evolve"),
        named_hooks=("distill", "clone"),
        data_sources=("replay", *given),
        prefilled=[name for name, source in given.items() if "_target_" in source],
        roles=("random", "policy", "critic", "explorer", *node.get("controllers", {})),
        evaluate_every=1000,
    )
    assert parse_phases(node["training"]["phases"], names)


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_resolve() -> None:
    """Relative links lead to files, and their anchors to headings."""
    for page, text in prose().items():
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if target.startswith("http"):
                continue
            file, _, anchor = target.partition("#")
            path = (ROOT / page).parent / file if file else ROOT / page
            assert path.exists(), f"{page}: {target}"
            if anchor:
                assert anchor in _anchors(path.read_text(encoding="utf-8")), f"{page}: {target}"


def _known_settings() -> set[str]:
    known = {f"{section}.{field.name}" for section, cls in SECTIONS.items() for field in fields(cls)}
    known |= {f"environment.{field.name}" for field in fields(EnvironmentSettings)}
    known |= {f"environment.atari.{field.name}" for field in fields(AtariSettings)}
    parts = [("optimizers.main", LaProp), ("data_sources.replay", SequenceReplay)]
    for place, cls in [*parts, *(("workflow", cls) for cls in (DreamerV1, DreamerV2, DreamerV3, MuZero, WorldModels))]:
        known |= {f"{place}.{name}" for name in inspect.signature(cls).parameters}
    return known


def test_settings_exist() -> None:
    """A setting in backticks, such as `training.threads`, is one."""
    known = _known_settings()
    places = "|".join([*SECTIONS, "environment", "workflow", "optimizers.main", "data_sources.replay"])
    pattern = re.compile(rf"`((?:{places})\.[a-z_.]*[a-z_])(?:=[^`]*)?`")
    found = {(page, key) for page, text in prose().items() for key in pattern.findall(text)}
    assert len(found) > 30
    assert not {(page, key) for page, key in found if key not in known}


def test_safe_overrides_are_the_listed_ones() -> None:
    """docs/resume.md names exactly what a resumed run accepts."""
    text = pages()["docs/resume.md"]
    listed = text[text.index("## Overrides that are safe") : text.index("Other intervals of logging")]
    assert set(re.findall(r"`([a-z]+\.[a-z_]+)`", listed)) - {"config.yaml"} == set(SAFE_KEYS)
    assert all(f"`{section}`" in listed for section in SAFE_SECTIONS)


def test_paths_and_classes_exist() -> None:
    """Files of the repository and dotted names of the package that the text mentions."""
    for page, text in prose().items():
        for path in re.findall(r"`((?:src|tests|docs|examples|scripts|benchmarks)/[\w./]+)`", text):
            assert "tiny_q" in path or (ROOT / path).exists(), f"{page}: {path}"
        for name in re.findall(r"`(rl_lab\.[\w.]+\w)`", text):
            assert name.startswith(("rl_lab.plugins", "rl_lab.workflows.tiny_q")) or _importable(name), (page, name)


def _importable(name: str) -> bool:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # what stands before the last dot is no package
        found = None
    module, _, attribute = name.rpartition(".")
    return found is not None or hasattr(importlib.import_module(module), attribute)


def test_sizes_are_those_of_the_presets() -> None:
    """The table of docs/dreamer_v3.md."""
    presets = yaml.safe_load((registry.OWN_CONFIGS / "presets" / "dreamer_v3.yaml").read_text())
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) × (\d+) \| (\d+) \| (\d+) \|", _page_of_sizes(), re.M)
    keys = ("deter", "hidden", "groups", "classes", "depth", "units")
    assert {name: tuple(map(int, numbers)) for name, *numbers in rows} == {
        name: tuple(preset[key] for key in keys) for name, preset in presets.items()
    }


@pytest.mark.parametrize("size", ["tiny", "small", "1m"])
def test_parameter_counts_are_true(size: str) -> None:
    """Of the presets that are small enough to be built here."""
    import torch

    from rl_lab.experiment.model import build_model

    image = {"kind": "image", "shape": [64, 64, 3], "dtype": "uint8", "classes": []}
    numbers = {"kind": "vector", "shape": [24], "dtype": "float32", "classes": []}
    discrete = {"kind": "discrete", "shape": [1], "classes": [18]}
    continuous = {"kind": "continuous", "shape": [6], "classes": []}
    counts = []
    for observation, action, width in ((image, discrete, 18), (numbers, continuous, 6)):
        config = compose(["+experiment=dreamer_v3", f"size={size}"])
        config._dims = {"observation": {"seen": observation}, "action": action, "action_size": width}
        counts.append(sum(build_model(resolve(config), torch.device("cpu")).parameters.values()))
    row = next(line for line in _page_of_sizes().splitlines() if line.startswith(f"| `{size}`"))
    assert [int(cell.replace(",", "")) for cell in row.strip("|").split("|")[-2:]] == counts


def _page_of_sizes() -> str:
    return pages()["docs/dreamer_v3.md"]


def test_generated_parts_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of settings and results equal their sources; `python docs/generate.py` renews them."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    import scores

    def unmarked(text: str) -> str:
        # Any change of learning code marks rows; that makes no page stale.
        return text.replace(scores.FORMER, "").replace(scores.UNKNOWN, "")

    monkeypatch.setattr(scores, "row_marks", lambda result: [""] * len(result["rows"]))
    stale = [page for page, text in pages().items() if unmarked(generate.filled(text)) != unmarked(text)]
    assert not stale, f"{', '.join(stale)}: run python docs/generate.py"


def test_the_tutorials_show_the_files_of_the_example() -> None:
    """CONTRIBUTING holds every file of examples/my_lab, word for word."""
    text = pages()["CONTRIBUTING.md"]
    files = [path for path in PLUGIN.rglob("*") if path.suffix in (".py", ".yaml", ".toml")]
    assert len(files) == 8
    for path in files:
        assert path.name == "__init__.py" or f"\n{path.read_text(encoding='utf-8')}```" in text, path


def test_what_the_tour_writes_is_not_offered_to_git() -> None:
    """Runs, the folder of experiment files, and whatever a command of the README names as its output."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = {"experiments/dreamer_v3_cartpole/run/run.json", "outputs/x", "multirun/x"}
    for page, words in shell_lines():
        options = dict(pairwise(words)) if page == "README.md" else {}
        names.update(f"{options[key]}/x" for key in ("--out", "--output", "--config-dir") if key in options)
    assert {"comparison/x", "my_configs/x"} <= names
    done = subprocess.run(["git", "-C", str(ROOT), "check-ignore", *names], capture_output=True, text=True, check=False)
    assert sorted(names - set(done.stdout.splitlines())) == []
