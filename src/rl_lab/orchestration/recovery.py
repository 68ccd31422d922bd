"""Going back: to the latest checkpoint when a run goes on, and to an earlier one when a value was not finite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_lab import ranks
from rl_lab.errors import CheckpointError
from rl_lab.orchestration.nonfinite import nonfinite_parameter
from rl_lab.orchestration.run_state import vary_random_streams

if TYPE_CHECKING:
    from rl_lab.orchestration.orchestrator import Orchestrator


def resume(orchestrator: Orchestrator, path: Path | None = None) -> bool:
    """Stand where a checkpoint stood: the one at `path`, or the latest whose parameters are finite. False where there
    is none yet, so that the run starts anew."""
    checkpoints, run = orchestrator.checkpoints, orchestrator.run_directory
    if ranks.is_first():
        checkpoints.recover()
    ranks.wait_for_all()
    paths = [path] if path is not None else checkpoints.newest_first()
    if not paths:
        orchestrator.recorder.logger.truncate(0)
        run.truncate_events(0)
        _forget_future(orchestrator)
        run.event("resume", "there was no checkpoint yet: started from the beginning", 0)
        return False
    restored = _restore_first(orchestrator, paths)
    if restored is None:
        which = f"{path} holds" if path is not None else f"All checkpoints in {checkpoints.folder} hold"
        raise CheckpointError(f"{which} parameters that are NaN or infinite: the run cannot go on from there.")
    run.event("resume", f"went on from {restored.name}", orchestrator.scheduler.env_steps)
    return True


def roll_back(orchestrator: Orchestrator) -> None:
    """Go back to the newest checkpoint that no rollback has tried; to the newest, where all were. The draws that follow
    are others than those that led to the value that was not finite."""
    attempt, tried = orchestrator.guard.rollbacks, orchestrator.gone_back_to
    paths = sorted(orchestrator.checkpoints.newest_first(), key=lambda path: path.name in tried)
    path = _restore_first(orchestrator, paths, keep_wall=True)
    if path is None:
        raise CheckpointError(
            "training.on_nonfinite=rollback: there is no checkpoint to go back to yet. Lower checkpoint.every."
        )
    tried.add(path.name)
    vary_random_streams(orchestrator.context.seed, attempt)
    spec = orchestrator.batch_specs[orchestrator.scheduler.current_phase().name]
    if spec is not None:
        for source in orchestrator.context.data_sources.values():  # other batches than those that led here
            for _ in range(attempt):
                if source.ready(spec):
                    source.sample(spec)
    orchestrator.recorder.event("rollback", f"went back to {path.name} (rollback {attempt})")


def _restore_first(orchestrator: Orchestrator, paths: Sequence[Path], *, keep_wall: bool = False) -> Path | None:
    """Restore the first of these checkpoints whose parameters are finite, and tell of the others."""
    poisoned: list[str] = []
    for path in paths:
        checkpoint = orchestrator.checkpoints.load(path)
        orchestrator.restore(checkpoint, keep_wall=keep_wall)
        bad = nonfinite_parameter(orchestrator.modules)
        if bad is None:
            _forget_future(orchestrator)
            for text in poisoned:  # only now: restoring cuts the events back
                orchestrator.recorder.event("poisoned", text)
            if not checkpoint.is_of_these_ranks:
                orchestrator.recorder.event("ranks", _changed_ranks(checkpoint.ranks))
            return path
        poisoned.append(f"{path.name} holds the parameter {bad}, which is NaN or infinite, and was passed over")
    return None


def _changed_ranks(saved: int) -> str:
    return (
        f"the checkpoint is of {saved} rank{'s' * (saved > 1)}, and the run goes on with {ranks.count()}: running "
        "episodes and records were dealt out anew, a rollout under way was given up, and batches are drawn by other "
        "random streams, so it is not the run that the same number of ranks would have made"
    )


def _forget_future(orchestrator: Orchestrator) -> None:
    """Remove everything younger than the present step: it belongs to a future that was given up."""
    if ranks.is_first():
        orchestrator.checkpoints.forget_after(orchestrator.clock)
    ranks.wait_for_all()
    if orchestrator.checkpoints.best() is None:
        orchestrator.evaluation.best_score = None  # its agent is gone: the next evaluation is the best again
