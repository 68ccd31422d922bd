"""`python -m rl_lab.ui.defaults CONFIG`: the settings of a run that differ from its experiment's defaults, as JSON.

A process of its own, for composing a configuration imports PyTorch. The run's file is read as plain YAML: nothing in it
is resolved or built.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rl_lab.errors import RLLabError
from rl_lab.metrics.sinks import flatten
from rl_lab.reading import parse_yaml, read_text

IGNORED = ("_dims.", "run_root", "hydra.", "presets.", "auto_size.")


def differences(path: str) -> dict[str, Any]:
    """`{"experiment": name, "differences": [{key, default, value}, …]}`."""
    from omegaconf import OmegaConf

    from rl_lab.experiment.config import compose, resolve

    try:
        stored = parse_yaml(read_text(path))
    except ValueError as error:
        raise RLLabError(f"config.yaml cannot be read: {error}.") from error
    if not isinstance(stored, dict):
        raise RLLabError("config.yaml is not a mapping.")
    name = str((stored.get("experiment") or {}).get("name"))
    config = compose([f"+experiment={name}"])
    dims = stored.get("_dims")
    if isinstance(dims, dict) and "${" not in json.dumps(dims, default=str):
        config._dims = OmegaConf.create(dims)
    config.environment.id = config.environment.get("id") or "unknown"
    defaults, values = flatten(resolve(config)), flatten(stored)
    changed = [{"key": key, "default": _shown(defaults.get(key)), "value": _shown(values.get(key))}
               for key in sorted({*defaults, *values})
               if not key.startswith(IGNORED) and _shown(defaults.get(key)) != _shown(values.get(key))]  # fmt: skip
    return {"experiment": name, "differences": changed}


def _shown(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def main() -> int:
    try:
        sys.stdout.write(json.dumps(differences(sys.argv[1])))
    except (RLLabError, OSError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
