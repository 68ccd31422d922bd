"""The loop: asks the scheduler what to do, has it done, routes data, logs, evaluates, saves. It computes no loss."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from rl_lab import ranks
from rl_lab.data_sources.base import DataSource
from rl_lab.errors import ConfigError, RLLabError
from rl_lab.metrics.console import RunConsole
from rl_lab.metrics.logger import MetricsLogger
from rl_lab.metrics.values import Metrics
from rl_lab.orchestration.checkpoint import Checkpoint, CheckpointManager
from rl_lab.orchestration.completion import complete
from rl_lab.orchestration.conditions import ConditionWatch
from rl_lab.orchestration.files import NO_ROOM
from rl_lab.orchestration.nonfinite import NonFiniteGuard, Policy, first_bad, nonfinite_parameter
from rl_lab.orchestration.periodic_evaluation import EvalEnvsFactory, PeriodicEvaluation
from rl_lab.orchestration.phase_records import Phase
from rl_lab.orchestration.recorder import Recorder
from rl_lab.orchestration.recovery import resume, roll_back
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.orchestration.run_state import fitting, gather_state, restore_state
from rl_lab.orchestration.scheduler import Action, PhaseScheduler
from rl_lab.orchestration.signals import StopSignal
from rl_lab.records import Batch, BatchSpec, CollectResult
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import HookResult, PhaseView, WorkflowContext

_PREFIXES = {"update_controller": "controller", "distill": "controller"}  # the metrics of other updates go under train/
STATUS_EVERY_S = 0.25
AGREE_EVERY = 16  # actions between two looks at whether another rank was told to stop
_DURING_STEPS = ("collect", "update")  # what may happen while the environments are at a step (training.overlap)
_ACTIVITY = {"collect": "collecting", "update": "updating", "evaluate": "evaluating"}


class Collects(Protocol):
    """Who takes the decisions in the training environments: the workflow, or collectors elsewhere."""

    def collect_step(self, step: int, *, phase: PhaseView) -> CollectResult | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The loop's share of the configuration."""

    total_timesteps: int
    log_every: int = 500  # env steps (updates in phases that collect nothing)
    checkpoint_every: int = 10_000
    episodes: int = 10  # of one evaluation
    final_episodes: int | None = None  # None: as many as of any other
    video: bool = False  # of one final episode
    on_nonfinite: Policy = "stop"
    best_metric: str | None = None  # checkpoint.best: keep the agent whose evaluation was highest in this
    select: Literal["last", "best"] = "last"  # evaluation.select: which agent plays the final episodes
    controller: str | None = None  # evaluation.controller: the role that plays evaluations; None: the agent itself


