"""Numbers that are not finite, in every module of every workflow: the run stops or goes back, and saves none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tests.torture.cases import folder_in, train
from tests.torture.children import in_child
from tests.torture.kills import folder
from tests.torture.tally import Tally

from rl_lab.orchestration.orchestrator import Orchestrator


def poisoned(case: str, module: int, value: float, policy: str, tally: Tally) -> bool:
    """Put `value` into a parameter of one module after some updates; False: there is no such module."""

    def work() -> str | None:
        update, done = Orchestrator._update, [0]

        def poisoning(self: Orchestrator, *arguments: Any) -> Any:
            result = update(self, *arguments)
            trained = [part for part in self.modules.values() if any(True for _ in part.parameters())]
            done[0] += 1
            if done[0] == 3:
                if module >= len(trained):
                    raise IndexError
                with torch.no_grad():
                    next(iter(trained[module].parameters())).view(-1)[0] = value
            return result

        Orchestrator._update = poisoning  # type: ignore[method-assign]
        try:
            train(case, root, f"training.on_nonfinite={policy}", "checkpoint.every=4")
        except IndexError:
            return "no such module"
        return None

    with folder() as root:
        ended = in_child(work, limit=600)
        if ended.value == "no such module":
            return False
        tally.add("nonfinite")
        if ended.status not in ("done", "refused"):
            tally.bad(f"{case}: {value} in module {module}, {policy}: {ended.status}: {ended.text}")
        for path in _poisoned_files(root):
            tally.bad(f"{case}: {value} in module {module}, {policy}: saved in {path}")
    return True


def _poisoned_files(root: Path) -> list[Path]:
    run = folder_in(root)
    files = list((run / "checkpoints").glob("*/agent.pt")) if run is not None else []
    return [path for path in files if not _finite(torch.load(path, weights_only=True))]


def _finite(state: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return not state.is_floating_point() or bool(state.isfinite().all()) or not state.requires_grad
    if isinstance(state, dict):
        return all(_finite(value) for name, value in state.items() if not str(name).startswith("workflow_state"))
    return not isinstance(state, float) or math.isfinite(state)
