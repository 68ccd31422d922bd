"""`rl-lab eval`."""

from __future__ import annotations

import json
import sys

from rl_lab.cli import arguments
from rl_lab.errors import ConfigError

_EXAMPLE = """  rl-lab eval latest
  rl-lab eval experiments/dreamer_v3_cartpole/20260131-120000-s0 --episodes 100 --seed 1 --json
  rl-lab eval latest --planner icem horizon=12 samples=64"""


def run(argv: list[str]) -> int:
    parser = arguments.parser("eval", "Play held-out episodes with a trained agent.", _EXAMPLE)
    arguments.add_run(parser)
    parser.add_argument(
        "--episodes", type=arguments.positive, help="how many (default: evaluation.episodes of the run)"
    )
    parser.add_argument("--seed", type=arguments.natural, help="another seed, other episodes (default: the run's)")
    parser.add_argument("--video", action="store_true", help="record the first episode into the run's videos/")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--planner", metavar="NAME", help="plan in the run's model with this one of controllers/planners"
    )
    parser.add_argument(
        "--controller", metavar="ROLE", help="let the controller with this role play; 'agent': the agent itself"
    )
    parser.add_argument(
        "--as-in-training", action="store_true", help="choose actions as while collecting, exploration included"
    )
    parser.add_argument("settings", metavar="key=value", nargs="*", default=[], help="settings of --planner")
    arguments.add_trust(parser)
    options = parser.parse_intermixed_args(argv)
    if options.settings and options.planner is None:
        raise ConfigError(f"'{options.settings[0]}' is a setting of a planner: name it with --planner NAME.")

    from rl_lab.experiment.evaluate import evaluate_run

    result = evaluate_run(
        options.run, run_root=options.run_root, episodes=options.episodes, seed=options.seed, video=options.video,
        planner=options.planner, planner_settings=options.settings,
        controller=options.controller, as_in_training=options.as_in_training, trust=options.trust,
    )  # fmt: skip
    if options.json:
        sys.stdout.write(json.dumps(result.as_dict()) + "\n")
    else:
        sys.stdout.write(result.text() + "\n")
    return 0