class Orchestrator:
    """One run, from its first action to its report."""

    def __init__(
        self,
        *,
        workflow: Workflow,
        context: WorkflowContext,
        phases: Sequence[Phase],
        settings: LoopSettings,
        run: RunDirectory,
        logger: MetricsLogger,
        console: RunConsole,
        checkpoints: CheckpointManager,
        eval_envs: EvalEnvsFactory,
        on_complete: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.workflow, self.context, self.settings, self.run_directory = workflow, context, settings, run
        self.checkpoints, self.on_complete = checkpoints, on_complete
        self.scheduler = PhaseScheduler(phases, settings.total_timesteps, ready=self._source_ready)
        repeat = context.train_envs.action_repeat if context.train_envs is not None else 1
        self.recorder = Recorder(
            run=run, logger=logger, console=console, scheduler=self.scheduler, action_repeat=repeat
        )
        self.guard = NonFiniteGuard(policy=settings.on_nonfinite, run=run, workflow=workflow)
        self.signal = StopSignal()
        self.collects: Collects = workflow
        self.evaluation = PeriodicEvaluation(self, eval_envs)
        self._views = {phase.name: _view(phase) for phase in phases}
        specs = {phase.name: workflow.phase_batch_spec(self._views[phase.name]) for phase in phases}
        self.batch_specs = {name: None if spec is None else ranks_share(spec) for name, spec in specs.items()}
        if any(phase.updates and self.batch_specs[phase.name] is None for phase in phases):
            raise ConfigError(
                f"The workflow '{workflow.name}' has update hooks in its phases but states no batch_spec."
            )
        self._hooks: dict[str, Callable[..., Any]] = {
            hook.name: getattr(workflow, hook.name)
            for phase in phases
            for hook in phase.hooks
            if hook.kind in ("update", "own")
        }
        if context.overlap:
            self._check_overlap(phases)
        self._flight: str | None = None  # the phase that began the step which the environments are at
        self._plans_phases = type(workflow).plan_phase is not Workflow.plan_phase
        self.modules = {
            name: part
            for name, part in [*context.components.items(), *context.controllers.items()]
            if isinstance(part, nn.Module)
        }
        self._checks_each_update = context.device.type == "cpu"  # elsewhere a check would wait for the device
        self._batch: Batch | None = None
        self._watch = ConditionWatch()
        self._shares = ranks.count()  # every rank collects and learns from one share
        self._passes, self._heard = 0, 0  # `_heard`: the signal that all ranks know of
        self.gone_back_to: set[str] = set()  # checkpoints that rollbacks have tried
        # The clock counts env steps, and updates in phases that collect nothing: what logs and checkpoints go by.
        self.clock = 0
        self._next_log, self._next_checkpoint = settings.log_every, settings.checkpoint_every
        self._next_due = min(self._next_log, self._next_checkpoint)

    # Running ----------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Go on until the run is complete (0) or a signal stops it (130, 143). Errors leave the run `failed`."""
        run = self.run_directory
        with self.signal:
            try:
                self._loop()
                while self.save() is None:  # it went back to an earlier checkpoint
                    self._loop()
                completed = not self._stopped and complete(self)
            except KeyboardInterrupt:  # a second Ctrl-C: at once, without a checkpoint
                run.finish("interrupted", "stopped at once; the last checkpoint stands")
                return 130
            except BaseException as error:
                run.finish("failed", f"{type(error).__name__}: {error}")
                if isinstance(error, OSError) and error.errno in NO_ROOM:
                    raise self._disk_full(error) from error
                raise
            if completed:
                return 0
            if self.evaluation.pruned is not None:
                run.finish("interrupted", self.evaluation.pruned, pruned=True)
                self.recorder.console.message(f"The run was {self.evaluation.pruned}.")
                return 0
            run.finish("interrupted")
            self.recorder.console.message(
                f"Interrupted and saved. Go on with: rl-lab train training.resume_path={run.path}"
            )
            return 128 + (self.signal.received or self._heard)

    @property
    def _stopped(self) -> bool:
        heard = self.signal.received if self._shares == 1 else self._heard
        return bool(heard) or self.evaluation.pruned is not None

    @property
    def learns_nothing(self) -> bool:
        """Whether the run was to learn and has made no update."""
        return self.scheduler.updates == 0 and any(phase.updates for phase in self.scheduler.phases)

    def _disk_full(self, error: OSError) -> RLLabError:
        last = self.checkpoints.latest()
        return RLLabError(
            f"The disk is full ({error}). Everything up to {f'the checkpoint {last}' if last else 'the start'} is safe:"
            f" free some space, then go on with training.resume_path={self.run_directory.path}"
        )

    def _loop(self) -> None:
        # What is there now stays to the end: the garbage collector need not look through it over and over.
        gc.freeze()
        try:
            self._take_actions()
        finally:
            gc.unfreeze()

    def _take_actions(self) -> None:
        scheduler, recorder, workflow, signal = self.scheduler, self.recorder, self.workflow, self.signal
        next_action, advance, collect_step, monotonic = (
            scheduler.next_action,
            scheduler.advance,
            self.collects.collect_step,
            time.monotonic,
        )
        evaluation, overlap = self.evaluation, self.context.overlap
        phase: Phase | None = None
        view, status_due = PhaseView("", ""), 0.0
        source: DataSource | None = None
        while True:
            action = next_action()
            if self._flight is not None and (
                action is None or action.kind not in _DURING_STEPS or action.phase.name != self._flight
            ):
                self._finish_step()
            if action is None or action.new_batch or action.kind != "update":  # no batch is half used
                told = signal.received is not None if self._shares == 1 else self._all_heard()
                if told or evaluation.pruned is not None:
                    return
                if self.clock >= self._next_due:
                    self._on_due()
                    continue  # a rollback or a condition may have changed what comes next
                if self._plans_phases and self._jumped():
                    continue
            if action is None:
                return
            if action.phase is not phase:
                phase = action.phase
                view = self._views[phase.name]
                source = self.context.data_sources[phase.data_source] if phase.data_source is not None else None
            if (now := monotonic()) >= status_due:
                status_due = now + STATUS_EVERY_S
                recorder.show(_ACTIVITY.get(action.kind, action.hook), now)
            if action.kind == "collect":
                result = collect_step(scheduler.env_steps, phase=view)
                if result is None:
                    advance(action)
                    continue
                steps = result.env_steps * self._shares
                advance(action, steps=steps)
                self.clock += steps
                self._take_in(result, source)
                if overlap:
                    self._flight = phase.name if workflow.in_flight else None
            else:
                self._other(action, view)

    def _take_in(self, result: CollectResult, source: DataSource | None) -> None:
        """Route what was collected."""
        if source is not None:
            for block in result.blocks:
                source.add(block)
            if result.following is not None:
                source.follow(result.following)
        if result.episodes:
            self.recorder.finished_episodes(result.episodes)
        envs = self.context.train_envs
        if envs is not None and envs.events:
            self.recorder.environment_events(envs.drain_events())

    def _finish_step(self) -> None:
        """Receive the step that the environments are at, before anything that is not an update of the same phase."""
        phase = next(phase for phase in self.scheduler.phases if phase.name == self._flight)
        source = self.context.data_sources[phase.data_source] if phase.data_source is not None else None
        self._take_in(self.workflow.finish_step(), source)
        self._flight = None

    def _check_overlap(self, phases: Sequence[Phase]) -> None:
        for phase in phases:
            source = self.context.data_sources.get(phase.data_source) if phase.data_source is not None else None
            if phase.collects and source is not None and type(source).follow is not DataSource.follow:
                raise ConfigError(
                    f"training.overlap=true: the data source '{phase.data_source}' of phase '{phase.name}' needs the"
                    " outcome of every decision before the updates. Overlap is for replay; set training.overlap=false."
                )

    def _other(self, action: Action, view: PhaseView) -> None:
        """Everything but collecting: rarer, and much longer than this takes."""
        if action.kind == "update":
            self._update(action, view)
        elif action.kind == "evaluate":
            if self.evaluation.run():
                self.scheduler.advance(action)
        else:
            self._own(action, view)

    def _own(self, action: Action, view: PhaseView) -> None:
        """A hook of the workflow's own. Long ones do a part of their work in each call, so that a run can be saved."""
        answer = self._hooks[action.hook](phase=view)
        result = answer if isinstance(answer, HookResult) else HookResult(answer or {})
        if result.metrics:
            self.recorder.accumulator.add("workflow", result.metrics)
        self.scheduler.advance(action, steps=result.env_steps, updates=result.updates, finished=result.finished)
        self.clock += result.env_steps or result.updates
        if result.log:
            self.log()

    def _update(self, action: Action, view: PhaseView) -> None:
        scheduler = self.scheduler
        if action.new_batch:
            assert action.phase.data_source is not None
            spec = self.batch_specs[action.phase.name]
            assert spec is not None
            self._batch = self.context.data_sources[action.phase.data_source].sample(spec)
        metrics: Metrics = self._hooks[action.hook](self._batch, phase=view)
        prefix = _PREFIXES.get(action.hook, "train")
        bad = self._first_bad(metrics) if self._checks_each_update else None
        if bad is None:
            self.recorder.accumulator.add(prefix, metrics)
        elif self._nonfinite(f"{prefix}/{bad}") == "rollback":
            return
        scheduler.advance(action, updates=1)
        if not action.phase.collects:
            self.clock += 1

    def _first_bad(self, metrics: Metrics) -> str | None:
        """A value that is not finite. Its loss may be that of one rank alone: where the run goes on, all ranks do the
        same about it; where it stops, that rank ends the others."""
        bad = first_bad(metrics)
        if self._shares == 1 or self.guard.policy == "stop":
            return bad
        return next((name for name in ranks.collected(bad) if name is not None), None)

    def _source_ready(self, name: str) -> bool:
        spec = self.batch_specs[self.scheduler.current_phase().name]
        return ranks.all_agree(spec is None or self.context.data_sources[name].ready(spec))

    def _all_heard(self) -> bool:
        """Whether some rank was told to stop: all of them look at it at the same action, and stop there."""
        self._passes += 1
        if self._passes % AGREE_EVERY == 0:
            self._heard = int(ranks.highest(self.signal.received or 0))
        return self._heard > 0

    def _jumped(self) -> bool:
        name = self.workflow.plan_phase(self.scheduler.env_steps)
        if name is None or name == self.scheduler.current_phase().name:
            return False
        self.scheduler.jump(name)
        return True

    # What is due now and then -----------------------------------------------------------------------------------------

    def _on_due(self) -> None:
        if self.clock >= self._next_log:
            every = self.settings.log_every
            self._next_log = self.clock - self.clock % every + every
            self.log()
        if self.clock >= self._next_checkpoint:
            every = self.settings.checkpoint_every
            self._next_checkpoint = self.clock - self.clock % every + every
            self.save()
        self._next_due = min(self._next_log, self._next_checkpoint)

    def log(self) -> None:
        """Write a row of metrics, and show it to the phase's condition."""
        self.run_directory.require_present()
        self.workflow.log_metrics(self.scheduler.env_steps, self.recorder.logger)
        extra = {"train/skipped_updates": float(self.guard.skipped)} if self.guard.policy == "skip" else {}
        values = self.recorder.row(extra)
        self.show_to_phase(values)
        if not self._checks_each_update:
            learned = {name: value for name, value in values.items() if name.startswith(("train/", "controller/"))}
            bad = first_bad(learned)
            if bad is not None:
                self._nonfinite(bad)

    def show_to_phase(self, values: Mapping[str, float]) -> None:
        """New values: the phase may end by its condition, or be told that its metric never comes."""
        self.scheduler.observe(values)
        self._watch.look(self.scheduler.current_phase(), values)

    def _nonfinite(self, metric: str) -> Policy:
        decision = self.guard.handle(
            metric, self._batch, updates=self.scheduler.updates + 1, env_steps=self.scheduler.env_steps
        )
        if decision == "rollback":
            roll_back(self)
        return decision

    # Saving -----------------------------------------------------------------------------------------------------------

    def save(self) -> Path | None:
        """Write a checkpoint of the run as it stands. None where its parameters are not finite and it went back."""
        self.run_directory.require_present()
        self.recorder.console.activity("saving a checkpoint")
        bad = nonfinite_parameter(self.modules)
        if bad is not None:
            self.guard.handle_parameter(bad, updates=self.scheduler.updates, env_steps=self.scheduler.env_steps)
            roll_back(self)
            return None
        state = gather_state(self.workflow, self.context, self.scheduler)
        state["loop"] = {
            "clock": self.clock,
            "next_log": self._next_log,
            "next_checkpoint": self._next_checkpoint,
            "best_score": self.evaluation.best_score,
            "flight": self._flight,
            "guard": self.guard.state_dict(),
            "recorder": self.recorder.state_dict(),
        }
        path = self.checkpoints.save(self.clock, state, self.context.data_sources)
        self.gone_back_to.discard(path.name)  # a new one under an old name
        return path

    def resume(self, path: Path | None = None) -> bool:
        """Go back to a checkpoint (the latest sound one). False where there is none yet: the run then starts anew."""
        return resume(self, path)

    def restore(self, checkpoint: Checkpoint, *, keep_wall: bool = False) -> None:
        """Stand where the checkpoint stood. `keep_wall`: the time that was spent since then counts (rollback)."""
        restore_state(checkpoint, self.workflow, self.context, self.scheduler)
        with fitting(checkpoint):
            self._restore_loop(checkpoint.state["loop"], keep_wall=keep_wall)

    def _restore_loop(self, loop: Mapping[str, Any], *, keep_wall: bool) -> None:
        settings = self.settings
        self.clock, self._flight = loop["clock"], loop.get("flight")
        self.evaluation.best_score = loop["best_score"]
        # A shorter interval than the saved one takes effect at once; what was due already stays due.
        self._next_log = min(loop["next_log"], self.clock - self.clock % settings.log_every + settings.log_every)
        every = settings.checkpoint_every
        self._next_checkpoint = min(loop["next_checkpoint"], self.clock - self.clock % every + every)
        self._next_due = min(self._next_log, self._next_checkpoint)
        self.guard.load_state_dict(loop["guard"])
        self.recorder.load_state_dict(loop["recorder"], keep_wall=keep_wall)
        self._batch = None

    def close(self) -> None:
        """Close the environments, data sources, log and console of the run."""
        self.workflow.close()
        if self.collects is not self.workflow:
            self.collects.close()
        if self.context.train_envs is not None:
            self.context.train_envs.close()
        self.evaluation.close()
        for source in self.context.data_sources.values():
            source.close()
        self.recorder.logger.close()
        self.recorder.console.close()


def ranks_share(spec: BatchSpec) -> BatchSpec:
    """The batch that one rank samples: the given one, divided by the number of ranks."""
    return spec if ranks.count() == 1 else spec._replace(batch_size=spec.batch_size // ranks.count())


def _view(phase: Phase) -> PhaseView:
    return PhaseView(phase.name, phase.type, phase.data_source, phase.controller_role, phase.options)
