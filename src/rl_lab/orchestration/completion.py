"""The end of a run: the final evaluation on fresh episodes, summary.json and the report."""

from __future__ import annotations

import resource
import sys
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from rl_lab import ranks
from rl_lab.orchestration.evaluation import EvaluationResult, evaluate
from rl_lab.orchestration.files import NO_ROOM
from rl_lab.orchestration.run_state import load_agent

if TYPE_CHECKING:
    from rl_lab.orchestration.orchestrator import Orchestrator


class FinalEvaluation(NamedTuple):
    """The final episodes, and which agent played them."""

    result: EvaluationResult
    selected: Literal["last", "best"]
    step: int  # env steps that it had learned from; updates in a run without any

    @property
    def agent(self) -> str:
        return f"{self.selected}, step {self.step:,}"


def complete(orchestrator: Orchestrator) -> bool:
    """Evaluate, summarise, report; False where a signal cut the evaluation short. The final checkpoint is on disk
    already, so an interruption here costs nothing. All of it is the first rank's work."""
    recorder = orchestrator.recorder
    if recorder.has_news:
        orchestrator.log()  # what came together since the last row
    if not ranks.is_first():
        return True
    final = _final_evaluation(orchestrator)
    if final is None:
        return False
    result = final.result
    orchestrator.run_directory.require_present()
    recorder.write({name.replace("eval/", "eval/final_"): value for name, value in result.metrics().items()})
    orchestrator.run_directory.write_summary(summary(orchestrator, final))
    _draw(orchestrator, result)
    from rl_lab.metrics.report import write_report  # draws charts: loaded only here

    orchestrator.run_directory.finish("completed")  # the report shows how the run ended
    path = write_report(orchestrator.run_directory.path)
    untrained = " The run made no update: the agent is untrained." if orchestrator.learns_nothing else ""
    recorder.console.message(
        f"Return {result.return_mean:.1f} ± {result.return_std:.1f} over {len(result.returns)} fresh episodes"
        f" ({final.agent}).{untrained} Report: {path}"
    )
    return True


def _draw(orchestrator: Orchestrator, result: EvaluationResult) -> None:
    """The film of an episode and the pictures of the model. What cannot be drawn is a note: the run is complete."""
    recorder = orchestrator.recorder
    drawings = list(orchestrator.on_complete)
    if result.frames is not None:
        steps = orchestrator.scheduler.env_steps
        drawings.insert(0, partial(recorder.logger.video, "final", result.frames, steps))
    for draw in drawings:
        try:
            draw()
        except Exception as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise
            text = " ".join(str(error).split()) or "no message"
            recorder.event("no_picture", f"a picture or film could not be made: {type(error).__name__}: {text[:500]}")


def _final_evaluation(orchestrator: Orchestrator) -> FinalEvaluation | None:
    """Fresh episodes, from a stream of seeds that no other evaluation uses; None where a signal cut it short."""
    settings, context, workflow = orchestrator.settings, orchestrator.context, orchestrator.workflow
    console, episodes = orchestrator.recorder.console, settings.final_episodes or settings.episodes
    console.activity("final evaluation")
    best = orchestrator.checkpoints.best() if settings.select == "best" else None
    step = orchestrator.scheduler.env_steps or orchestrator.clock
    if best is not None:
        checkpoint = orchestrator.checkpoints.load(best, agent_only=True)
        load_agent(checkpoint, workflow, context)
        step = checkpoint.env_steps or checkpoint.step
    envs = orchestrator.evaluation.make_envs("final", render=settings.video)
    try:
        result = evaluate(
            orchestrator.evaluation.actor,
            envs,
            episodes,
            seed=context.seed,
            stream="final",
            record=settings.video,
            stop=orchestrator.signal.is_set,
            progress=lambda done: console.activity(f"final evaluation, {done} of {episodes} episodes"),
        )
    finally:
        orchestrator.recorder.environment_events(envs.drain_events())
        envs.close()
    return None if result is None else FinalEvaluation(result, "last" if best is None else "best", step)


def summary(orchestrator: Orchestrator, final: FinalEvaluation) -> dict[str, float | int | str]:
    """The keys of summary.json."""
    scheduler, recorder = orchestrator.scheduler, orchestrator.recorder
    wall_s = recorder.wall_s
    return {
        **final.result.metrics(),
        "env_steps": scheduler.env_steps,
        "updates": scheduler.updates,
        "episodes": recorder.episodes,
        "wall_s": wall_s,
        "env_steps_per_s": scheduler.env_steps / wall_s,
        "updates_per_s": scheduler.updates / wall_s,
        "peak_rss_mb": peak_rss_mb(),
        "peak_gpu_mb": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0,
        "selected": final.selected,
        "selected_step": final.step,
    }


def peak_rss_mb() -> float:
    """The most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
