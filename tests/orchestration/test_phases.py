"""Reading `training.phases`: both spellings load, and each mistake gets one message that names its place."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import yaml

from rl_lab.errors import ConfigError
from rl_lab.orchestration.phases import Amount, Hook, PhaseNames, Until, parse_phases

NAMES = PhaseNames(
    update_hooks=("update_world_model", "update_controller"),
    other_hooks=("distill",),
    data_sources=("replay", "dataset", "spare"),
    prefilled=("dataset",),
    roles=("random", "policy", "planner"),
    default_ratio=0.5,
)

BOTH_SPELLINGS = """
- name: fill
  type: warmup
  duration_steps: 5_000
  workflow_hooks: [collect]
  controller: random
- name: joint
  type: online
  duration: 10_000_updates
  buffer: replay
  workflow_hooks:
    - collect
    - world_model: {ratio: 0.5}
    - {name: controller, times: 2}
    - eval: {every: 10_000}
  until: {metric: eval/return_mean, at_least: 475, times: 2}
- name: distil
  type: offline
  duration: 5_cycles
  data_source: dataset
  workflow_hooks: [update_world_model, update_controller, distill]
- {name: plan, type: planner_only, duration: 100, controller_role: planner}
- {name: judge, type: eval_only, next: fill}
"""


def parse(*phases: Any, **changes: Any) -> Any:
    return parse_phases(list(phases), NAMES)


def test_all_types_durations_and_spellings_load():
    """Everything that the design names, in one curriculum."""
    fill, joint, distil, plan, judge = parse_phases(yaml.safe_load(BOTH_SPELLINGS), NAMES)
    assert (fill.type, fill.duration, fill.controller_role) == ("warmup", Amount(5000, "steps"), "random")
    assert joint.duration == Amount(10_000, "updates")
    assert joint.hooks == (
        Hook("collect", "collect"),
        Hook("update_world_model", "update", ratio=Fraction(1, 2)),
        Hook("update_controller", "update", times=2),
        Hook("evaluate", "evaluate", every=Amount(10_000, "steps")),
    )
    assert joint.until == Until("eval/return_mean", at_least=475.0, times=2)
    assert (distil.data_source, distil.duration, distil.collects) == ("dataset", Amount(5, "cycles"), False)
    assert (plan.duration, plan.controller_role, plan.hooks) == (
        Amount(100, "steps"),
        "planner",
        (Hook("collect", "collect"),),
    )
    assert (judge.hooks, judge.duration, judge.next) == ((Hook("evaluate", "evaluate"),), Amount(1, "cycles"), "fill")


@pytest.mark.parametrize("text", ["10000_updates", "10_000_updates", "10_000 updates", "1e4_updates", "10000_update"])
def test_the_short_form_of_a_duration(text):
    """A number and its unit, with or without grouping."""
    phase = parse({"duration": text})[0]
    assert phase.duration == Amount(10_000, "updates")


def test_phases_without_hooks_take_those_of_their_type():
    """Online collects and updates by the workflow's ratio; warm-up only collects; offline only updates."""
    online, warmup, offline = parse(
        {"name": "a", "duration": 10}, {"type": "warmup", "duration": 10}, {"type": "offline", "duration": "3_cycles"}
    )
    assert [hook.name for hook in online.hooks] == ["collect", "update_world_model", "update_controller"]
    assert online.hooks[1].ratio == Fraction(1, 2)
    assert [hook.name for hook in warmup.hooks] == ["collect"]
    assert [hook.name for hook in offline.hooks] == ["update_world_model", "update_controller"]


def test_a_bare_evaluate_follows_the_evaluation_settings():
    """`evaluate` after every vector step is never meant: evaluation.every is its frequency."""
    names = PhaseNames(update_hooks=("update",), evaluate_every=500)
    raw = [{"duration": 10, "workflow_hooks": ["collect", "update", "evaluate"]}]
    assert parse_phases(raw, names)[0].hooks[2].every == Amount(500, "steps")


