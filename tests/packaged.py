"""Settings of the packaged configuration, for tests that build a part by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import rl_lab.configs

CONFIGS = Path(rl_lab.configs.__file__).parent


def packaged(name: str) -> dict[str, Any]:
    """The plain settings in `configs/NAME.yaml`: without the target, references and what an experiment must fill in."""
    node = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"), resolve=False)
    assert isinstance(node, dict)
    return {key: value for key, value in node.items() if key not in ("_target_", "defaults") and not _is_open(value)}


def _is_open(value: Any) -> bool:
    return isinstance(value, str) and (value == "???" or value.startswith(("@", "${")))


def adjusted(name: str, **changes: Any) -> dict[str, Any]:
    """`packaged(name)` with some settings changed; a mapping such as `loss_scales` is changed key by key."""
    settings = packaged(name)
    for key, value in changes.items():
        settings[key] = {**settings[key], **value} if isinstance(settings.get(key), dict) else value
    return settings
