"""`rl-lab sweep`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rl_lab.cli import arguments
from rl_lab.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rl_lab.experiment.studies import StudySummary

_EXAMPLE = """  rl-lab sweep
  rl-lab sweep ppo_cartpole --storage sqlite:///experiments/optuna.db
after, say:
  rl-lab train -m hydra/sweeper=optuna +experiment=ppo_cartpole 'workflow.clip=interval(0.1,0.3)'"""


def run(argv: list[str]) -> int:
    parser = arguments.parser(
        "sweep",
        "Show a study of Optuna: its runs, how much each setting matters, and the best settings. Without a name: the "
        "studies of the storage. A study is made by `rl-lab train -m hydra/sweeper=optuna`.",
        _EXAMPLE,
    )
    parser.add_argument("study", nargs="?", help="the name of a study")
    parser.add_argument(
        "--storage", default="sqlite:///experiments/optuna.db", metavar="URL", help="default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)

    from rl_lab.experiment import studies

    names = studies.study_names(options.storage)
    if options.study is None:
        sys.stdout.write("\n".join(names or ["There is no study in this storage yet."]) + "\n")
        return 0
    if options.study not in names:
        raise ConfigError(f"There is no study '{options.study}' in {options.storage}.{nearest(options.study, names)}")
    summary = studies.summarise(options.storage, options.study)
    sys.stdout.write((json.dumps(asdict(summary)) if options.json else _text(summary)) + "\n")
    return 0


def _text(summary: StudySummary) -> str:
    lines = [f"Study {summary.name} ({_count(summary.trials)})", ""]
    for trial in summary.trials:
        value = "" if trial["value"] is None else f"{trial['value']:.4g}"
        where = trial["error"] or trial["run"] or ""
        lines.append(f"  {trial['number']:>4}  {trial['state']:<9} {value:>9}  {_settings(trial)}  {where}".rstrip())
    if summary.importance:
        lines += ["", "Importance (share of the variance of the result, PED-ANOVA)"]
        lines += [f"  {share:5.0%}  {name}" for name, share in summary.importance.items()]
    if summary.best is not None:
        lines += [
            "",
            f"Best: trial {summary.best['number']}, {summary.best['value']:.4g}",
            f"  {_settings(summary.best)}",
        ]
    return "\n".join(lines)


def _count(trials: list[dict[str, Any]]) -> str:
    states = [trial["state"] for trial in trials]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no trials"


def _settings(trial: dict[str, Any]) -> str:
    shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial["settings"].values())
    return " ".join(f"{name}={value}" for name, value in zip(trial["settings"], shown, strict=True))
