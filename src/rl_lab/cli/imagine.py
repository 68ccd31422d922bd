"""`rl-lab imagine`."""

from __future__ import annotations

import sys

from rl_lab.cli import arguments

_EXAMPLE = "  rl-lab imagine latest"


def run(argv: list[str]) -> int:
    parser = arguments.parser(
        "imagine",
        "Play a held-out episode, let the model predict it from its first steps and the actions alone, and write both "
        "side by side as a picture and a video. The run's report is refreshed.",
        _EXAMPLE,
    )
    arguments.add_run(parser)
    parser.add_argument("--context", type=arguments.positive, help="observed steps before the prediction (default: 5)")
    parser.add_argument("--horizon", type=arguments.positive, help="predicted steps (default: 45)")
    parser.add_argument("--seed", type=arguments.natural, help="another seed, other episodes (default: the run's)")
    arguments.add_trust(parser)
    options = parser.parse_intermixed_args(argv)

    from rl_lab.experiment.imagination import DEFAULT_CONTEXT, DEFAULT_HORIZON, imagine_run

    paths = imagine_run(
        options.run,
        run_root=options.run_root,
        context=options.context or DEFAULT_CONTEXT,
        horizon=options.horizon or DEFAULT_HORIZON,
        seed=options.seed,
        trust=options.trust,
    )
    sys.stdout.write("".join(f"{path}\n" for path in paths))
    return 0
