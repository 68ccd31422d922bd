"""The loop: order of calls, shared batches, routing, logs, signals, and what it does with bad updates."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from orchestration_toys import CountingEnvs, build

from rl_lab.errors import CheckpointError, ConfigError, NonFiniteError, RLLabError
from rl_lab.orchestration.conditions import LEARNED, RECORDED
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.workflows.context import HookResult

JOINT = {"name": "joint", "duration": 1000, "workflow_hooks": ["collect", "world_model", "controller"]}


@pytest.fixture
def _real_report():
    """Asked for by the test that looks at report.html."""


@pytest.fixture(autouse=True)
def _quick_report(request, monkeypatch):
    """Drawing charts takes longer than everything else here; one test does it."""
    if "_real_report" not in request.fixturenames:
        monkeypatch.setattr("rl_lab.metrics.report.write_report", lambda folder: folder / "report.html")


def rows(orchestrator: Orchestrator) -> list[dict[str, Any]]:
    return [json.loads(line) for line in orchestrator.run_directory.metrics_jsonl.read_text().splitlines()]


def comparable(orchestrator: Orchestrator) -> list[dict[str, Any]]:
    """Rows without what depends on the clock on the wall."""
    return [
        {name: value for name, value in row.items() if name != "wall_s" and not name.startswith("time/")}
        for row in rows(orchestrator)
    ]


def events(orchestrator: Orchestrator) -> list[str]:
    path = orchestrator.run_directory.events_jsonl
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()] if path.exists() else []


def test_hooks_are_called_in_order_on_shared_batches(tmp_path):
    """World model and controller of one pass see the same batch; the next pass a new one."""
    orchestrator = build(tmp_path, [{**JOINT, "workflow_hooks": [*JOINT["workflow_hooks"], "distill"]}], total=4)
    assert orchestrator.run() == 0
    first = ["collect", ("world_model", 1), ("controller", 1), "distill"]
    assert orchestrator.workflow.calls == [*first, "collect", ("world_model", 2), ("controller", 2), "distill"]


def test_updates_wait_until_the_source_is_ready(tmp_path):
    """Records are routed to the phase's source; updates begin when it has enough."""
    orchestrator = build(tmp_path, [JOINT], total=12, start=7)
    orchestrator.run()
    calls = orchestrator.workflow.calls
    # 2 environments give 2 records a step, and one more where an episode ends (after 3 and 5 steps): 2, 4, 7.
    assert calls.index(("world_model", 1)) == 3
    assert orchestrator.context.data_sources["replay"].records == 12 + 3


@pytest.mark.usefixtures("_real_report")
def test_the_run_directory_tells_everything(tmp_path):
    """Rows with counters, episode returns, losses and phase; the summary's keys; a report; status completed."""
    orchestrator = build(tmp_path, [{**JOINT, "workflow_hooks": [*JOINT["workflow_hooks"], {"eval": {"every": 20}}]}])
    assert orchestrator.run() == 0
    written = rows(orchestrator)
    assert [row["env_steps"] for row in written if "collect/episodes" in row] == [8, 16, 24, 32, 40, 40]
    assert [row["env_steps"] for row in written if "eval/return_mean" in row] == [20, 40]
    row = written[1]
    assert list(row)[:4] == ["env_steps", "updates", "wall_s", "phase"]
    assert row["phase"] == "joint"
    assert {
        "train/weight",
        "controller/weight",
        "collect/episode_return",
        "phase/cycles",
        "time/env_steps_per_s",
    } <= set(row)
    assert row["collect/episode_return"] in (3.0, 6.0, 4.5)  # episodes of 3 and 5 steps, with 1 and 2 for the last
    summary = json.loads(orchestrator.run_directory.summary_json.read_text())
    keys = "eval/return_mean eval/return_std eval/episodes env_steps updates episodes wall_s env_steps_per_s"
    assert set(f"{keys} updates_per_s peak_rss_mb peak_gpu_mb".split()) <= set(summary)
    assert (summary["env_steps"], summary["updates"], summary["eval/return_mean"]) == (40, 40, 4.5)
    assert orchestrator.run_directory.info()["status"] == "completed"
    assert (orchestrator.run_directory.path / "report.html").is_file()


