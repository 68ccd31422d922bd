"""`rl-lab list`: the configuration groups are the registry."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rl_lab.cli import arguments
from rl_lab.errors import ConfigError, nearest
from rl_lab.experiment import registry

_EXAMPLE = """  rl-lab list
  rl-lab list experiments
  rl-lab list components/encoders"""


def run(argv: list[str]) -> int:
    parser = arguments.parser("list", "List what configurations can name, with what plugins add.", _EXAMPLE)
    parser.add_argument("kind", nargs="?", help="experiments, environments, workflows, components, controllers, …")
    options = parser.parse_args(argv)
    folders = registry.config_folders()
    found = list(registry.entries(folders))
    if options.kind:
        found = _of_kind(options.kind, found)
    sys.stdout.write("\n".join(_lines(found)) + "\n")
    if options.kind in (None, "environment", "environments"):
        sys.stdout.write("\n".join(["", *_families()]) + "\n")
    return 0


def _of_kind(kind: str, found: list[registry.ConfigEntry]) -> list[registry.ConfigEntry]:
    """Entries of a group, which may be named in the plural; `components` means all groups below it."""
    wanted = {kind, kind.removesuffix("s")}
    chosen = [
        entry for entry in found if any(entry.group == name or entry.group.startswith(name + "/") for name in wanted)
    ]
    if not chosen:
        kinds = {f"{entry.group.partition('/')[0].removesuffix('s')}s" for entry in found} | {
            entry.group for entry in found
        }
        raise ConfigError(f"There is nothing of the kind '{kind}'.{nearest(kind, kinds)}")
    return chosen


def _lines(found: Iterable[registry.ConfigEntry]) -> list[str]:
    found = list(found)
    width = max(len(entry.name) for entry in found)
    lines: list[str] = []
    for group in sorted({entry.group for entry in found}, key=_reading_order):
        lines += [*([""] if lines else []), f"{group}:"]
        for entry in sorted((entry for entry in found if entry.group == group), key=lambda entry: entry.name):
            origin = "" if entry.owner == "rl-lab" else f"  [plugin {entry.owner}]"
            lines.append(f"  {entry.name:<{width}}  {entry.summary}{origin}".rstrip())
    return lines


def _reading_order(group: str) -> tuple[int, str]:
    first = ["experiment", "environment", "workflow"]
    top = group.partition("/")[0]
    return (first.index(top) if top in first else len(first), group)


def _families() -> list[str]:
    from rl_lab.environments.families import FAMILIES

    lines = ["environment families (environment.id):"]
    width = max(len(family.name) for family in FAMILIES)
    for family in FAMILIES:
        state = "installed" if family.installed else f"not installed: pip install 'rl-lab[{family.extra}]'"
        lines.append(f"  {family.name:<{width}}  {family.example}  ({state})")
    return lines
