"""The agent of a configuration: components, controllers and the workflow, on their device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.spaces import action_spec, observation_specs
from rl_lab.errors import ConfigError
from rl_lab.experiment.parts import PartBuilder, parameter_counts
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.base import Workflow


@dataclass(frozen=True)
class Model:
    """All parts that it takes to act, not yet bound to a run."""

    workflow: Workflow
    components: dict[str, nn.Module]
    controllers: ControllerManager
    observation_spec: dict[str, ObservationSpec]
    action_spec: ActionSpec
    builder: PartBuilder

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Components and controllers that hold parameters or buffers, by name."""
        parts = [*self.components.items(), *self.controllers.items()]
        return {name: part for name, part in parts if isinstance(part, nn.Module)}

    @property
    def parameters(self) -> dict[str, int]:
        return parameter_counts(self.components, dict(self.controllers.items()))


def _places(group: str, parts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(f"{group}.{name}", part) for name, part in parts.items()]


def build_model(config: Mapping[str, Any], device: torch.device) -> Model:
    """Build and move every part. The global torch stream decides the initial weights."""
    builder = PartBuilder(config)
    components, controllers = builder.group("components"), builder.group("controllers")
    clash = sorted(set(components) & set(controllers))
    if clash:
        raise ConfigError(f"'{clash[0]}' is both a component and a controller: their names must differ.")
    for place, part in [*_places("components", components), *_places("controllers", controllers)]:
        if not isinstance(part, nn.Module):
            raise ConfigError(
                f"{place}._target_ built a {type(part).__name__}, which is no part of a model (nn.Module)."
            )
        part.to(device)
    workflow = builder.make("workflow", config["workflow"])
    if not isinstance(workflow, Workflow):
        raise ConfigError(f"workflow._target_={config['workflow']['_target_']} is not a Workflow.")
    observation, action = config["_dims"]["observation"], config["_dims"]["action"]
    return Model(
        workflow,
        components,
        ControllerManager(controllers),
        observation_specs(observation),
        action_spec(action),
        builder,
    )
