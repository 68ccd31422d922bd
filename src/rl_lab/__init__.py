"""RL Lab: a laboratory for world-model reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load"]

if TYPE_CHECKING:
    from rl_lab.experiment.agent import load


def __getattr__(name: str) -> Any:
    """Import `load` on first use, so that `import rl_lab` and the command line stay light."""
    if name == "load":
        from rl_lab.experiment.agent import load

        return load
    raise AttributeError(f"module 'rl_lab' has no attribute '{name}'")
