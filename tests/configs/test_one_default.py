"""A setting has its default in one place: what the packaged configuration always sets has none in Python."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from tests.packaged import CONFIGS

PRESET = re.compile(r"\$\{preset:\w+,([^{}]*)\}")

# Targets that still have defaults in both places. It only shrinks.
STILL_TWICE: set[str] = {
    "rl_lab.components.actors.bc.BCPolicy",
    "rl_lab.components.actors.dreamer.make_actor",
    "rl_lab.components.actors.flat.FlatController",
    "rl_lab.components.actors.held_actions.HeldActions",
    "rl_lab.components.critics.dreamer.ReturnNormalizer",
    "rl_lab.components.critics.dreamer.ScalarCritic",
    "rl_lab.components.critics.dreamer.TwoHotCritic",
    "rl_lab.components.decoders.ContrastiveModel",
    "rl_lab.components.decoders.MultiKeyDecoder",
    "rl_lab.components.dynamics.mdn_rnn.MDNRNN",
    "rl_lab.components.encoders.MultiKeyEncoder",
    "rl_lab.components.encoders.QuantizedImages",
    "rl_lab.components.evolution.cma_es.CMAES",
    "rl_lab.components.evolution.openai_es.OpenAIES",
    "rl_lab.components.muzero.dynamics.Dynamics",
    "rl_lab.components.muzero.model.Projection",
    "rl_lab.components.muzero.model.make_slow_model",
    "rl_lab.components.muzero.prediction.PolicyValueNetwork",
    "rl_lab.components.muzero.representation.make_representation",
    "rl_lab.components.planners.mcts.MCTS",
    "rl_lab.components.predictors.ContinuePredictor",
    "rl_lab.components.predictors.RewardEnsemble",
    "rl_lab.components.predictors.RewardPredictor",
    "rl_lab.components.representations.Autoencoder",
    "rl_lab.components.representations.Contrastive",
    "rl_lab.components.representations.ConvVAE",
    "rl_lab.components.world_models.dense_rssm.DenseCategoricalRSSM",
    "rl_lab.components.world_models.dense_rssm.GaussianRSSM",
    "rl_lab.components.world_models.rssm.BlockRSSM",
    "rl_lab.components.world_models.transformer_ssm.TransformerSSM",
    "rl_lab.data_sources.offline.OfflineSource",
    "rl_lab.data_sources.replay.SequenceReplay",
    "rl_lab.nn.flat_adam.FlatAdam",
    "rl_lab.nn.optimizers.LaProp",
    "rl_lab.workflows.bc.BehaviourCloning",
    "rl_lab.workflows.muzero.MuZero",
    "rl_lab.workflows.world_models.WorldModels",
}


def settings(path: Path) -> dict[str, Any]:
    """Keys and values of a file, with those of the files beside it that it is based on."""
    node = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(node, dict)
    result: dict[str, Any] = {}
    for entry in node.pop("defaults", ()):
        if isinstance(entry, str) and (base := path.with_name(f"{entry}.yaml")).is_file() and entry != "_self_":
            result |= settings(base)
    return result | {str(key): value for key, value in node.items()}


@cache
def by_target() -> dict[str, list[dict[str, Any]]]:
    """Target → the settings of each of its packaged files."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(CONFIGS.rglob("*.yaml")):
        if path.parent.name == "experiment" or path.parent == CONFIGS:
            continue
        keys = settings(path)
        if "_target_" in keys:
            found.setdefault(keys["_target_"], []).append({key: keys[key] for key in keys if key != "_target_"})
    return found


def load(target: str) -> Callable[..., Any]:
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


def twice() -> dict[str, list[str]]:
    """Target → its settings that have a default in Python though every packaged file of it sets them."""
    result = {}
    for target, files in by_target().items():
        parameters = inspect.signature(load(target)).parameters
        always = set.intersection(*(set(file) for file in files))
        names = [name for name in sorted(always & parameters.keys()) if parameters[name].default is not inspect._empty]
        if names:
            result[target] = names
    return result


def test_no_setting_has_two_defaults() -> None:
    """Where both exist, they drift apart; the configuration is the one that users see."""
    new = {target: names for target, names in twice().items() if target not in STILL_TWICE}
    assert not new, f"the packaged configuration always sets these: remove their defaults in Python: {new}"


def test_the_list_of_exceptions_is_not_longer_than_needed() -> None:
    """A target that was mended is taken off the list."""
    assert not STILL_TWICE - twice().keys()


def plain(value: Any) -> Any:
    """A packaged value as Python has it; of `${preset:units,256}` what stands there without a preset."""
    if isinstance(value, str) and (preset := PRESET.fullmatch(value)):
        value = yaml.safe_load(preset[1])
    return tuple(value) if isinstance(value, list) else value


def test_what_still_stands_twice_does_not_drift() -> None:
    """The default in Python is one that a packaged file has; left out are None, and what follows from other settings:
    `${workflow.discount}`."""
    drifted = {}
    for target, names in twice().items():
        parameters, files = inspect.signature(load(target)).parameters, by_target()[target]
        for name in names:
            default, values = parameters[name].default, [plain(file[name]) for file in files]
            follows = any(isinstance(value, str) and value.startswith(("${", "@")) for value in values)
            if default is not None and not follows and default not in values:
                drifted[f"{target}.{name}"] = default, values
    assert not drifted, f"(in Python, in YAML): {drifted}"
