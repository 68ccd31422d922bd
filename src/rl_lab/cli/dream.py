"""`rl-lab dream`."""

from __future__ import annotations

from rl_lab.cli import arguments

_EXAMPLE = "  rl-lab dream latest\n  rl-lab dream experiments/dreamer_v3_cartpole/20261118-120000-s0 --no-browser"


def run(argv: list[str]) -> int:
    parser = arguments.parser(
        "dream",
        "Step into the world model of a run: reality, dream and their difference side by side, steered by you, the "
        "agent or a planner. The page opens in your browser, also beside a run that is still training.",
        _EXAMPLE,
    )
    arguments.add_run(parser)
    arguments.add_server(parser)
    arguments.add_trust(parser)
    options = parser.parse_intermixed_args(argv)

    from rl_lab.orchestration.run_directory import find_run
    from rl_lab.ui.run_index import root_of

    folder = find_run(options.run, options.run_root).path.resolve()
    root, name = root_of(folder, options.run_root)

    from rl_lab.ui.dream.hub import Dreams
    from rl_lab.ui.serving import serve, view_of

    dreams = Dreams(frozenset([name]) if options.trust else frozenset())
    dreams.open(name, folder)  # the model is loaded while the server and the browser start
    return serve(
        root, host=options.host, port=options.port, browser=options.browser, view=view_of("dream", name), dreams=dreams
    )
