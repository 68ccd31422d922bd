"""The end of a run: the final evaluation on fresh episodes, summary.json and the report."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import torch

from rl_lab.orchestration.evaluation import EvaluationResult, evaluate
from rl_lab.orchestration.run_state import load_agent

if TYPE_CHECKING:
    from rl_lab.orchestration.orchestrator import Orchestrator


def complete(orchestrator: Orchestrator) -> bool:
    """Evaluate, summarise, report; False where a signal cut the evaluation short. The final checkpoint is on disk
    already, so an interruption here costs nothing."""
    orchestrator.log()  # what came together since the last row
    result = _final_evaluation(orchestrator)
    if result is None:
        return False
    recorder = orchestrator.recorder
    recorder.write({name.replace("eval/", "eval/final_"): value for name, value in result.metrics().items()})
    orchestrator.run_directory.write_summary(summary(orchestrator, result))
    if result.frames is not None:
        recorder.logger.video("final", result.frames, orchestrator.scheduler.env_steps)
    for finish in orchestrator.on_complete:
        finish()
    from rl_lab.metrics.report import write_report  # draws charts: loaded only here

    orchestrator.run_directory.finish("completed")  # the report shows how the run ended
    path = write_report(orchestrator.run_directory.path)
    recorder.console.message(
        f"Return {result.return_mean:.1f} ± {result.return_std:.1f} over {len(result.returns)} fresh episodes."
        f" Report: {path}"
    )
    return True


def _final_evaluation(orchestrator: Orchestrator) -> EvaluationResult | None:
    """Fresh episodes, from a stream of seeds that no other evaluation uses; None where a signal cut it short."""
    settings, context, workflow = orchestrator.settings, orchestrator.context, orchestrator.workflow
    orchestrator.recorder.console.activity("final evaluation")
    best = orchestrator.checkpoints.best() if settings.select == "best" else None
    if best is not None:
        load_agent(orchestrator.checkpoints.load(best, agent_only=True), workflow, context)
    envs = orchestrator.eval_envs("final", render=settings.video)
    try:
        return evaluate(
            workflow,
            envs,
            settings.final_episodes or settings.episodes,
            seed=context.seed,
            stream="final",
            record=settings.video,
            stop=orchestrator.signal.is_set,
        )
    finally:
        orchestrator.recorder.environment_events(envs.drain_events())
        envs.close()


def summary(orchestrator: Orchestrator, result: EvaluationResult) -> dict[str, float | int | str]:
    """The keys of summary.json."""
    scheduler, recorder = orchestrator.scheduler, orchestrator.recorder
    wall_s = recorder.wall_s
    return {
        **result.metrics(),
        "env_steps": scheduler.env_steps,
        "updates": scheduler.updates,
        "episodes": recorder.episodes,
        "wall_s": wall_s,
        "env_steps_per_s": scheduler.env_steps / wall_s,
        "updates_per_s": scheduler.updates / wall_s,
        "peak_rss_mb": peak_rss_mb(),
        "peak_gpu_mb": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0,
        "selected": orchestrator.settings.select,
    }


def peak_rss_mb() -> float:
    """The most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
