"""Composing: overrides, resolvers, groups, and the shapes that come from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from rl_lab.errors import ConfigError
from rl_lab.experiment import resolvers
from rl_lab.experiment.config import compose, resolve
from rl_lab.experiment.prepare import prepare
from rl_lab.experiment.validation import check_target, convert


def test_resolvers_do_arithmetic() -> None:
    """Sizes in YAML can be computed from other sizes."""
    resolvers.register()
    text = {
        "a": 3,
        "b": "${add:${a},${mul:2,5}}",
        "c": "${div:1,4}",
        "d": "${max:${a},${floordiv:9,2}}",
        "e": "${len:[1,2]}",
    }
    assert OmegaConf.to_container(OmegaConf.create(text), resolve=True) == {"a": 3, "b": 13, "c": 0.25, "d": 4, "e": 2}


def test_an_override_wins_over_the_experiment() -> None:
    """Values typed by the user come last, wherever they stand on the line."""
    config = compose(["workflow.horizon=7", "+experiment=dreamer_v3", "environment.id=Pendulum-v1"])
    assert config.workflow.horizon == 7
    assert config.environment.id == "Pendulum-v1"


@pytest.mark.parametrize("line", ["experiment=random", "+experiment=random", "++experiment=random"])
def test_an_experiment_can_be_named_in_any_hydra_spelling(line: str) -> None:
    """With or without the plus."""
    assert compose([line]).experiment.name == "random"


def test_a_group_is_swapped_with_one_line() -> None:
    """Another encoder is one override."""
    config = compose(["+experiment=dreamer_v3", "components/encoders@components.encoder=multi_key_impala", "size=1m"])
    assert config.components.encoder.image_encoder == "impala"


def test_a_folder_of_the_user_adds_experiments(tmp_path: Path) -> None:
    """--config-dir takes part in composition like the packaged groups."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# mine\ndefaults: [random, _self_]\nenvironment: {id: Acrobot-v1}\n"
    )
    config = compose(["+experiment=mine"], config_dirs=[tmp_path])
    assert (config.experiment.name, config.environment.id) == ("mine", "Acrobot-v1")


def test_dims_come_from_the_environment() -> None:
    """Nobody types a shape; one that is typed and right is accepted."""
    prepared = prepare(["+experiment=random", "environment.id=Pendulum-v1", "_dims.action_size=1"])
    assert prepared.config["_dims"]["observation"]["vector"]["shape"] == [3]
    assert prepared.config["_dims"]["action"] == {"kind": "continuous", "shape": [1], "classes": [], "mask": None}


def test_numbers_keep_their_type() -> None:
    """1e3 env steps are a whole number in the resolved configuration."""
    config = prepare(["+experiment=random", "environment.id=CartPole-v1", "training.total_timesteps=1e3"]).config
    assert config["training"]["total_timesteps"] == 1000
    assert isinstance(config["training"]["total_timesteps"], int)


def test_the_default_ratio_follows_from_the_train_ratio() -> None:
    """train_ratio counts replayed records per env step; a batch has batch_size × sequence_length of them."""
    phases = prepare(["size=tiny", "training.phases=null", "workflow.train_ratio=64"]).phases
    update = next(hook for hook in phases[0].hooks if hook.name == "update")
    config = compose([])
    assert update.ratio is not None
    assert float(update.ratio) == 64 / (config.workflow.batch_size * config.workflow.sequence_length)


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [(3, int, 3), (1e6, int, 1_000_000), (2, float, 2.0), (None, int | None, None), ("a", Literal["a", "b"], "a"),
     ([1, 2], tuple[int, int], (1, 2)), (True, bool, True), ("auto", int | Literal["auto"], "auto")],
)  # fmt: skip
def test_values_take_the_declared_type(value: Any, hint: Any, expected: Any) -> None:
    """YAML's types become the constructor's."""
    converted = convert("here", value, hint)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint"),
    [("3", int), (2.5, int), (True, int), (1, bool), ("c", Literal["a", "b"]), (None, str), ("x", list[int])],
)
def test_wrong_types_are_refused(value: Any, hint: Any) -> None:
    """true is not 1, and a text is not a number."""
    with pytest.raises(ConfigError, match="here must be"):
        convert("here", value, hint)


class Base:
    def __init__(self, *, width: int = 1) -> None: ...


class Derived(Base):
    def __init__(self, *, depth: int = 1, **arguments: Any) -> None:
        super().__init__(**arguments)


def test_arguments_of_base_classes_are_known() -> None:
    """A class that hands `**arguments` on takes what its base takes, and nothing else."""
    target = f"{__name__}.Derived"
    check_target("part", {"_target_": target, "depth": 2, "width": 3})
    with pytest.raises(ConfigError, match=r"part.widht.*'width'"):
        check_target("part", {"_target_": target, "widht": 3})


def test_resolve_names_the_place_of_a_broken_interpolation() -> None:
    """The key that holds the interpolation is in the message."""
    with pytest.raises(ConfigError, match=r"evaluation\.every"):
        resolve(compose(["+experiment=random", "evaluation.every=${no.such}"]))
