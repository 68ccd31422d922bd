"""Building: parts that refer to each other, optimisers, the plan, and the parameter counts of the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl_lab.errors import ConfigError
from rl_lab.experiment.config import compose, resolve
from rl_lab.experiment.dims import dims_of
from rl_lab.experiment.model import Model, build_model
from rl_lab.experiment.parts import PartBuilder, build_optimizers
from rl_lab.experiment.plan import require_room
from rl_lab.specs import ActionSpec, ObservationSpec

VECTOR = {"vector": ObservationSpec("vector", (24,), "float32")}
IMAGE = {"image": ObservationSpec("image", (64, 64, 3), "uint8")}


def model_of(size: str, observation: dict[str, ObservationSpec], action: ActionSpec, *more: str) -> Model:
    config = compose(["+experiment=dreamer_v3", f"size={size}", *more])
    config._dims = dims_of(observation, action)
    return build_model(resolve(config), torch.device("cpu"))


def test_size1m_has_the_parameters_of_the_reference() -> None:
    """A 24-dim vector and 6 continuous actions: 640,867, the slow critic left out, in seven parts."""
    counts = model_of("1m", VECTOR, ActionSpec("continuous", (6,))).parameters
    assert counts == {
        "encoder": 10_112, "rssm": 364_416, "decoder": 51_096, "reward": 57_663, "continue": 41_153,
        "policy": 50_316, "critic": 66_111,
    }  # fmt: skip
    assert sum(counts.values()) == 640_867


@pytest.mark.parametrize(("actions", "total"), [(6, 10_492_616), (18, 10_498_772)])
def test_size12m_has_the_parameters_of_the_reference(actions: int, total: int) -> None:
    """64×64×3 images and discrete actions."""
    assert sum(model_of("12m", IMAGE, ActionSpec("discrete", (1,), (actions,))).parameters.values()) == total


class Source(nn.Module):
    def __init__(self, *, size: int) -> None:
        super().__init__()
        self.size = size
        self.layer = nn.Linear(size, 1)


class User(nn.Module):
    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.width = width


def node(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{name}", **arguments}


def test_a_part_reads_sizes_off_another_one() -> None:
    """The order in the file does not matter."""
    config = {"components": {"user": node("User", width="@controllers.source.size")},
              "controllers": {"source": node("Source", size=3)}}  # fmt: skip
    assert PartBuilder(config).group("components")["user"].width == 3


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("@components.sorce.size", "components.source"),
        ("@components.source.sizes", "'sizes'"),
        ("@components.user.width", "circle"),
    ],
)
def test_a_wrong_reference_is_explained(reference: str, words: str) -> None:
    """Unknown parts, unknown attributes and circles."""
    config = {"components": {"user": node("User", width=reference), "source": node("Source", size=3)}}
    with pytest.raises(ConfigError, match=words):
        PartBuilder(config).group("components")


def test_an_optimizer_takes_the_modules_it_names() -> None:
    """`modules` is all, or a list of names; a name that does not exist gets the nearest one."""
    modules = {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}
    builder = PartBuilder({})

    def build(chosen: Any) -> torch.optim.Optimizer:
        config = {"optimizers": {"main": {"_target_": "torch.optim.SGD", "lr": 0.1, "modules": chosen}}}
        return build_optimizers(config, builder, modules)["main"]

    assert len(build("all").param_groups[0]["params"]) == 4
    assert build(["two"]).param_groups[0]["params"][0] is modules["two"].weight
    with pytest.raises(ConfigError, match="'two'"):
        build(["tow"])


def test_what_cannot_fit_is_refused(tmp_path: Path) -> None:
    """The message says how much is needed and how much there is."""
    with pytest.raises(ConfigError, match=r"needs .* GiB of RAM"):
        require_room({"RAM": 2**60, "GPU": 0, "disk": 0}, torch.device("cpu"), tmp_path)


def test_a_run_leaves_its_evidence(dreamer_run: Path) -> None:
    """The run directory holds what DESIGN promises, and the plan names the encoder of each key."""
    names = {path.name for path in dreamer_run.iterdir()}
    assert {
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "plan.txt",
        "report.html",
    } <= names
    assert (dreamer_run / "imagination" / "picture.png").is_file()
    plan = (dreamer_run / "plan.txt").read_text()
    assert "encoder: vector → symlog → MLPEncoder" in plan
    assert "train (online): until 120 env steps" in plan
    info = json.loads((dreamer_run / "run.json").read_text())
    assert info["status"] == "completed"
    assert info["parameters"]["total"] == sum(count for name, count in info["parameters"].items() if name != "total")
    summary = json.loads((dreamer_run / "summary.json").read_text())
    assert summary["env_steps"] == 120
    assert summary["updates"] > 0
