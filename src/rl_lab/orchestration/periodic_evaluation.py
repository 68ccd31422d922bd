"""Evaluations while a run trains: always the same episodes. The best agent is kept, and a rule may end the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from rl_lab import ranks
from rl_lab.components.acting import Acts
from rl_lab.environments.base import SeedStream, VectorEnv
from rl_lab.errors import ConfigError
from rl_lab.orchestration.evaluation import EvaluationResult, evaluate
from rl_lab.orchestration.nonfinite import nonfinite_parameter
from rl_lab.orchestration.run_state import agent_state

if TYPE_CHECKING:
    from rl_lab.orchestration.orchestrator import Orchestrator


class EvalEnvsFactory(Protocol):
    """Makes the environments of one evaluation stream."""

    def __call__(self, stream: SeedStream, *, render: bool) -> VectorEnv: ...


class StopRule(Protocol):
    """Looks at each evaluation of a run: why the run should end here, or None."""

    def __call__(self, metrics: Mapping[str, float], env_steps: int) -> str | None: ...


class PeriodicEvaluation:
    """The evaluations of one run, and what follows from their scores."""

    def __init__(self, orchestrator: Orchestrator, make_envs: EvalEnvsFactory) -> None:
        self.orchestrator, self.make_envs = orchestrator, make_envs
        self._envs: VectorEnv | None = orchestrator.context.eval_envs
        self.best_score: float | None = None
        self.stop_rule: StopRule | None = None
        self.pruned: str | None = None  # why the rule ended the run

    @property
    def actor(self) -> Acts:
        """Who plays."""
        return self.orchestrator.workflow.who_acts(self.orchestrator.settings.controller)

    def run(self) -> bool:
        """Evaluate once; the first rank plays. False where a signal cut it short."""
        result = ranks.shared(self._play() if ranks.is_first() else None)
        if result is None:
            return False
        self._report(result)
        return True

    def _play(self) -> EvaluationResult | None:
        run = self.orchestrator
        run.recorder.console.activity("evaluating")
        if self._envs is None:
            self._envs = self.make_envs("eval", render=False)
        result = evaluate(
            self.actor,
            self._envs,
            run.settings.episodes,
            seed=run.context.seed,
            stream="eval",
            stop=run.signal.is_set,
        )
        run.recorder.environment_events(self._envs.drain_events())
        return result

    def _report(self, result: EvaluationResult) -> None:
        """Write the score, show it to the phase's condition, ask the rule, keep the agent if it is the best so far."""
        run, metrics = self.orchestrator, result.metrics()
        run.recorder.write(metrics)
        run.show_to_phase(metrics)
        step = run.scheduler.env_steps
        run.recorder.console.message(
            f"step {step}: evaluation return {result.return_mean:.1f} ± {result.return_std:.1f}"
            f" ({len(result.returns)} episodes)"
        )
        if self.stop_rule is not None:
            self.pruned = ranks.shared(self.stop_rule(metrics, step) if ranks.is_first() else None)
        if run.settings.best_metric is not None:
            self._keep_best(run.settings.best_metric, metrics)

    def _keep_best(self, name: str, metrics: Mapping[str, float]) -> None:
        if name not in metrics:
            raise ConfigError(
                f"checkpoint.best is '{name}', which no evaluation reports: use one of {', '.join(metrics)}."
            )
        if self.best_score is not None and metrics[name] < self.best_score:  # of equals the later
            return
        self.best_score, run = metrics[name], self.orchestrator
        if nonfinite_parameter(run.modules) is None:
            state = agent_state(run.workflow, run.context)
            run.checkpoints.save_best(run.clock, state, metrics[name], env_steps=run.scheduler.env_steps)

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
