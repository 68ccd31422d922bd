"""Numbers that are not finite, in every module of every workflow: the run stops or goes back, and saves none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tests.torture.cases import checkpoints_in, folder_in, leaves, train
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
    files = [path / "agent.pt" for path in checkpoints_in(run)] if run is not None else []
    return [path for path in files if not is_finite(torch.load(path, weights_only=True))]


def is_finite(state: Mapping[str, Any]) -> bool:
    """Whether every tensor of an agent's modules is finite."""
    values = [value for group in ("components", "controllers") for _, value in leaves(state[group])]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return all(bool(value.isfinite().all()) for value in tensors)
