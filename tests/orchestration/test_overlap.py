"""`training.overlap`: the environments step while updates run. The order of events is fixed, so that runs repeat and
resume exactly; without the setting nothing changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from orchestration_toys import ListSource
from orchestration_toys import build as build_toys
from tests.overrides import QUIET, TINY_DREAMER

from rl_lab.data_sources.stream import StreamSource
from rl_lab.errors import ConfigError
from rl_lab.experiment.train import run_training
from rl_lab.orchestration.orchestrator import Orchestrator

RUN = [*TINY_DREAMER[:-1], *QUIET, "logging.every=4", "checkpoint.every=32", "evaluation.every=40"]
RUN += ["training.total_timesteps=80", "evaluation.imagination=false"]


def metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "wall_s" and not k.startswith("time/")} for row in rows]


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("overlapped")
    return run_training([*RUN, "training.overlap=true", f"run_root={root}"]).folder


def test_the_same_seed_gives_the_same_run(tmp_path: Path, overlapped: Path) -> None:
    """Where and when the environments step while an update runs decides nothing."""
    overrides = [*RUN, "training.overlap=true", "environment.backend=process", f"run_root={tmp_path}"]
    rows = metrics(run_training(overrides).folder)
    assert rows == metrics(overlapped)
    assert any("train/loss/total" in row for row in rows)


def test_a_run_stopped_between_action_and_outcome_goes_on_exactly(
    tmp_path: Path, overlapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal after actions were sent saves them; the resumed run sends them again and equals the whole one."""
    original = Orchestrator._take_in

    def stop_soon(self: Orchestrator, result: Any, source: Any) -> None:
        original(self, result, source)
        if self.scheduler.env_steps == 64 and result.env_steps:
            self.signal.received = 15

    monkeypatch.setattr(Orchestrator, "_take_in", stop_soon)
    run = run_training([*RUN, "training.overlap=true", f"run_root={tmp_path}"]).folder
    monkeypatch.undo()
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    run_training([f"training.resume_path={run}"])
    assert metrics(run) == metrics(overlapped)


def phases(*hooks: Any) -> list[dict[str, Any]]:
    return [{"name": "main", "duration": 12, "workflow_hooks": list(hooks)}, {"name": "look", "type": "eval_only"}]


def run_toys(folder: Path, plan: list[dict[str, Any]], *, overlap: bool) -> tuple[Orchestrator, list[Any]]:
    """A run of the toys, and what happened in it, in order."""
    toys, log = build_toys(folder, plan, overlap=overlap), list[Any]()
    envs, source = toys.context.train_envs, toys.context.data_sources["replay"]
    for owner, name in ((envs, "send"), (envs, "receive"), (toys.evaluation, "run")):
        setattr(owner, name, noting(getattr(owner, name), log, name))
    toys._hooks["update_world_model"] = noting(toys._hooks["update_world_model"], log, "update")
    source.add = noting(source.add, log, lambda block: len(block.fields["reward"]))
    toys._loop()
    return toys, log


def noting(function: Any, log: list[Any], word: Any) -> Any:
    def noted(*arguments: Any, **options: Any) -> Any:
        log.append(word(*arguments) if callable(word) else word)
        return function(*arguments, **options)

    return noted


def test_updates_run_between_send_and_receive(tmp_path: Path) -> None:
    """Send, record, update, receive; the last step is received before the evaluation that follows."""
    _, log = run_toys(tmp_path, phases("collect", "world_model"), overlap=True)
    cycle = ["receive", "send", 2, "update"]
    ended = ["receive", "send", 1, 2, "update"]  # the environments' episodes last 3 and 5 steps
    assert log == ["send", 2, "update", *cycle, *cycle, *ended, *cycle, *ended, "receive", 1, "run"]


def test_overlap_only_delays_the_ends_of_episodes(tmp_path: Path) -> None:
    """The same decisions, records and episodes as without, in the same order."""
    plain, _ = run_toys(tmp_path / "plain", phases("collect", "world_model"), overlap=False)
    overlap, _ = run_toys(tmp_path / "overlap", phases("collect", "world_model"), overlap=True)
    for name in ("env_steps", "updates"):
        assert getattr(plain.scheduler, name) == getattr(overlap.scheduler, name)
    assert plain.context.train_envs.actions == overlap.context.train_envs.actions
    assert plain.recorder.episodes == overlap.recorder.episodes == 3
    assert len(plain.context.data_sources["replay"]) == len(overlap.context.data_sources["replay"])


def test_a_step_belongs_to_the_phase_that_began_it(tmp_path: Path) -> None:
    """The end of an episode reaches the source of its own phase, though the next one was entered since."""
    plan = [
        {"name": "first", "duration": 6, "workflow_hooks": ["collect"], "buffer": "other"},
        {"name": "second", "duration": 2, "workflow_hooks": ["collect", "world_model"]},
    ]
    toys = build_toys(tmp_path, plan, overlap=True, sources=("replay", "other"))
    toys._loop()
    sources = toys.context.data_sources
    assert (len(sources["other"]), len(sources["replay"])) == (7, 2)  # three decisions of two, one episode over


def test_a_stream_refuses_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An on-policy source needs the outcome of every decision before its updates."""
    monkeypatch.setattr(ListSource, "follow", StreamSource.follow, raising=False)
    with pytest.raises(ConfigError, match=r"training\.overlap.*'replay' of phase 'main'"):
        build_toys(tmp_path, phases("collect", "world_model"), overlap=True)