def test_checkpoints_come_when_due_and_at_the_end(tmp_path):
    """Every 12 env steps of 40, the last two kept, and sources are told."""
    orchestrator = build(tmp_path, [JOINT])
    orchestrator.run()
    assert list(orchestrator.checkpoints.available()) == [36, 40]
    assert orchestrator.context.data_sources["replay"].commits == 4


def test_offline_phases_log_and_save_by_updates(tmp_path):
    """Where nothing is collected, updates are the clock, and no batch is cut in half by a checkpoint."""
    phases = [
        {"name": "fill", "type": "warmup", "duration": 4, "controller": "random"},
        {"name": "learn", "type": "offline", "duration": "30_updates"},
    ]
    orchestrator = build(tmp_path, phases, checkpoint_every=7)
    orchestrator.run()
    assert [row["updates"] for row in rows(orchestrator) if "collect/episodes" in row] == [4, 12, 20, 28, 30]
    assert list(orchestrator.checkpoints.available())[-1] == 34


def test_plan_phase_switches(tmp_path):
    """The workflow may choose the phase."""
    phases = [
        {**JOINT, "workflow_hooks": ["collect"]},
        {"name": "own", "duration": 2, "workflow_hooks": ["collect", "distill"]},
    ]
    orchestrator = build(tmp_path, phases)
    orchestrator.workflow.jump_at = {6: "own"}
    orchestrator.run()
    assert orchestrator.workflow.calls == ["collect"] * 4 + ["distill"]


def test_until_is_fed_by_evaluations(tmp_path):
    """Two good evaluations in a row end the phase, and with it the run."""
    phase = {
        **JOINT,
        "workflow_hooks": ["collect", {"eval": {"every": 4}}],
        "until": {"metric": "eval/return_mean", "at_least": 4, "times": 2},
    }
    orchestrator = build(tmp_path, [phase])
    orchestrator.run()
    assert orchestrator.scheduler.env_steps == 8


def test_a_condition_on_a_metric_that_updates_do_not_report(tmp_path):
    """It is told after a few rows, with the nearest name; what rows hold is known to the checks."""
    phase = {**JOINT, "until": {"metric": "train/weigth", "at_least": 1e9}}
    with pytest.raises(
        ConfigError, match=r"'train/weigth', which its updates do not report\. Did you mean 'train/weight'"
    ):
        build(tmp_path, [phase], total=200).run()
    sound = build(tmp_path, [{**phase, "until": {"metric": "train/weight", "at_least": 1e9}}], total=80)
    assert sound.run() == 0
    known = (*RECORDED, "env_steps", "updates", "wall_s", "phase")
    names = {name for row in rows(sound) for name in row if not name.startswith("eval/final_")}
    assert {name for name in names if not name.startswith(LEARNED)} <= set(known)


@pytest.mark.parametrize(("minutes", "env_steps"), [(0.0, 8), (60.0, 40)])
def test_until_may_ask_for_the_time(tmp_path, minutes, env_steps):
    """With the first row that says so; a run that is over sooner never notices."""
    orchestrator = build(tmp_path, [{**JOINT, "until": {"metric": "time/minutes", "at_least": minutes}}])
    orchestrator.run()
    assert orchestrator.scheduler.env_steps == env_steps


