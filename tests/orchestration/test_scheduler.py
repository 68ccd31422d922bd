"""The scheduler: what comes next, exactly, whatever happens in between. No torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from rl_lab.errors import CheckpointError, ConfigError, DataError
from rl_lab.orchestration.phases import PhaseNames, parse_phases
from rl_lab.orchestration.scheduler import Action, PhaseScheduler

NAMES = PhaseNames(
    update_hooks=("update_world_model", "update_controller"),
    other_hooks=("distill",),
    data_sources=("replay", "other"),
    prefilled=("other",),
    roles=("random", "policy", "planner"),
)


def make(phases: list[dict[str, Any]] | dict[str, Any], total: int = 10**6, **options: Any) -> PhaseScheduler:
    phases = [phases] if isinstance(phases, dict) else phases
    return PhaseScheduler(parse_phases(phases, NAMES), total, **options)


def do(scheduler: PhaseScheduler, envs: int = 1) -> Action | None:
    """One action, done."""
    action = scheduler.next_action()
    if action is not None:
        scheduler.advance(action, steps=envs * (action.kind == "collect"), updates=int(action.kind == "update"))
    return action


def trace(scheduler: PhaseScheduler, limit: int = 100_000, envs: int = 1) -> list[str]:
    """The hooks until the end, at most `limit`."""
    hooks = []
    while len(hooks) < limit and (action := do(scheduler, envs)) is not None:
        hooks.append(action.hook)
    return hooks


def test_hooks_run_in_order_within_a_cycle():
    """A cycle is the list of hooks, in the order of the file."""
    scheduler = make({"duration_cycles": 2, "workflow_hooks": ["collect", "world_model", "distill", "eval"]})
    assert trace(scheduler) == ["collect", "update_world_model", "distill", "evaluate"] * 2


def test_times_repeats_a_hook_in_each_cycle():
    """`times: 3` is three in a row."""
    scheduler = make({"duration_cycles": 2, "workflow_hooks": [{"collect": {"times": 3}}, "distill"]})
    assert trace(scheduler) == ["collect", "collect", "collect", "distill"] * 2


def test_consecutive_updates_are_interleaved_and_share_a_batch_per_pass():
    """Pass r runs each hook that is still due, on one batch."""
    hooks = ["collect", {"world_model": {"times": 3}}, {"controller": {"times": 2}}]
    scheduler = make({"duration_cycles": 1, "workflow_hooks": hooks})
    seen = []
    while (action := do(scheduler)) is not None:
        if action.kind == "update":
            seen.append((action.hook.removeprefix("update_"), action.new_batch, action.batch_index))
    assert seen == [
        ("world_model", True, 0),
        ("controller", False, 0),
        ("world_model", True, 1),
        ("controller", False, 1),
        ("world_model", True, 2),
    ]


@pytest.mark.parametrize(("ratio", "envs"), [(0.5, 1), (0.3, 8), (1 / 3, 4), (2.7, 3), (512 / 1024, 16), (0.1, 1)])
def test_ratio_is_exact_over_a_long_run(ratio, envs):
    """Fractions add up: after n env steps, floor(ratio × n) updates were made, at every moment."""
    scheduler = make({"duration_steps": 3000, "workflow_hooks": ["collect", {"world_model": {"ratio": ratio}}]})
    while (action := do(scheduler, envs)) is not None:
        following = scheduler.next_action()
        if following is None or following.kind == "collect":
            assert scheduler.updates == int(ratio * scheduler.env_steps + 1e-6), action
    assert scheduler.env_steps >= 3000


def test_steps_without_data_count_for_nothing():
    """No burst of updates makes up for the time in which the source was not ready."""
    ready = False
    scheduler = make(
        {"duration_steps": 400, "workflow_hooks": ["collect", {"world_model": {"ratio": 0.5}}]},
        ready=lambda name: ready,
    )
    for _ in range(100):
        assert do(scheduler, 2).kind == "collect"
    scheduler.next_action()
    assert scheduler.waiting_for == "replay"
    ready = True
    assert Counter(trace(scheduler, envs=2)) == {"collect": 100, "update_world_model": 100}
    assert scheduler.waiting_for is None


def test_a_warmup_phase_leaves_no_debt_to_the_next():
    """Env steps of one phase are not counted by the ratio of another."""
    scheduler = make(
        [
            {"name": "fill", "type": "warmup", "duration_steps": 100, "controller": "random"},
            {"name": "main", "duration_steps": 10, "workflow_hooks": ["collect", {"world_model": {"ratio": 1}}]},
        ]
    )
    assert Counter(trace(scheduler)) == {"collect": 110, "update_world_model": 10}


def test_a_stream_that_runs_dry_ends_its_updates():
    """Readiness is asked again for each further batch."""
    left = [2]
    scheduler = make(
        {"duration_cycles": 1, "workflow_hooks": ["collect", {"world_model": {"times": 5}}]},
        ready=lambda name: left[0] > 0,
    )
    done = []
    while (action := do(scheduler)) is not None:
        done.append(action.hook)
        left[0] -= action.new_batch
    assert done == ["collect", "update_world_model", "update_world_model"]


def test_an_offline_phase_without_data_is_an_error_not_a_hang():
    """A phase that collects nothing would wait for ever for its records."""
    scheduler = make({"type": "offline", "duration_updates": 5, "data_source": "other"}, ready=lambda name: False)
    with pytest.raises(DataError, match="collects none"):
        scheduler.next_action()


def test_every_counts_env_steps_where_the_phase_collects():
    """`every: 10` fires once at 10, 20, … and never twice for one passing."""
    scheduler = make({"duration_steps": 100, "workflow_hooks": ["collect", {"eval": {"every": 10}}]})
    at = []
    while (action := do(scheduler, 4)) is not None:
        if action.kind == "evaluate":
            at.append(scheduler.env_steps)
    assert at == [12, 20, 32, 40, 52, 60, 72, 80, 92, 100]


def test_every_counts_updates_elsewhere_and_takes_units():
    """Offline, a bare number is updates; a text names its unit."""
    hooks = ["world_model", {"distill": {"every": 4}}, {"eval": {"every": "5_cycles", "times": 2}}]
    scheduler = make({"type": "offline", "duration_updates": 10, "data_source": "other", "workflow_hooks": hooks})
    update, own, evaluation = "update_world_model", "distill", "evaluate"
    first = [update] * 4 + [own, update] + [evaluation] * 2
    assert trace(scheduler) == [*first, update, update, update, own, update, update] + [evaluation] * 2


def test_every_with_times_makes_a_block_of_updates():
    """Collect for 100 env steps, then 20 updates: both belong to one hook."""
    scheduler = make(
        {"duration_steps": 200, "workflow_hooks": ["collect", {"world_model": {"every": 100, "times": 20}}]}
    )
    assert trace(scheduler) == (["collect"] * 100 + ["update_world_model"] * 20) * 2


@pytest.mark.parametrize(
    ("duration", "collects"),
    [("10_steps", 10), ("7_updates", 7), ("5_cycles", 5), (12, 12), ({"duration_steps": 9}, 9)],
)
def test_durations_and_their_short_form(duration, collects):
    """Three durations, written either way; a bare number is env steps."""
    given = duration if isinstance(duration, dict) else {"duration": duration}
    scheduler = make({**given, "workflow_hooks": ["collect", {"world_model": {"times": 1}}]})
    assert trace(scheduler).count("collect") == collects


def test_updates_end_with_the_budget_within_a_cycle():
    """A phase of 10 updates makes 10, not the next full cycle's."""
    scheduler = make({"duration_updates": 10, "workflow_hooks": ["collect", {"world_model": {"times": 4}}]})
    assert Counter(trace(scheduler)) == {"collect": 3, "update_world_model": 10}