def test_a_loop_may_fill_what_an_earlier_phase_samples():
    """Phases are a graph: what counts is whether data can arrive."""
    parse(
        {"name": "act", "duration": 5, "workflow_hooks": ["collect"], "next": "learn"},
        {"name": "rest", "type": "eval_only", "next": "end"},
        {"name": "learn", "type": "offline", "duration": "5_updates", "next": "act"},
    )


ONLINE = {"duration": 10}
BAD: dict[str, tuple[Any, str]] = {
    "no list": ({"duration": 5}, r"training\.phases is .*expected a list"),
    "empty": ([], r"training\.phases is \[\]"),
    "not a mapping": (["online"], r"training\.phases\[0\] is 'online'"),
    "unknown key": ([{**ONLINE, "workflow_hook": []}], r"\[0\]\.workflow_hook is not a key.*'workflow_hooks'"),
    "unknown type": ([{**ONLINE, "type": "onlin"}], r"\[0\]\.type is 'onlin'.*Did you mean 'online'"),
    "unknown hook": (
        [ONLINE | {"name": "a"}, {**ONLINE, "workflow_hooks": ["colect"]}],
        r"training\.phases\[1\]\.workflow_hooks\[0\] is 'colect'.*Did you mean 'collect'",
    ),
    "hook is a list": ([{**ONLINE, "workflow_hooks": [["collect"]]}], r"workflow_hooks\[0\] is"),
    "hooks not a list": ([{**ONLINE, "workflow_hooks": "collect"}], r"workflow_hooks is 'collect': expected a list"),
    "unknown frequency": ([{**ONLINE, "workflow_hooks": [{"collect": {"time": 2}}]}], r"\.time is not.*'times'"),
    "zero duration": ([{"duration_steps": 0}], r"\[0\]\.duration_steps is 0: expected a number above 0"),
    "negative duration": ([{"duration": -5}], r"\[0\]\.duration is -5"),
    "zero short form": ([{"duration": "0_updates"}], r"\.duration is 0: expected a number above 0"),
    "nonsense duration": ([{"duration": "soon"}], r"\.duration is 'soon': expected a number above 0 with a unit"),
    "fractional duration": ([{"duration_steps": 1.5}], r"duration_steps is 1\.5: expected a whole number"),
    "wrong unit": ([{"duration_steps": "5_updates"}], r"duration_steps is '5_updates': expected a number of steps"),
    "no duration": ([{"name": "a"}], r"\[0\] has no duration"),
    "two durations": ([{"duration": 5, "duration_steps": 5}], r"has duration and duration_steps: a phase has one"),
    "ratio on collect": (
        [{**ONLINE, "workflow_hooks": [{"collect": {"ratio": 2}}]}],
        r"hooks\[0\]: collect has ratio: 2",
    ),
    "every on collect": ([{**ONLINE, "workflow_hooks": [{"collect": {"every": 2}}]}], r"collect has every: 2"),
    "ratio on evaluate": (
        [{**ONLINE, "workflow_hooks": ["collect", {"eval": {"ratio": 2}}]}],
        r"evaluate has ratio: 2",
    ),
    "zero ratio": (
        [{**ONLINE, "workflow_hooks": ["collect", {"world_model": {"ratio": 0}}]}],
        r"\.ratio is 0: expected",
    ),
    "ratio offline": (
        [
            {
                "type": "offline",
                "duration": "5_cycles",
                "data_source": "dataset",
                "workflow_hooks": [{"controller": {"ratio": 1}}],
            }
        ],
        r"the phase never collects",
    ),
    "ratio and times": (
        [{**ONLINE, "workflow_hooks": ["collect", {"controller": {"ratio": 1, "times": 2}}]}],
        r"ratio together with times",
    ),
    "zero every": ([{**ONLINE, "workflow_hooks": ["collect", {"eval": {"every": 0}}]}], r"hooks\[1\]\.every is 0"),
    "negative times": ([{**ONLINE, "workflow_hooks": [{"name": "collect", "times": -1}]}], r"hooks\[0\]\.times is -1"),
    "zero repeat": ([{**ONLINE, "repeat": 0}], r"\[0\]\.repeat is 0"),
    "unknown source": ([{**ONLINE, "buffer": "repaly"}], r"data_source is 'repaly'.*Did you mean 'replay'"),
    "two spellings": (
        [{**ONLINE, "buffer": "replay", "data_source": "spare"}],
        r"both buffer: replay and data_source: spare",
    ),
    "unfilled source": (
        [
            {"duration": 5, "name": "a"},
            {"name": "b", "type": "offline", "duration": "5_updates", "data_source": "spare"},
        ],
        r"\[1\] \('b'\) samples from 'spare', which no phase fills",
    ),
    "filled too late": (
        [{"name": "b", "type": "offline", "duration": "5_updates"}, {"duration": 5, "name": "a"}],
        r"\[0\] \('b'\) samples from 'replay', which no phase fills before it",
    ),
    "unknown role": ([{**ONLINE, "controller": "polcy"}], r"\[0\]\.controller is 'polcy'.*Did you mean 'policy'"),
    "unknown next": ([{**ONLINE, "name": "main", "next": "mian"}], r"\[0\]\.next is 'mian'.*Did you mean 'main'"),
    "same name": ([{**ONLINE, "name": "a"}, {**ONLINE, "name": "a"}], r"\[1\]\.name is 'a', which .*\[0\] has already"),
    "reserved name": ([{**ONLINE, "name": "end"}], r"\[0\]\.name is 'end'"),
    "updates that never come": (
        [{"type": "warmup", "duration": "5_updates"}],
        r"has no update hook, so it would never end",
    ),
    "steps that never come": (
        [{"type": "offline", "duration": 5, "data_source": "dataset"}],
        r"never collects, so it would",
    ),
    "collect offline": (
        [{"type": "offline", "duration": "5_cycles", "workflow_hooks": ["collect"]}],
        r"does not collect",
    ),
    "online without collect": ([{**ONLINE, "workflow_hooks": ["world_model"]}], r"has no collect"),
    "update in eval_only": ([{"type": "eval_only", "workflow_hooks": ["world_model"]}], r"only evaluates"),
    "only waits": (
        [
            {
                "type": "offline",
                "duration": "5_updates",
                "data_source": "dataset",
                "workflow_hooks": [{"world_model": {"every": 5}}],
            }
        ],
        r"none would ever run",
    ),
    "endless loop": (
        [{"name": "a", "type": "offline", "duration": "5_updates", "data_source": "dataset", "next": "a"}],
        r"a loop by `next` in which no phase collects",
    ),
    "until without limit": ([{**ONLINE, "until": {"metric": "eval/return_mean"}}], r"\.until has no limit"),
    "until without metric": ([{**ONLINE, "until": {"at_least": 5}}], r"\.until is .*expected \{metric"),
    "until with a typo": ([{**ONLINE, "until": {"metric": "x", "at_leest": 5}}], r"at_leest is not.*'at_least'"),
    "until never seen": ([{**ONLINE, "until": {"metric": "eval/return_mean", "at_least": 5}}], r"never evaluates"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_named_with_its_place(case):
    """Each one stops the run before the first step: where, what was seen, what was expected."""
    raw, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        parse_phases(raw, NAMES)


def test_a_phase_without_hooks_makes_the_joint_update_once():
    """A workflow that also offers the parts of its update does not do them again by default."""
    names = PhaseNames(update_hooks=("update", "update_world_model", "update_controller"), default_ratio=0.5)
    (phase,) = parse_phases(None, names)
    assert [hook.name for hook in phase.hooks if hook.kind == "update"] == ["update"]
    fill = {"name": "fill", "type": "warmup", "duration_steps": 10}
    _, offline = parse_phases([fill, {"name": "fit", "type": "offline", "duration_updates": 3}], names)
    assert [hook.name for hook in offline.hooks] == ["update"]