def test_environment_events_are_written_and_counted(tmp_path):
    """A restarted worker leaves a line in events.jsonl and a count in the metrics."""
    orchestrator = build(tmp_path, [JOINT])
    orchestrator.context.train_envs.events.append({"kind": "worker_restart", "message": "environment 1 failed"})
    orchestrator.run()
    assert events(orchestrator) == ["worker_restart"]
    assert rows(orchestrator)[0]["collect/worker_restarts"] == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_run_goes_on_exactly(tmp_path, number, code):
    """The batch is used to its end, a checkpoint is written, the run is `interrupted`; resumed, it equals the whole."""
    whole = build(tmp_path, [JOINT])
    whole.run()
    first = build(tmp_path, [JOINT])
    update = first.workflow.update_world_model

    def interrupted(batch, *, phase):
        if int(batch.reward) == 8:
            os.kill(os.getpid(), number)
        return update(batch, phase=phase)

    first._hooks["update_world_model"] = interrupted
    handler = signal.getsignal(number)
    assert first.run() == code
    assert signal.getsignal(number) is handler
    assert first.workflow.calls[-1] == ("controller", 8)  # the batch was used to its end
    assert first.run_directory.info()["status"] == "interrupted"
    first.close()
    second = build(tmp_path, [JOINT], run=first.run_directory)
    assert second.resume()
    assert second.run() == 0
    assert comparable(second) == comparable(whole)
    assert torch.equal(second.workflow.layer.weight, whole.workflow.layer.weight)
    assert events(second) == ["resume"]


@pytest.mark.parametrize("checkpoint_every", [12, 1000])
def test_a_run_that_died_goes_on_exactly(tmp_path, checkpoint_every):
    """Also before its first checkpoint: it then starts over in the same directory."""
    whole = build(tmp_path, [JOINT], checkpoint_every=checkpoint_every)
    whole.run()
    first = build(tmp_path, [JOINT], checkpoint_every=checkpoint_every)

    class Killed(BaseException):
        pass

    def die(batch, *, phase):
        if int(batch.reward) == 15:
            raise Killed
        return first.workflow.update_world_model(batch, phase=phase)

    first._hooks["update_world_model"] = die
    with pytest.raises(Killed):
        first.run()
    first.close()
    second = build(tmp_path, [JOINT], run=first.run_directory, checkpoint_every=checkpoint_every)
    assert second.resume() is (checkpoint_every == 12)
    second.run()
    assert comparable(second) == comparable(whole)


def test_a_larger_budget_continues_a_completed_run(tmp_path):
    """Longer than planned equals planned longer."""
    whole = build(tmp_path, [JOINT], total=60)
    whole.run()
    first = build(tmp_path, [JOINT], total=40)
    first.run()
    first.close()
    second = build(tmp_path, [JOINT], total=60, run=first.run_directory)
    second.resume()
    second.run()
    assert comparable(second) == comparable(whole)


def test_an_error_leaves_the_run_failed(tmp_path):
    """run.json says what happened; the error goes on to the command line."""
    orchestrator = build(tmp_path, [JOINT])
    orchestrator._hooks["update_controller"] = lambda batch, *, phase: {}["missing"]
    with pytest.raises(KeyError):
        orchestrator.run()
    info = orchestrator.run_directory.info()
    assert (info["status"], info["error"]) == ("failed", "KeyError: 'missing'")


def test_a_full_disk_ends_the_run_with_one_message(tmp_path, monkeypatch):
    """Whichever file met it: the last checkpoint is named, and the run is failed."""
    orchestrator = build(tmp_path, [JOINT])

    def full(**row):
        if row["env_steps"] > 20:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(orchestrator.recorder.logger, "log", full)
    with pytest.raises(RLLabError, match=r"The disk is full.*step-12.*is safe.*resume_path"):
        orchestrator.run()
    assert orchestrator.run_directory.info()["status"] == "failed"


def test_a_full_disk_while_saving_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    """Training stops; what was saved before can be resumed."""
    orchestrator = build(tmp_path, [JOINT])
    orchestrator.context.data_sources["replay"].state_dict = _full_after(orchestrator, 20)
    with pytest.raises(CheckpointError, match="step 24 could not be written"):
        orchestrator.run()
    assert list(orchestrator.checkpoints.available()) == [12]
    assert orchestrator.run_directory.info()["status"] == "failed"


