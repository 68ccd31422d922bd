"""`rl-lab ui`."""

from __future__ import annotations

from rl_lab.cli import arguments

_EXAMPLE = "  rl-lab ui\n  rl-lab ui experiments --port 8600 --no-browser"


def run(argv: list[str]) -> int:
    parser = arguments.parser(
        "ui",
        "A page in your browser: the runs as they learn, comparisons, and the dream of each run to play in. Only this "
        "machine can open it unless --host says otherwise; then the printed address carries a token.",
        _EXAMPLE,
    )
    parser.add_argument("root", metavar="ROOT", nargs="?", default="experiments", help="default: experiments")
    arguments.add_server(parser)
    options = parser.parse_intermixed_args(argv)

    from rl_lab.ui.serving import serve

    return serve(options.root, host=options.host, port=options.port, browser=options.browser)
