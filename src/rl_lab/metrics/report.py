"""report.html: what was trained, how well, how it learned, and what its model imagines. One file, no network."""

from __future__ import annotations

import os
import shlex
from html import escape
from pathlib import Path

import numpy as np

from rl_lab.metrics import report_sections as sections
from rl_lab.metrics.console import duration
from rl_lab.metrics.page import facts, figure_number, folded, page, preformatted, section
from rl_lab.metrics.report_models import evolution, illustrations, stages
from rl_lab.metrics.run_files import EVAL_RETURN, RunFiles, number, read_run

_BADGES = {"completed": "good", "running": "warn", "interrupted": "warn", "failed": "bad"}


def write_report(run_folder: Path) -> Path:
    """Write report.html into the run directory, from the files that are there; returns its path."""
    run = read_run(run_folder)
    target = run.folder / "report.html"
    temporary = target.with_suffix(".html.tmp")
    temporary.write_text(render_report(run), encoding="utf-8", errors="replace")
    os.replace(temporary, target)  # an open browser never sees half a page
    return target


def render_report(run: RunFiles) -> str:
    """The whole page."""
    return page(
        f"{run.experiment} – RL Lab report",
        [
            _header(run),
            sections.learning_curve(run),
            sections.videos(run),
            stages(run),
            evolution(run),
            sections.imagination(run),
            illustrations(run),
            sections.planning(run),
            *sections.metrics(run),
            sections.evaluations(run),
            sections.plan_and_events(run),
            _go_on(run),
            sections.facts_of_the_run(run),
            folded("Configuration", preformatted(run.config_text), text="Enough to repeat the run."),
        ],
    )


def _header(run: RunFiles) -> str:
    badge = _BADGES.get(run.status, "warn")
    environment = run.setting("environment.id", "an unknown environment")
    workflow = str(run.setting("workflow._target_", "") or run.info.get("workflow", "")).rsplit(".", 1)[-1]
    size = run.setting("size")
    agent = (workflow or "An agent") + (f" (size {size})" if size else "")
    seed = f", seed {run.seed}" if run.seed is not None else ""
    error = run.info.get("error")
    numbers = facts(_headline_numbers(run), main=int(run.last(EVAL_RETURN) is not None))
    return (
        f'<header><h1>{escape(run.experiment)}<span class="badge {badge}">{escape(run.status)}</span></h1>'
        f'<p class="quiet">{escape(f"{agent} on {environment}{seed}")}</p>'
        + (f'<p class="bad">{escape(str(error))}</p>' if error else "")
        + f"<p>{escape(verdict(run))}</p>{numbers}</header>"
    )


def verdict(run: RunFiles) -> str:
    """One or two sentences: how good the agent is and how that compares with its start."""
    steps, total = run.last("env_steps"), number(run.setting("training.total_timesteps"))
    done = f"{steps:,.0f}" + (f" of {total:,.0f}" if total else "") + " env steps" if steps is not None else ""
    score, episodes = run.last(EVAL_RETURN), run.last("eval/episodes")
    played = "1 episode" if episodes == 1 else f"{episodes:,.0f} episodes" if episodes else ""
    over = f" over {played} with fresh, held-out seeds" if played else ""
    if score is None:
        name = run.train_return_name()
        latest = run.last(name) if name else None
        if latest is None:
            return f"No episode has ended yet ({done})." if done else "The run has only just started."
        return f"Not evaluated yet. The last training episodes returned {figure_number(latest)} on average ({done})."
    spread = run.last("eval/return_std")
    plus_minus = f" ± {figure_number(spread)}" if spread is not None else ""
    finished = number(run.summary.get(EVAL_RETURN)) is not None
    lead = f"{_agent(run)} returns" if finished else f"So far ({done}), at its last evaluation, the agent returns"
    return f"{lead} {figure_number(score)}{plus_minus} (mean ± standard deviation){over}.{_compared(run, score)}"


def _agent(run: RunFiles) -> str:
    """Which agent played the final episodes. One that made no update is not called trained, and a run that has nothing
    to train is not called untrained."""
    if not run.parameters.get("total"):
        return "The agent"
    if not run.last("updates"):
        return "The agent, which is untrained because the run made no update,"
    step = number(run.summary.get("selected_step"))
    which = f" ({run.summary.get('selected')}, step {step:,.0f})" if step is not None else ""
    return f"The trained agent{which}"


def _compared(run: RunFiles, score: float) -> str:
    """A sentence that compares the score with the beginning of the run."""
    name = run.train_return_name()
    returns = run.series(name)[1] if name else np.zeros(0)
    evaluations = run.series(EVAL_RETURN)[1]
    if len(returns):
        first, what = float(returns[0]), "its first training episodes returned"
    elif len(evaluations) > 1:
        first, what = float(evaluations[0]), "its first evaluation gave"
    else:
        return ""
    gain = score - first
    how = "better" if gain > 0 else "worse"
    return f" At the start {what} {figure_number(first)}: it is now {figure_number(abs(gain))} {how}." if gain else ""


def _headline_numbers(run: RunFiles) -> list[tuple[str, str]]:
    entries: list[tuple[str, str]] = []
    score, spread = run.last(EVAL_RETURN), run.last("eval/return_std")
    if score is not None:
        label = "final evaluation (return)" if EVAL_RETURN in run.summary else "last evaluation (return)"
        entries.append((label, figure_number(score) + (f" ± {figure_number(spread, 3)}" if spread is not None else "")))
    for name, label in (("env_steps", "env steps"), ("updates", "gradient updates"), ("episodes", "training episodes")):
        value = run.last(name)
        if value is not None:
            entries.append((label, f"{value:,.0f}"))
    wall = run.last("wall_s")
    if wall is not None:
        entries.append(("wall-clock time", duration(wall)))
    if "total" in run.parameters:
        entries.append(("trainable parameters", f"{run.parameters['total']:,}"))
    return entries


def _go_on(run: RunFiles) -> str:
    """Commands to copy, each of which works for this run."""
    where = shlex.quote(_short_path(run.folder))
    commands = [(f"rl-lab eval {where} --episodes 20 --video", "play fresh episodes and record one")]
    if run.imagination or run.illustrations or run.planning:
        commands.append((f"rl-lab imagine {where}", "draw the model's imagination anew"))
    steps = number(run.setting("training.total_timesteps"))
    if run.status != "completed":
        commands.append((f"rl-lab train training.resume_path={where}", "go on where it stopped"))
    elif steps and run.axis == "env_steps":  # a budget of env steps means nothing to a run that learned from data alone
        longer = f"training.total_timesteps={int(2 * steps)}"
        commands.append((f"rl-lab train training.resume_path={where} {longer}", "train for longer"))
    commands.append((f"rl-lab compare {where} OTHER_RUN", "curves and confidence intervals of several runs"))
    rows = "".join(
        f"<tr><td><code>{escape(command)}</code></td><td>{escape(text)}</td></tr>" for command, text in commands
    )
    return section("How to go on", f'<div class="scroll"><table>{rows}</table></div>')


def _short_path(folder: Path) -> str:
    """Relative to where the user stands, if it is below that."""
    absolute = folder.resolve()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)
