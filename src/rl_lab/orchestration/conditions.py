"""Metrics that a phase's `until` may wait for, and the discovery that nothing writes the one it waits for."""

from __future__ import annotations

from collections.abc import Mapping

from rl_lab.errors import ConfigError, nearest
from rl_lab.orchestration.phase_records import Phase

RECORDED = (
    *(f"eval/{name}" for name in ("return_mean", "return_std", "return_min", "return_max", "length_mean", "episodes")),
    *(f"collect/{name}" for name in ("episodes", "frames", "worker_restarts", "episode_return", "episode_length")),
    *(f"phase/{name}" for name in ("index", "steps", "updates", "cycles")),
    *(f"time/{name}" for name in ("env_steps_per_s", "updates_per_s", "minutes")),
)
SHARES = "eval/share_"  # of episodes that ended with a flag of `info` set: known once one has ended
LEARNED = ("train/", "controller/", "workflow/")  # what the workflow's hooks return: known once they have run
PATIENCE = 5  # rows with learned metrics, the awaited one not among them


def check_metric(metric: str, place: str) -> None:
    """Refuse a metric that no run writes."""
    if metric not in RECORDED and not metric.startswith((*LEARNED, SHARES)):
        raise ConfigError(
            f"{place}.metric is '{metric}', which nothing writes: it would never be met.{nearest(metric, RECORDED)} The"
            f" workflow's own begin with {', '.join(LEARNED)}."
        )


class ConditionWatch:
    """Looks at the rows of a run for the metric that the phase's condition waits for."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._without = 0

    def look(self, phase: Phase, values: Mapping[str, float]) -> None:
        """Stop the run where its updates have returned metrics for a while, and never the one that is awaited."""
        learned = [name for name in values if name.startswith(LEARNED)]
        self._seen.update(learned)
        metric = phase.until.metric if phase.until is not None else None
        if metric is not None and metric.startswith(SHARES):
            self._look_for_share(phase.name, metric, values)
            return
        if metric is None or metric in RECORDED or metric in self._seen:
            self._without = 0
            return
        self._without += bool(learned)
        if self._without >= PATIENCE:
            hint = nearest(metric, self._seen)
            raise ConfigError(f"Phase '{phase.name}' waits for '{metric}', which its updates do not report.{hint}")

    def _look_for_share(self, phase: str, metric: str, values: Mapping[str, float]) -> None:
        shares = [name for name in values if name.startswith("eval/")]
        if shares and metric not in shares:
            raise ConfigError(
                f"Phase '{phase}' waits for '{metric}', which its evaluations do not report.{nearest(metric, shares)}"
            )