def _full_after(orchestrator: Orchestrator, env_steps: int) -> Any:
    source = orchestrator.context.data_sources["replay"]
    save = source.state_dict

    def state_dict(folder: Path) -> dict[str, Any]:
        if orchestrator.scheduler.env_steps > env_steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(folder)

    return state_dict


# Bad updates ----------------------------------------------------------------------------------------------------------


def test_a_nonfinite_loss_stops_the_run_and_says_where_it_began(tmp_path):
    """Which metric, which loss, which tensor, and the batch is kept."""
    orchestrator = build(tmp_path, [JOINT])
    orchestrator.workflow.bad_updates = {5}
    with pytest.raises(
        NonFiniteError, match=r"train/weight became NaN.*loss 'prediction'.*components\.layer \(Linear\)"
    ):
        orchestrator.run()
    saved = torch.load(orchestrator.run_directory.path / "nonfinite" / "batch-9.pt", weights_only=True)
    assert float(saved["reward"]) == 5.0
    assert orchestrator.run_directory.info()["status"] == "failed"


def test_skipped_updates_are_counted_and_left_out_of_the_means(tmp_path):
    """`skip` goes on; the other updates' metrics stay finite."""
    orchestrator = build(tmp_path, [JOINT], on_nonfinite="skip")
    orchestrator.workflow.bad_updates = {5}
    orchestrator.run()
    assert rows(orchestrator)[-2]["train/skipped_updates"] == 2  # both hooks of the batch
    assert all(row["train/weight"] is not None for row in rows(orchestrator) if "train/weight" in row)
    assert events(orchestrator) == ["nonfinite", "nonfinite"]


def test_a_run_that_skips_everything_does_not_fill_the_disk(tmp_path):
    """Ten bad batches are kept and explained; the others are only counted."""
    orchestrator = build(tmp_path, [JOINT], on_nonfinite="skip")
    orchestrator.workflow.bad_updates = set(range(100))
    orchestrator.run()
    assert orchestrator.guard.skipped == 40
    assert len(list((orchestrator.run_directory.path / "nonfinite").iterdir())) == 10


def test_rollback_goes_back_and_draws_other_batches(tmp_path):
    """From the last checkpoint, with a batch skipped, so that the bad one does not come again."""
    orchestrator = build(tmp_path, [JOINT], on_nonfinite="rollback")
    orchestrator.workflow.bad_updates = {8}
    seen = []
    sample = orchestrator.context.data_sources["replay"].sample

    def remember(spec):
        batch = sample(spec)
        seen.append(int(batch.reward))
        if len(seen) > 8:
            orchestrator.workflow.bad_updates = set()
        return batch

    orchestrator.context.data_sources["replay"].sample = remember
    assert orchestrator.run() == 0
    assert seen[:11] == [1, 2, 3, 4, 5, 6, 7, 8, 6, 7, 8]  # back to step 12 = 5 batches; batch 6 is thrown away
    assert events(orchestrator) == ["nonfinite", "rollback"]
    steps = [row["env_steps"] for row in rows(orchestrator)]
    assert steps == sorted(steps)


def test_rollbacks_end(tmp_path):
    """Three are tried; then the run stops."""
    orchestrator = build(tmp_path, [JOINT], on_nonfinite="rollback")
    orchestrator.workflow.bad_updates = set(range(8, 100))
    with pytest.raises(NonFiniteError, match="3 rollbacks did not help"):
        orchestrator.run()


# The best agent -------------------------------------------------------------------------------------------------------


def test_the_best_agent_plays_the_final_episodes_where_asked(tmp_path):
    """`evaluation.select: best` takes the weights of the best periodic evaluation, and plays fresh episodes."""
    phase = {**JOINT, "workflow_hooks": [*JOINT["workflow_hooks"], {"eval": {"every": 8}}]}
    orchestrator = build(tmp_path, [phase], best_metric="eval/return_mean", select="best")
    orchestrator.run()
    best = orchestrator.checkpoints.load(orchestrator.checkpoints.best(), agent_only=True)
    assert best.step == 40  # every evaluation scores alike here: of equals the latest is kept
    assert torch.equal(orchestrator.workflow.layer.weight, best.state["components"]["layer"]["weight"])


