"""The way of one DreamerV3 update through our code: files, functions, the deepest stack; and the size of the source.

Only frames of `rl_lab` count: files in which any function runs during `workflow.update(batch)`, and how many of its
frames lie on the stack at once. The batch is drawn before. The workflow is that of `dreamer_v3_cartpole` on the CPU,
with one thread; further overrides may be given:

    python benchmarks/update_trace.py training.compile=off [--json]
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import CodeType, FrameType, TracebackType
from typing import Any

import rl_lab
from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.workflows.context import PhaseView

SOURCE = Path(rl_lab.__file__).parent
PACKAGES = ("nn", "kernels")  # whose lines and files are counted
LONGEST = 80  # functions with more lines are listed
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")  # frames in Python 3.11 only: they are not counted


class Trace:
    """Counts the calls of our functions in this thread while it is entered."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.deepest: list[str] = []  # the outermost function first
        self._stack: list[CodeType] = []
        self._root = str(SOURCE) + "/"

    def __enter__(self) -> Trace:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or code.co_name in COMPREHENSIONS:
            return
        if not code.co_filename.startswith(self._root):
            return
        if event == "return":
            self._stack.pop()
            return
        self.calls[code] += 1
        self._stack.append(code)
        if len(self._stack) > len(self.deepest):
            self.deepest = [f"{_file(code)}: {code.co_qualname}" for code in self._stack]

    def files(self) -> dict[str, dict[str, int]]:
        """By file: the calls, and how many functions were called; most calls first."""
        calls: Counter[str] = Counter()
        functions: Counter[str] = Counter()
        for code, count in self.calls.items():
            calls[_file(code)] += count
            functions[_file(code)] += 1
        return {file: {"calls": count, "functions": functions[file]} for file, count in calls.most_common()}


def _file(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(SOURCE))


def prepared_update(overrides: list[str]) -> Callable[[], Any]:
    """One update of a freshly built workflow on a batch of random steps, from its own replay."""
    root = tempfile.mkdtemp()
    fixed = ["+experiment=dreamer_v3_cartpole", "experiment.device=cpu", "training.threads=1"]
    fixed += [f"run_root={root}", "logging.console=off", "logging.tensorboard=false"]
    experiment = build(prepare([*fixed, *overrides]), RunDirectory.create(root, "trace", 0))
    context, workflow = experiment.orchestrator.context, experiment.orchestrator.workflow
    replay, filling = context.data_sources["replay"], PhaseView("fill", "online", "replay", "random")
    while not replay.ready(workflow.batch_spec()):
        result = workflow.collect_step(0, phase=filling)
        assert result is not None
        for block in result.blocks:
            replay.add(block)
    batch, phase = replay.sample(workflow.batch_spec()), PhaseView("measure", "online")
    return lambda: workflow.update(batch, phase=phase)


def traced(overrides: list[str]) -> dict[str, Any]:
    """Of the second update: what the first one builds and compiles is not the way of every update."""
    update = prepared_update(overrides)
    update()
    with Trace() as trace:
        update()
    files = trace.files()
    return {
        "files": len(files), "functions": len(trace.calls), "calls": sum(trace.calls.values()),
        "depth": len(trace.deepest), "by_file": files, "deepest": trace.deepest,
    }  # fmt: skip


def source_size() -> dict[str, Any]:
    """Lines and files of `PACKAGES`, the median length of all files, and the functions that are too long."""
    lengths = {path: len(path.read_text().splitlines()) for path in sorted(SOURCE.rglob("*.py"))}
    packages = {}
    for name in PACKAGES:
        own = [length for path, length in lengths.items() if path.is_relative_to(SOURCE / name)]
        packages[name] = {"files": len(own), "lines": sum(own)}
    filled = [length for length in lengths.values() if length]
    functions = {name: lines for path in lengths for name, lines in long_functions(path)}
    return {"packages": packages, "median_lines": median(filled), "long_functions": functions}


def long_functions(path: Path) -> Iterator[tuple[str, int]]:
    """(file: name, lines) of functions over `LONGEST` lines, decorators and docstring included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = (node.end_lineno or first) - first + 1
            if lines > LONGEST:
                yield f"{path.relative_to(SOURCE)}: {node.name}", lines


def show(trace: dict[str, Any], size: dict[str, Any]) -> None:
    print(f"{'calls':>7} {'functions':>9}  file")
    for file, counts in trace["by_file"].items():
        print(f"{counts['calls']:>7} {counts['functions']:>9}  {file}")
    print(f"\nOne update: {trace['files']} files, {trace['functions']} functions, {trace['calls']} calls.")
    print(f"Deepest stack, {trace['depth']} frames:")
    for depth, name in enumerate(trace["deepest"], 1):
        print(f"{depth:>4}  {name}")
    print()
    for name, counts in size["packages"].items():
        print(f"{name}/: {counts['files']} files, {counts['lines']} lines")
    print(f"Median file: {size['median_lines']:g} lines (empty files aside)")
    print(f"Functions over {LONGEST} lines: {len(size['long_functions'])}")
    for name, lines in size["long_functions"].items():
        print(f"{lines:>7}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="settings of the experiment, as for rl-lab train")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args()
    trace, size = traced(arguments.overrides), source_size()
    if arguments.json:
        print(json.dumps({"update": trace, "source": size}, indent=1))
    else:
        show(trace, size)


if __name__ == "__main__":
    sys.exit(main())