def test_total_timesteps_caps_all_phases_but_later_work_without_env_steps_still_runs():
    """The cap ends collection everywhere; an evaluation at the end is still made."""
    scheduler = make(
        [
            {"name": "a", "duration_steps": 100, "workflow_hooks": [{"collect": {"times": 10}}, "distill"]},
            {"name": "b", "duration_steps": 100, "workflow_hooks": ["collect"]},
            {"name": "c", "type": "eval_only"},
        ],
        total=25,
    )
    assert Counter(trace(scheduler)) == {"collect": 25, "distill": 3, "evaluate": 1}


def test_repeat_runs_a_phase_several_times_in_a_row():
    """`repeat: 3` is three times the duration, with the phase's own start each time."""
    scheduler = make(
        [
            {"name": "a", "duration_steps": 2, "repeat": 3, "workflow_hooks": ["collect", {"eval": {"every": 3}}]},
            {"name": "b", "duration_cycles": 1, "workflow_hooks": ["collect", "distill"]},
        ]
    )
    assert trace(scheduler) == ["collect"] * 3 + ["evaluate"] + ["collect"] * 3 + ["evaluate", "collect", "distill"]


def test_next_loops_until_the_env_steps_are_used_up():
    """A jump back makes a loop; total_timesteps ends it."""
    scheduler = make(
        [
            {"name": "act", "duration_steps": 5, "workflow_hooks": ["collect"]},
            {"name": "learn", "type": "offline", "duration_updates": 2, "next": "act"},
        ],
        total=15,
    )
    hooks = trace(scheduler)
    assert hooks == (["collect"] * 5 + ["update_world_model", "update_controller"]) * 3


