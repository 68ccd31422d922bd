"""From overrides to a checked configuration: compose, look at the environment, fill in `_dims`, resolve, validate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rl_lab.components.controller_manager import DISTILL_ROLES, RANDOM_ROLE
from rl_lab.environments import EnvironmentFacts, inspect_environment
from rl_lab.experiment.config import compose, resolve, resolve_node, to_yaml
from rl_lab.experiment.dims import fill_dims
from rl_lab.experiment.parts import PartBuilder
from rl_lab.experiment.settings import SECTIONS
from rl_lab.experiment.validation import Settings, load_target, validate_parts, validate_settings
from rl_lab.orchestration.phase_records import PLACE
from rl_lab.orchestration.phases import Phase, PhaseNames, parse_phases
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import PhaseSteps

EARLY = (*SECTIONS, "environment", "run_root")  # what can be checked before the environment is known


@dataclass(frozen=True)
class Prepared:
    """A configuration that is ready to be built."""

    config: dict[str, Any]
    settings: Settings
    facts: EnvironmentFacts
    phases: tuple[Phase, ...]

    def to_yaml(self) -> str:
        return to_yaml(self.config)


def prepare(overrides: Sequence[str], *, config_dirs: Sequence[Path] = ()) -> Prepared:
    """Compose and check a new run's configuration."""
    return complete(compose(overrides, config_dirs=config_dirs))


def complete(config: DictConfig) -> Prepared:
    """Check a composed configuration, cheap things first, and fill in what the environment decides."""
    early = {str(key): resolve_node(config, str(key)) if key in EARLY else True for key in config}
    settings = validate_settings(early)
    facts = inspect_environment(settings.environment)
    fill_dims(config, facts.observation_spec, facts.action_spec, facts.max_episode_steps)
    resolved = resolve(config)
    resolved.update(
        {name: asdict(getattr(settings, name)) for name in SECTIONS}
    )  # numbers in their own type: 1e6, 10_000
    if "presets" in resolved:  # those that were not chosen have nothing to say about this run
        resolved["presets"] = {resolved["size"]: resolved["presets"][resolved["size"]]}
        resolved.pop("auto_size", None)
    validate_parts(resolved)
    return Prepared(resolved, settings, facts, phases_of(resolved))


def phases_of(config: Mapping[str, Any]) -> tuple[Phase, ...]:
    """`training.phases`, or the implicit one, checked against what the workflow and the data sources offer."""
    workflow = PartBuilder(config).make("workflow", config["workflow"])
    sources = config.get("data_sources") or {}
    kinds = {name: load_target(f"data_sources.{name}", node) for name, node in sources.items()}
    names = PhaseNames(
        update_hooks=workflow.update_hooks,
        other_hooks=workflow.other_hooks,
        named_hooks=_named_hooks(workflow, config),
        data_sources=tuple(sources),
        prefilled=[name for name, kind in kinds.items() if getattr(kind, "prefilled", False)],
        parts={name: kind.parts_of(sources[name]) for name, kind in kinds.items() if hasattr(kind, "parts_of")},
        read_only=[name for name, kind in kinds.items() if not getattr(kind, "takes_records", True)],
        roles=(RANDOM_ROLE, *(config.get("controllers") or {})),
        default_ratio=getattr(workflow, "updates_per_env_step", 1.0),
        evaluate_every=config["evaluation"]["every"],
    )
    phases = parse_phases(config["training"]["phases"], names)
    if isinstance(workflow, Workflow):  # anything else is refused when the run is built
        workflow.check_phases([_steps(index, phase) for index, phase in enumerate(phases)])
    return phases


def _steps(index: int, phase: Phase) -> PhaseSteps:
    hooks = tuple(hook.name for hook in phase.hooks)
    return PhaseSteps(f"{PLACE}[{index}]", phase.name, hooks, phase.options)


def _named_hooks(workflow: Workflow, config: Mapping[str, Any]) -> tuple[str, ...]:
    """`distill` needs a controller to teach."""
    teaches = not set(DISTILL_ROLES).isdisjoint(config.get("controllers") or {})
    return tuple(name for name in workflow.named_hooks if name != "distill" or teaches)
