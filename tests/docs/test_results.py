"""Every file in results/ holds together, and a change of what made it is seen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT

from rl_lab.experiment import learning_code
from rl_lab.experiment.learning_code import code_digest, settings_digest
from rl_lab.metrics.statistics import bootstrap_interval, interquartile_mean

RESULTS = ROOT / "results"
FILES = [path for path in sorted(RESULTS.glob("*.json")) if path.name != "reliability.json"]
KEYS = {"experiment", "overrides", "protocol", "rows", "iqm", "ci95", "settings", "config"}
ROW = {
    "seed", "return_mean", "return_std", "env_steps", "evaluation_env_steps", "frames", "updates", "wall_s", "device",
    "machine", "commit", "code", "versions", "parameters", "curve", "phases", "note", "shares",
    "training_return_mean", "training_return_std",
}  # fmt: skip
SINCE_DIGESTS = {  # rows from before do without them
    "training_return_mean", "training_return_std", "evaluation_env_steps", "code", "phases", "note", "shares",
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_results_file_holds_together(path: Path) -> None:
    """Seeds once each, summaries that follow from the rows, known keys, a commit without changes, and the curves."""
    content = json.loads(path.read_text())
    rows: list[dict[str, Any]] = content["rows"]
    assert rows, "no rows"
    assert set(content) <= KEYS
    assert KEYS - {"settings"} <= set(content)
    seeds = [row["seed"] for row in rows]
    assert len(set(seeds)) == len(seeds), f"a seed twice: {seeds}"
    for row in rows:
        assert set(row) <= ROW, set(row) - ROW
        assert set(row) >= ROW - SINCE_DIGESTS, ROW - SINCE_DIGESTS - set(row)
        assert math.isfinite(row["return_mean"])
        assert row["commit"], f"seed {row['seed']} names no commit"
        assert "dirty" not in row["commit"], f"seed {row['seed']}: trained with changes that were not committed"
        assert (RESULTS / row["curve"]).is_file(), row["curve"]
    returns = [row["return_mean"] for row in rows]
    assert content["iqm"] == pytest.approx(interquartile_mean(returns))
    assert content["ci95"] == pytest.approx(bootstrap_interval(returns))


def test_every_curve_belongs_to_a_row() -> None:
    named = {row["curve"] for path in FILES for row in json.loads(path.read_text())["rows"]}
    assert {path.relative_to(RESULTS).as_posix() for path in (RESULTS / "curves").glob("*.csv")} == named


def test_a_change_of_code_is_seen_and_one_of_prose_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the module that a configuration names, and in one that it imports; not in one that has no part in it."""
    (tmp_path / "workflows").mkdir()
    (tmp_path / "losses").mkdir()
    named, imported, other = (tmp_path / name for name in ("workflows/mine.py", "losses/own.py", "losses/other.py"))
    named.write_text('"""A workflow."""\nfrom rl_lab.losses.own import loss\n\n\nclass Mine:\n    rate = 1  # of it\n')
    imported.write_text('def loss(x):\n    """Half of it."""\n    return x / 2\n')
    other.write_text("unused = 1\n")
    monkeypatch.setattr(learning_code, "SOURCE", tmp_path)

    def digest() -> str:
        learning_code._module_code.cache_clear()
        return code_digest({"workflow": {"_target_": "rl_lab.workflows.mine.Mine"}})

    before = digest()
    named.write_text('"""Another word."""\nfrom rl_lab.losses.own import loss\n\nclass Mine:\n    rate = 1\n')
    imported.write_text('def loss(x):\n    """The half of\n    it."""\n\n    return x / 2\n')
    other.write_text("unused = 2\n")
    assert digest() == before
    imported.write_text("def loss(x):\n    return x / 3\n")
    assert digest() != before
    learning_code._module_code.cache_clear()


def test_a_change_of_settings_is_seen() -> None:
    """By what an override does to the experiment; the seed and where the run goes are no settings of it."""
    before = settings_digest("random", [])
    assert settings_digest("random", ["experiment.seed=4", "run_root=elsewhere"]) == before
    assert settings_digest("random", ["environment.num_envs=3"]) != before