def test_next_end_ends_the_run():
    """The reserved target `end` leaves the phases behind it out."""
    scheduler = make(
        [
            {"name": "a", "duration_steps": 2, "workflow_hooks": ["collect"], "next": "end"},
            {"name": "b", "duration_steps": 2, "workflow_hooks": ["collect"]},
        ]
    )
    assert trace(scheduler) == ["collect"] * 2


def _until(**condition: Any) -> PhaseScheduler:
    return make(
        [
            {
                "name": "a",
                "duration_steps": 1000,
                "workflow_hooks": ["collect", "eval"],
                "until": {"metric": "eval/return_mean", **condition},
            },
            {"name": "b", "duration_cycles": 1, "workflow_hooks": ["collect", "distill"]},
            {"name": "c", "duration_cycles": 1, "workflow_hooks": ["collect"]},
        ]
    )


def _show(scheduler: PhaseScheduler, values: list[float]) -> None:
    for value in values:
        while do(scheduler).kind != "evaluate":
            pass
        scheduler.observe({"eval/return_mean": value})
        scheduler.observe({"train/loss": 1e9})  # other metrics do not interrupt the streak


def test_until_needs_its_condition_several_times_in_a_row():
    """One good evaluation between bad ones does not end the phase; two in a row do, at the end of the cycle."""
    scheduler = _until(at_least=475, times=2)
    _show(scheduler, [480, 100, 480])
    assert scheduler.next_action().phase.name == "a"
    _show(scheduler, [475])
    assert trace(scheduler) == ["collect", "distill", "collect"]


def test_until_takes_an_upper_limit_and_a_target_of_its_own():
    """`at_most` with `next` inside the condition jumps only when it holds."""
    scheduler = _until(at_most=0.5, next="c")
    _show(scheduler, [0.6, 0.4])
    assert scheduler.next_action().phase.name == "c"


def test_jump_goes_to_a_phase_at_once_and_leaves_the_current_one_alone():
    """plan_phase may name the phase that runs already."""
    scheduler = _until(at_least=1)
    do(scheduler)
    scheduler.jump("a")
    assert scheduler.next_action().hook == "evaluate"
    scheduler.jump("c")
    assert trace(scheduler) == ["collect"]
    with pytest.raises(ConfigError, match="plan_phase chose 'nowhere'"):
        scheduler.jump("nowhere")


RICH = [
    {"name": "fill", "type": "warmup", "duration_steps": 6, "controller": "random"},
    {
        "name": "act",
        "duration_steps": 9,
        "repeat": 2,
        "workflow_hooks": [
            {"collect": {"times": 2}},
            {"world_model": {"ratio": 0.7}},
            {"controller": {"times": 1}},
            {"eval": {"every": 4}},
            "distill",
        ],
    },
    {"name": "learn", "type": "offline", "duration_updates": 3, "next": "act"},
]


def test_state_restored_at_every_point_continues_exactly():
    """A scheduler saved through JSON at any moment, asked or not, goes on as if nothing had happened."""
    whole = trace(make(RICH, total=60), envs=3)
    assert len(whole) > 60
    for point in range(len(whole)):
        first = make(RICH, total=60)
        head = trace(first, point, envs=3)
        if point % 2:
            first.next_action()  # asking changes nothing
        second = make(RICH, total=60)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert head + trace(second, envs=3) == whole


def test_a_finished_run_goes_on_when_its_budget_grows():
    """Resuming with a larger total_timesteps continues the phase that was cut short."""
    longer = trace(make(RICH, total=90), envs=3)
    first = make(RICH, total=30)
    trace(first, envs=3)
    assert first.next_action() is None
    second = make(RICH, total=90)
    second.load_state_dict(first.state_dict())
    rest = trace(second, envs=3)
    assert rest.count("collect") == longer.count("collect") - 10
    third = make(RICH, total=30)
    third.load_state_dict(first.state_dict())
    assert third.next_action() is None


def test_state_of_other_phases_is_refused():
    """A checkpoint made with another curriculum does not load silently."""
    state = make(RICH).state_dict()
    with pytest.raises(CheckpointError, match="made with other phases"):
        make(RICH[:2]).load_state_dict(state)


def test_the_implicit_phase_collects_updates_and_evaluates():
    """Without training.phases there is one online phase on the replay source."""
    names = PhaseNames(update_hooks=("update",), default_ratio=0.25, evaluate_every=8)
    scheduler = PhaseScheduler(parse_phases(None, names), 16)
    assert Counter(trace(scheduler)) == {"collect": 16, "update": 4, "evaluate": 2}
    assert scheduler.current_phase().data_source == "replay"


def test_phases_and_scheduler_do_not_import_torch():
    """Checking a curriculum must be instant."""
    code = "import rl_lab.orchestration.phases, rl_lab.orchestration.scheduler, rl_lab.orchestration.run_directory, sys"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
