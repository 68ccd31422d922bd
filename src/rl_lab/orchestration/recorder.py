"""The record of a run while it goes on: rows of metrics, the console's line, events, and the clocks behind them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl_lab import ranks
from rl_lab.metrics.accumulator import MetricAccumulator
from rl_lab.metrics.console import RunConsole, RunStatus
from rl_lab.metrics.logger import DAMAGED, MetricsLogger
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.orchestration.scheduler import PhaseScheduler
from rl_lab.records import EpisodeSummary

HEARTBEAT_EVERY_S = 10.0
RESTART_EVENT = "worker_restart"
SUMS = ("episodes", "worker_restarts", "returns", "lengths", "new_episodes")  # added up over the ranks


class Recorder:
    """Collects between two rows, writes them, and shows where the run stands."""

    def __init__(
        self,
        *,
        run: RunDirectory,
        logger: MetricsLogger,
        console: RunConsole,
        scheduler: PhaseScheduler,
        action_repeat: int = 1,
    ) -> None:
        self.run, self.logger, self.console, self._scheduler = run, logger, console, scheduler
        self._action_repeat = action_repeat
        self.accumulator = MetricAccumulator()
        self.episodes = 0
        self.worker_restarts = 0
        self._untold: list[tuple[str, str]] = []  # events of this rank, until the first one writes a row
        self._returns = self._lengths = 0.0
        self._new_episodes = 0
        self._last_return: float | None = None
        self._wall_before = 0.0  # spent by earlier processes of this run
        self._started = time.monotonic()
        self._row_mark = self._rate_mark = (self._started, 0, 0)  # time, env steps, updates
        self._next_heartbeat = self._started
        self._last_row: tuple[int, int] | None = None  # env steps and updates that it counted
        self._rates: tuple[float | None, float | None] = (None, None)

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken, over all its processes."""
        return self._wall_before + time.monotonic() - self._started

    @property
    def has_news(self) -> bool:
        """Whether anything was done since the last row of `row`."""
        return self._last_row != (self._scheduler.env_steps, self._scheduler.updates)

    # Collecting -------------------------------------------------------------------------------------------------------

    def finished_episodes(self, episodes: Iterable[EpisodeSummary]) -> None:
        for episode in episodes:
            self._returns += episode.episode_return
            self._lengths += episode.length
            self._new_episodes += 1
            self.episodes += 1
            self._last_return = episode.episode_return

    def environment_events(self, events: Iterable[Mapping[str, str]]) -> None:
        """Worker restarts and the like, as the environments report them."""
        for event in events:
            self.worker_restarts += event["kind"] == RESTART_EVENT
            if ranks.is_first():
                self.event(event["kind"], event["message"])
            else:
                self._untold.append((event["kind"], f"rank {ranks.rank()}: {event['message']}"))

    def event(self, kind: str, message: str) -> None:
        """Note something that happened to the run, and say it."""
        self.run.event(kind, message, self._scheduler.env_steps)
        self.console.message(f"{kind}: {message}")

    # Rows -------------------------------------------------------------------------------------------------------------

    def row(self, extra: Mapping[str, float]) -> dict[str, float]:
        """Write what came together since the last row; the values that went into it."""
        scheduler, now = self._scheduler, time.monotonic()
        values = mean_over_ranks(self.accumulator.flush())
        values.update(extra)
        sums = [self.episodes, self.worker_restarts, self._new_episodes, self._returns, self._lengths]
        episodes, restarts, new, returns, lengths = (sum(share) for share in zip(*ranks.collected(sums), strict=True))
        for untold in ranks.collected(self._untold):
            for kind, message in untold:
                self.event(kind, message)
        self._untold = []
        values["collect/episodes"] = episodes
        values["collect/frames"] = scheduler.env_steps * self._action_repeat
        values["collect/worker_restarts"] = restarts
        if new:
            values["collect/episode_return"] = returns / new
            values["collect/episode_length"] = lengths / new
        values.update({f"phase/{name}": count for name, count in scheduler.phase_counts().items()})
        since, env_steps, updates = self._row_mark
        seconds = max(now - since, 1e-9)
        values["time/env_steps_per_s"] = (scheduler.env_steps - env_steps) / seconds
        values["time/updates_per_s"] = (scheduler.updates - updates) / seconds
        values["time/minutes"] = self.wall_s / 60.0  # `wall_s` for a phase's `until`
        values = ranks.shared(values)
        self._row_mark = (now, scheduler.env_steps, scheduler.updates)
        self._last_row = (scheduler.env_steps, scheduler.updates)
        self._returns = self._lengths = 0.0
        self._new_episodes = 0
        self.write(values)
        return values

    def write(self, values: Mapping[str, float]) -> None:
        """One row with these values, as of now."""
        scheduler = self._scheduler
        self.logger.log(
            env_steps=scheduler.env_steps,
            updates=scheduler.updates,
            wall_s=self.wall_s,
            phase=scheduler.current_phase().name,
            values=values,
        )

    # The console ------------------------------------------------------------------------------------------------------

    def show(self, activity: str, now: float) -> None:
        """Renew the status line, and now and then the heartbeat."""
        scheduler = self._scheduler
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_EVERY_S
            done = {"env_steps": scheduler.env_steps, "updates": scheduler.updates}
            self.run.heartbeat({**done, "phase": scheduler.current_phase().name, "activity": activity})
        since, env_steps, updates = self._rate_mark
        if now - since >= 2.0:
            seconds = now - since
            self._rates = ((scheduler.env_steps - env_steps) / seconds, (scheduler.updates - updates) / seconds)
            self._rate_mark = (now, scheduler.env_steps, scheduler.updates)
        waiting = scheduler.waiting_for
        progress = scheduler.progress()
        self.console.status(
            RunStatus(
                phase=scheduler.current_phase().name,
                activity=f"waiting for {waiting} to fill" if waiting else activity,
                env_steps=scheduler.env_steps,
                total=scheduler.total_timesteps or None,
                updates=scheduler.updates,
                env_steps_per_s=self._rates[0],
                updates_per_s=self._rates[1],
                last_return=self._last_return,
                eta_s=self._time_left(),
                progress=progress,
            )
        )

    def _time_left(self) -> float | None:
        """By env steps while the phase collects, else by the updates that the phase has left."""
        scheduler = self._scheduler
        env_rate, update_rate = self._rates
        if scheduler.current_phase().collects:
            return (scheduler.total_timesteps - scheduler.env_steps) / env_rate if env_rate else None
        left = scheduler.updates_left()
        return left / update_rate if left is not None and update_rate else None

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "accumulator": self.accumulator.state_dict(),
            "episodes": self.episodes,
            "worker_restarts": self.worker_restarts,
            "returns": self._returns,
            "lengths": self._lengths,
            "new_episodes": self._new_episodes,
            "last_return": self._last_return,
            "last_row": self._last_row,
            "wall_s": self.wall_s,
            "metrics_position": self.logger.position(),
            "metrics_checksum": self.logger.checksum,
            "events_position": self.run.events_position(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, keep_wall: bool = False) -> None:
        """Restore, and forget the rows that were written after the checkpoint. `keep_wall`: time goes on (rollback)."""
        self.accumulator.load_state_dict(state["accumulator"])
        self.episodes, self.worker_restarts = state["episodes"], state["worker_restarts"]
        self._returns, self._lengths = state["returns"], state["lengths"]
        self._new_episodes, self._last_return = state["new_episodes"], state["last_return"]
        last_row = state.get("last_row")
        self._last_row = (last_row[0], last_row[1]) if last_row is not None else None
        damage = self.logger.truncate(state["metrics_position"], state.get("metrics_checksum"))
        if not keep_wall:
            self._wall_before, self._started = state["wall_s"], time.monotonic()
            self.run.truncate_events(state["events_position"])
        if damage is not None:
            self.event("damaged", f"{damage}. The run goes on; what was found is kept as {DAMAGED}.")
        now = time.monotonic()
        self._row_mark = self._rate_mark = (now, self._scheduler.env_steps, self._scheduler.updates)


def dealt_sums(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One recorder's state, from the `states` that another number of ranks saved: the first rank takes over all sums,
    the others begin at 0."""
    sums = {name: sum(state[name] for state in states) if ranks.is_first() else 0 for name in SUMS}
    return {**states[0], **sums}


def mean_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Each metric's mean over the ranks that have it."""
    if ranks.count() == 1:
        return values
    shares = ranks.collected(values)
    names = dict.fromkeys(name for share in shares for name in share)
    known = {name: [share[name] for share in shares if name in share] for name in names}
    return {name: sum(found) / len(found) for name, found in known.items()}
