"""`rl-lab export`."""

from __future__ import annotations

import sys
from pathlib import Path

from rl_lab.cli import arguments

_EXAMPLE = "  rl-lab export latest --web\n  rl-lab export latest --onnx --out agent.onnx"


def run(argv: list[str]) -> int:
    parser = arguments.parser(
        "export",
        "Write a run in a form that needs no RL Lab: its dream as one HTML file that runs in a visitor's browser "
        "(--web), or its acting policy with its memory (--onnx, --torchscript). What is written is checked against the "
        "run's own agent and model.",
        _EXAMPLE,
    )
    arguments.add_run(parser)
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--web", action="store_const", const="web", dest="kind", help="the dream as one HTML file")
    kinds.add_argument("--onnx", action="store_const", const="onnx", dest="kind", help="the policy for ONNX runtimes")
    kinds.add_argument("--torchscript", action="store_const", const="torchscript", dest="kind", help="… for libtorch")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: dream.html, agent.onnx or agent.pt in the run"
    )
    arguments.add_trust(parser)
    options = parser.parse_intermixed_args(argv)

    from rl_lab.orchestration.run_directory import find_run

    folder = find_run(options.run, options.run_root).path
    if options.kind == "web":
        from rl_lab.export.dream_page import export_dream

        out = options.out or folder / "dream.html"
        sys.stdout.write(f"{export_dream(folder, out, trust=options.trust)}\n")
        return 0

    from rl_lab.export.acting import SUFFIXES, export_policy

    out = options.out or folder / f"agent{SUFFIXES[options.kind]}"
    done = export_policy(folder, options.kind, out, trust=options.trust)
    checked = (
        f"It chose the agent's actions for {done.steps} steps; the largest difference is {done.difference:.1e}."
        if done.steps
        else "It was not compared with the agent: pip install onnxruntime."
    )
    sys.stdout.write(f"{done.model}\n{done.description}\n{checked}\n")
    return 0