def test_the_last_line_names_the_agent_and_the_final_evaluation_shows_progress(tmp_path):
    """Which agent played, at which step it stood, and how far the episodes are."""
    phases = [{**JOINT, "workflow_hooks": [*JOINT["workflow_hooks"], {"eval": {"every": 20}}]}]
    orchestrator = build(tmp_path, phases, best_metric="eval/return_mean", select="best", final_episodes=4)
    console, shown = orchestrator.recorder.console, []
    console.message = console.activity = shown.append
    assert orchestrator.run() == 0
    assert "over 4 fresh episodes (best, step 40)" in shown[-1]
    assert "final evaluation, 4 of 4 episodes" in shown
    summary = json.loads(orchestrator.run_directory.summary_json.read_text())
    assert (summary["selected"], summary["selected_step"]) == ("best", 40)


@pytest.mark.parametrize("select", ["last", "best"])
def test_the_step_of_the_final_agent_counts_env_steps(tmp_path, select):
    """Checkpoints count the updates of phases that collect nothing as well; the line and the summary do not."""
    phases = [
        {"name": "fill", "type": "warmup", "duration_steps": 20},
        {"name": "fit", "type": "offline", "duration_updates": 7},
        {**JOINT, "workflow_hooks": [*JOINT["workflow_hooks"], {"eval": {"every": 20}}]},
    ]
    orchestrator = build(tmp_path, phases, best_metric="eval/return_mean", select=select)
    assert orchestrator.run() == 0
    summary = json.loads(orchestrator.run_directory.summary_json.read_text())
    assert orchestrator.clock > summary["env_steps"]
    assert summary["selected_step"] == summary["env_steps"] == 40


def test_a_picture_that_fails_does_not_fail_the_run(tmp_path):
    """The run is complete; what could not be drawn is an event."""
    orchestrator = build(tmp_path, [JOINT], total=8)
    orchestrator.on_complete = [lambda: 1 / 0]
    assert orchestrator.run() == 0
    assert events(orchestrator) == ["no_picture"]
    assert orchestrator.run_directory.info()["status"] == "completed"


def test_an_unknown_best_metric_is_named(tmp_path):
    """With the metrics that an evaluation has."""
    phase = {**JOINT, "workflow_hooks": ["collect", {"eval": {"every": 8}}]}
    with pytest.raises(ConfigError, match=r"checkpoint\.best is 'eval/score'.*eval/return_mean"):
        build(tmp_path, [phase], best_metric="eval/score").run()


def test_close_closes_everything(tmp_path):
    """Environments too."""
    orchestrator = build(tmp_path, [JOINT])
    orchestrator.close()
    envs = orchestrator.context.train_envs
    assert isinstance(envs, CountingEnvs)
    assert envs.closed


def test_a_long_hook_works_in_parts_and_counts_what_it_took(tmp_path):
    """A hook that is not finished is called again; its env steps and updates move the clock, so the run is saved."""
    phases = [{"type": "offline", "duration_cycles": 2, "workflow_hooks": ["distill"]}]
    orchestrator = build(tmp_path, phases, log_every=100)
    calls = []

    def distill(*, phase):
        calls.append(phase.name)
        finished = len(calls) % 3 == 0
        return HookResult(
            {"distilled": len(calls)}, env_steps=2, updates=int(finished), finished=finished, log=finished
        )

    orchestrator._hooks["distill"] = distill
    assert orchestrator.run() == 0
    assert len(calls) == 6
    assert (orchestrator.scheduler.env_steps, orchestrator.scheduler.updates) == (12, 2)
    logged = [row["workflow/distilled"] for row in rows(orchestrator) if "workflow/distilled" in row]
    assert logged == [2, 5]  # the mean of each finished whole
    orchestrator.close()
