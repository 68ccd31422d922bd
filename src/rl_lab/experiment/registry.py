"""What the configuration groups offer: RL Lab's own YAML files and those of installed plugins.

Needs neither Hydra nor torch, so that `rl-lab list` answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from rl_lab.errors import ConfigError

PLUGIN_GROUP = "rl_lab.plugins"
OWN_CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True)
class ConfigFolder:
    """A folder of configuration groups and who ships it."""

    owner: str
    path: Path


@dataclass(frozen=True)
class ConfigEntry:
    """One YAML leaf: `group` is its folder (`components/encoders`), `summary` its first comment line."""

    group: str
    name: str
    summary: str
    owner: str
    path: Path


def config_folders(extra: Sequence[Path] = ()) -> list[ConfigFolder]:
    """RL Lab's configs, then the plugins', then folders that the user named."""
    folders = [ConfigFolder("rl-lab", OWN_CONFIGS), *plugin_folders()]
    for path in extra:
        if not path.is_dir():
            raise ConfigError(
                f"--config-dir {path}: there is no such folder. Name a folder with groups such as experiment/."
            )
        folders.append(ConfigFolder(str(path), path.resolve()))
    return folders


def plugin_folders() -> list[ConfigFolder]:
    """The `configs` folder of every package named by an entry point in the group `rl_lab.plugins`."""
    folders = []
    for point in sorted(entry_points(group=PLUGIN_GROUP), key=lambda point: point.name):
        try:
            spec = find_spec(point.module)
        except ImportError:
            spec = None
        roots = list(spec.submodule_search_locations or ()) if spec is not None else []
        if spec is not None and not roots and spec.origin is not None:
            roots = [str(Path(spec.origin).parent)]
        found = [Path(root) / "configs" for root in roots if (Path(root) / "configs").is_dir()]
        if not found:
            raise ConfigError(
                f"The plugin '{point.name}' (entry point {PLUGIN_GROUP}, {point.value}) has no folder 'configs' in its "
                "package. Reinstall or uninstall the package that ships it."
            )
        folders.append(ConfigFolder(point.name, found[0]))
    return folders


def entries(folders: Sequence[ConfigFolder], group: str = "") -> Iterator[ConfigEntry]:
    """Every leaf under a group, sorted by group and name within each folder."""
    for folder in folders:
        root = folder.path / group if group else folder.path
        for path in sorted(root.rglob("*.yaml")):
            relative = path.relative_to(folder.path)
            if len(relative.parts) > 1 and not path.name.startswith("_"):
                yield ConfigEntry(relative.parent.as_posix(), path.stem, _summary(path), folder.owner, path)


def names(folders: Sequence[ConfigFolder], group: str) -> list[str]:
    """The leaves directly in a group."""
    return sorted({entry.name for entry in entries(folders, group) if entry.group == group})


def groups(folders: Sequence[ConfigFolder]) -> set[str]:
    """Every folder that holds leaves."""
    return {entry.group for entry in entries(folders)}


def _summary(path: Path) -> str:
    """The first comment line that is not a Hydra directive."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            text = line.strip()
            if text.startswith("#") and "@package" not in text:
                return text.lstrip("# ").rstrip()
            if text and not text.startswith("#"):
                break
    return ""
