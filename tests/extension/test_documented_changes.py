"""The changes that docs/rssm.md shows take effect: an edited line, and a subclass that YAML names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tests.overrides import QUIET, TINY_DREAMER
from tests.runs import rows

from rl_lab.components.world_models.base import LatentState
from rl_lab.components.world_models.rssm import BlockRSSM
from rl_lab.experiment.train import run_training
from rl_lab.kernels import registry
from rl_lab.kernels.catalogue import KERNELS

PAGE = Path(__file__).parents[2] / "docs" / "rssm.md"
SIZES = {"embed_size": 5, "action_size": 2, "deter": 16, "hidden": 8, "groups": 2, "classes": 4, "blocks": 2}


def shown(page: str, start: str) -> str:
    """The code block of a page that begins with these words."""
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    return next(block for block in blocks if block.lstrip().startswith(start))


@pytest.fixture
def my_rssm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[BlockRSSM]:
    """`my_lab/rssm.py` as the page has it."""
    source = shown(PAGE.read_text(), "import torch.nn.functional")
    assert len(source.split("class GeluRSSM")[1].splitlines()) < 10
    (tmp_path / "my_gelu_lab.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_gelu_lab", raising=False)
    import my_gelu_lab  # type: ignore[import-not-found]

    return my_gelu_lab.GeluRSSM


def next_deter(model: BlockRSSM) -> torch.Tensor:
    torch.manual_seed(1)
    state = LatentState(torch.randn(3, model.deter), torch.randn(3, model.stoch_size))
    return model.advance(state, torch.randn(3, 2))[0]


def seeded(kind: type[BlockRSSM]) -> BlockRSSM:
    torch.manual_seed(0)
    return kind(**SIZES)


def test_a_subclass_changes_the_core_and_the_kernel_steps_aside(my_rssm: type[BlockRSSM]) -> None:
    assert not torch.allclose(next_deter(seeded(BlockRSSM)), next_deter(seeded(my_rssm)))
    kernel = next(kernel for kernel in KERNELS if kernel.name == "BlockRSSM.observe")
    assert registry.reason_against(kernel, seeded(my_rssm)) == "GeluRSSM overrides activate"
    assert registry.reason_against(kernel, seeded(BlockRSSM)) is None


def test_an_edited_line_changes_the_core_and_the_kernel_steps_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's edit, made in a copy of the class's file."""
    original = Path(sys.modules[BlockRSSM.__module__].__file__ or "").read_text()
    before, after = "        return F.silu(x)\n", shown(PAGE.read_text(), "def activate").splitlines()[-1] + "\n"
    assert original.count(before) == 1
    edited = tmp_path / "edited_rssm.py"
    edited.write_text(original.replace(before, after))
    monkeypatch.syspath_prepend(str(tmp_path))
    import edited_rssm  # type: ignore[import-not-found]

    plain = next_deter(seeded(BlockRSSM))
    monkeypatch.setattr(BlockRSSM, "activate", edited_rssm.BlockRSSM.activate)
    assert not torch.allclose(plain, next_deter(seeded(BlockRSSM)))
    kernel = next(kernel for kernel in KERNELS if kernel.name == "BlockRSSM.observe")
    assert registry.reason_against(kernel, seeded(BlockRSSM)) == "BlockRSSM.activate was edited"


MY_DREAMER = """
from rl_lab.workflows.dreamer_v3 import DreamerV3

class MyDreamer(DreamerV3):
    loss_names = (*DreamerV3.loss_names, "small_embedding")

    def world_model_losses(self, filtered, data):
        losses, metrics = super().world_model_losses(filtered, data)
        return losses | {"small_embedding": filtered.embed.square().mean()}, metrics
"""


def test_a_loss_with_a_new_name_is_scaled_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/dreamer_v3.md says: a name in the class, a scale in the configuration."""
    (tmp_path / "my_dreamer_lab.py").write_text(MY_DREAMER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("rl_lab.metrics.report.write_report", lambda folder: folder / "report.html")
    outcome = run_training([
        *TINY_DREAMER, *QUIET, "workflow._target_=my_dreamer_lab.MyDreamer", "evaluation.imagination=false",
        "logging.every=40", "+workflow.loss_scales.small_embedding=7.0", "evaluation.final_episodes=1",
        "evaluation.episodes=1", f"run_root={tmp_path}",
    ])  # fmt: skip
    scales = yaml.safe_load((outcome.folder / "config.yaml").read_text())["workflow"]["loss_scales"]
    seen = [row for row in rows(outcome.folder) if "train/loss/total" in row]
    assert seen
    for row in seen:
        total = sum(scale * row[f"train/loss/{name}"] for name, scale in scales.items())
        assert row["train/loss/total"] == pytest.approx(total, rel=1e-4)


def test_yaml_selects_the_subclass(my_rssm: type[BlockRSSM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run on it."""
    calls: set[str] = set()  # compiled code is made anew whenever a list that it reads has grown
    plain = my_rssm.activate
    monkeypatch.setattr(my_rssm, "activate", lambda self, x: calls.add("activate") or plain(self, x))
    outcome = run_training([
        "components.rssm._target_=my_gelu_lab.GeluRSSM", "training.total_timesteps=160", "evaluation.episodes=1",
        "data_sources.replay.start_after=100", "evaluation.final_episodes=1", "evaluation.video=false",
        "evaluation.imagination=false", "logging.console=off", "logging.tensorboard=false", f"run_root={tmp_path}",
    ])  # fmt: skip
    assert outcome.code == 0
    assert calls
