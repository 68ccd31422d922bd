"""Every file in results/ holds together, and a change of what made it is seen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT

from rl_lab.experiment import learning_code
from rl_lab.experiment.learning_code import digests
from rl_lab.experiment.prepare import prepare
from rl_lab.metrics.statistics import bootstrap_interval, interquartile_mean

RESULTS = ROOT / "results"
FILES = [path for path in sorted(RESULTS.glob("*.json")) if path.name != "reliability.json"]
KEYS = {"experiment", "overrides", "protocol", "rows", "iqm", "ci95", "config"}
ROW = {
    "seed", "return_mean", "return_std", "env_steps", "evaluation_env_steps", "frames", "updates", "wall_s", "device",
    "machine", "commit", "code", "settings", "versions", "parameters", "curve", "phases", "note", "shares",
    "training_return_mean", "training_return_std",
}  # fmt: skip
SINCE_DIGESTS = {  # rows from before do without them
    "training_return_mean", "training_return_std", "evaluation_env_steps", "phases", "note", "shares",
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_results_file_holds_together(path: Path) -> None:
    """Seeds once each, summaries that follow from the rows, known keys, a commit without changes, and the curves."""
    content = json.loads(path.read_text())
    rows: list[dict[str, Any]] = content["rows"]
    assert rows, "no rows"
    assert set(content) == KEYS
    seeds = [row["seed"] for row in rows]
    assert len(set(seeds)) == len(seeds), f"a seed twice: {seeds}"
    for row in rows:
        assert set(row) <= ROW, set(row) - ROW
        assert set(row) >= ROW - SINCE_DIGESTS, ROW - SINCE_DIGESTS - set(row)
        assert math.isfinite(row["return_mean"])
        assert (row["code"] is None) == (row["settings"] is None)
        assert row["commit"], f"seed {row['seed']} names no commit"
        assert "dirty" not in row["commit"], f"seed {row['seed']}: trained with changes that were not committed"
        assert (RESULTS / row["curve"]).is_file(), row["curve"]
    returns = [row["return_mean"] for row in rows]
    assert content["iqm"] == pytest.approx(interquartile_mean(returns))
    assert content["ci95"] == pytest.approx(bootstrap_interval(returns))


def test_every_curve_belongs_to_a_row() -> None:
    named = {row["curve"] for path in FILES for row in json.loads(path.read_text())["rows"]}
    assert {path.relative_to(RESULTS).as_posix() for path in (RESULTS / "curves").glob("*.csv")} == named


MINE = {
    "workflows/mine.py": """
\"\"\"A workflow.\"\"\"
from rl_lab.losses.own import loss
from rl_lab.metrics.words import say

class Mine:
    def update(self, batch: dict) -> float:
        \"\"\"One update.\"\"\"
        if not batch:
            raise ValueError("no batch")
        say("updating")
        return RATE * loss(batch)  # of it

RATE = 1.0
UNUSED = 2
""",
    "losses/own.py": """
from rl_lab.losses.halves import half as part

def loss(x):
    return part(x)

def other_loss(x):
    return x
""",
    "losses/halves.py": "half = 0.5",
    "metrics/words.py": "say = print",
}


def _digest_with(folder: Path, **changes: tuple[str, str]) -> str:
    """The digest of `Mine` after a text of one of its files was replaced."""
    for name, text in MINE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before, after = changes.get(path.stem, ("", ""))
        assert before in text
        path.write_text(text.replace(before, after), encoding="utf-8")
    config = {"environment": {"id": "CartPole-v1"}, "workflow": {"_target_": "rl_lab.workflows.mine.Mine"}}
    return digests(config, source=folder)["code"]


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("mine", "RATE * loss(batch)", "RATE * loss(batch) + 1"),
        ("mine", "RATE = 1.0", "RATE = 2.0"),
        ("mine", "if not batch", "if batch"),
        ("mine", "ValueError", "TypeError"),
        ("own", "return part(x)", "return -part(x)"),
        ("halves", "0.5", "0.6"),
    ],
)
def test_a_change_of_what_is_computed_is_seen(tmp_path: Path, file: str, before: str, after: str) -> None:
    """In the class that a configuration names, and in all that it uses, through imports under other names too."""
    assert _digest_with(tmp_path / "after", **{file: (before, after)}) != _digest_with(tmp_path / "before")


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("mine", "A workflow.", "Another word."),
        ("mine", "One update.", "An update."),
        ("mine", "  # of it", "\n\n"),
        ("mine", "batch: dict) -> float", "batch: list) -> int"),
        ("mine", "no batch", "there is no batch"),
        ("mine", "UNUSED = 2", "UNUSED = 3"),
        ("mine", "RATE * loss(batch)", "(RATE *\n            loss(batch))"),
        ("own", "    return x\n", "    return x / 3\n"),
        ("words", "print", "repr"),
    ],
)
def test_a_change_of_nothing_that_is_computed_is_not_seen(tmp_path: Path, file: str, before: str, after: str) -> None:
    """Prose, layout, annotations, the words of errors; definitions that are not used; parts that only report."""
    assert _digest_with(tmp_path / "after", **{file: (before, after)}) == _digest_with(tmp_path / "before")


def test_the_code_of_an_experiment_is_its_own_and_that_of_the_loop() -> None:
    """It has the definitions that its parts use, through `_target_` and through names, and the loop; none of another
    algorithm."""
    names = set(learning_code.definitions(prepare(["+experiment=dqn_cartpole"]).config))
    assert set(learning_code.LOOP) <= names
    assert {"rl_lab.workflows.dqn.DQN", "rl_lab.workflows.base.Workflow", "rl_lab.nn.flat_adam.FlatAdam"} <= names
    foreign = ("workflows.dreamer", "muzero", "environments.atari", "control_suite", "kernels", "metrics")
    assert not [name for name in names if any(word in name for word in foreign)]


def test_a_change_of_settings_is_seen() -> None:
    """By what an override does to the experiment; how a run is named, seeded, watched and computed is none of it."""

    def settings(*overrides: str) -> str:
        return digests(prepare(["+experiment=ppo_cartpole", *overrides]).config)["settings"]

    before = settings()
    assert settings("experiment.seed=4", "run_root=elsewhere", "logging.every=7", "training.threads=2") == before
    assert settings("environment.num_envs=3") != before
    assert settings("training.total_timesteps=300") != before


def test_a_row_is_marked_when_its_code_or_its_settings_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with another sign where nothing is known about its code."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import scores

    now = digests(prepare(["+experiment=ppo_cartpole"]).config)
    rows = [now, {**now, "code": "other"}, {**now, "settings": "other"}, {"code": None, "settings": None}]
    protocol = {"environment": "CartPole-v1"}
    marks = scores.row_marks({"experiment": "ppo_cartpole", "overrides": [], "protocol": protocol, "rows": rows})
    assert marks == ["", scores.FORMER, scores.FORMER, scores.UNKNOWN]


def test_findings_name_every_seed_that_missed_its_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import scores

    rows = [{"seed": 3, "return_mean": 243.7}, {"seed": 4, "return_mean": 179.9}]
    selection = {"selection": "the agent at the end of training"}
    result = {"experiment": "dqn_lunar_lander", "rows": rows, "protocol": selection, "config": {"training": {}}}
    (tmp_path / "dqn_lunar_lander.json").write_text(json.dumps(result))
    found = scores.findings(tmp_path)
    assert "1 of 2 seeds reached it. Not so `dqn_lunar_lander` seed 4 (179.9; gate 180)." in found
    assert "seed 3" not in found
