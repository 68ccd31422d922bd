"""`rl-lab train`."""

from __future__ import annotations

import sys

from rl_lab.cli import arguments

_EXAMPLE = """  rl-lab train
  rl-lab train +experiment=dreamer_v3 environment.id=LunarLander-v3 size=1m
  rl-lab train training.resume_path=latest training.total_timesteps=200_000
  rl-lab train -m experiment.seed=0,1,2"""


def run(argv: list[str]) -> int:
    parser = arguments.parser(
        "train",
        "Train an agent. Without +experiment=NAME it is the default, dreamer_v3_cartpole. `rl-lab list experiments` "
        "shows them all.",
        _EXAMPLE,
    )
    arguments.add_overrides(parser)
    parser.add_argument("-c", "--cfg", choices=["job"], help="print the resolved configuration and stop")
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="train one run for each combination of listed values"
    )
    parser.add_argument(
        "--requeue",
        action="store_true",
        help="go on with the unfinished run of this very command, and exit with 75 where SIGTERM stops it (clusters)",
    )
    arguments.add_trust(parser)
    options = parser.parse_intermixed_args(argv)

    if options.cfg:
        from rl_lab.experiment.train import configuration

        prepared = configuration(options.overrides, config_dirs=options.config_dir, trust=options.trust)
        sys.stdout.write(prepared.to_yaml())
        return 0
    if options.multirun:
        from rl_lab.experiment.sweep import sweep

        return sweep(options.overrides, config_dirs=options.config_dir)
    if "logging.console=off" not in options.overrides:  # the imports alone take seconds
        sys.stdout.write("Loading PyTorch and building the run …\n")
        sys.stdout.flush()
    from rl_lab.experiment.train import train

    return train(options.overrides, config_dirs=options.config_dir, trust=options.trust, requeue=options.requeue)
