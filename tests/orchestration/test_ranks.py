"""What one rank of several does about what another one heard or saw. The other one is played by a stand-in."""

from __future__ import annotations

from typing import Any

import pytest
from orchestration_toys import build

from rl_lab import ranks
from rl_lab.orchestration.orchestrator import AGREE_EVERY

COLLECT = [{"name": "c", "type": "online", "duration_steps": 400, "workflow_hooks": ["collect"]}]
LEARN = [
    {
        "name": "t",
        "type": "online",
        "duration_steps": 24,
        "data_source": "replay",
        "workflow_hooks": ["collect", "update_world_model"],
    }
]


@pytest.fixture
def second_rank(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """There is another rank; what it answers is patched in by the test."""
    monkeypatch.setattr(ranks, "count", lambda: 2)
    monkeypatch.setattr("rl_lab.metrics.report.write_report", lambda folder: folder / "report.html")
    return monkeypatch


def test_ranks_stop_at_the_same_action(tmp_path: Any, second_rank: pytest.MonkeyPatch) -> None:
    """A rank that was told to stop goes on until all look at it together; one that was not told stops there too."""
    stopped = []
    for heard_here, heard_there in [(15, 0), (0, 15)]:
        second_rank.setattr(ranks, "highest", lambda value, there=heard_there: max(value, float(there)))
        orchestrator = build(tmp_path / str(heard_here), COLLECT, total=400, log_every=1000, checkpoint_every=1000)
        orchestrator.signal.received = heard_here or None
        assert orchestrator.run() == 143
        stopped.append(orchestrator.workflow.calls.count("collect"))  # type: ignore[attr-defined]
    assert stopped == [AGREE_EVERY - 1] * 2


@pytest.mark.parametrize(("policy", "skipped"), [("skip", 3), ("stop", 0)])
def test_a_loss_of_another_rank_that_is_not_finite_is_left_out_here_too(
    tmp_path: Any, second_rank: pytest.MonkeyPatch, policy: str, skipped: int
) -> None:
    """Else one rank would go back alone. Where the run stops, the other rank ends this one."""
    told = ["weight", None, "weight", "weight"]

    def collected(value: Any) -> list[Any]:
        is_name = value is None or isinstance(value, str)
        return [value, told.pop() if told else None] if is_name else [value]

    second_rank.setattr(ranks, "collected", collected)
    orchestrator = build(tmp_path, LEARN, total=24, on_nonfinite=policy)
    assert orchestrator.run() == 0
    assert orchestrator.guard.skipped == skipped
