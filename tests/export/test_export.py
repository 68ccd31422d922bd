"""Agents and dreams outside of RL Lab: what is written does what the run does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl_lab.errors import ConfigError
from rl_lab.export.acting import export_policy, load_plain
from rl_lab.export.capture import capture, recorded_noise
from rl_lab.export.dream_page import REFERENCE_STEPS, capture_step, dream_data, render
from rl_lab.export.graph_json import graph_json
from rl_lab.ui.dream.model import DreamModel
from rl_lab.ui.dream.session import DreamSession


def test_draws_become_inputs() -> None:
    """The captured graph gives the same for the noise that was drawn, and draws nothing itself."""
    weight = torch.randn(3, 3)

    def function(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        noise = torch.empty(2, 3).uniform_().log_().neg_()
        return {"y": (inputs["x"] @ weight.t()) / noise + torch.randn_like(inputs["x"])}

    captured = capture(function, {"x": torch.ones(2, 3)})
    assert [noise.kind for noise in captured.noise] == ["uniform", "normal"]
    x = torch.randn(2, 3)
    with recorded_noise() as drawn:
        expected = function({"x": x})["y"]
    torch.testing.assert_close(captured({"x": x}, drawn.values)["y"], expected)


def test_what_cannot_be_handed_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="multinomial"):
        capture(lambda inputs: {"y": torch.multinomial(inputs["p"], 1)}, {"p": torch.ones(2, 3)})


@pytest.mark.parametrize("kind", ["torchscript", "onnx"])
def test_policies_choose_the_agents_actions(dreamer_run: Path, tmp_path: Path, kind: str) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    done = export_policy(dreamer_run, kind, tmp_path / f"agent.{kind}")  # type: ignore[arg-type]
    assert done.steps > 5
    assert done.difference < 1e-4
    described = json.loads(done.description.read_text())
    assert {entry["name"] for entry in described["inputs"]} >= {"observation.vector", "state.deter", "state.action"}


def test_a_captured_step_is_the_simulators(dreamer_run: Path) -> None:
    model = DreamModel(load_plain(dreamer_run))
    session = DreamSession(model)
    captured, step = capture_step(model, session.current.dream)
    inputs = dict(captured.examples)
    for _ in range(5):
        with torch.no_grad(), recorded_noise() as drawn:
            expected = step(inputs)
        found = captured(inputs, drawn.values)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
        inputs = {name: expected[name] for name in inputs if name != "action"} | {"action": inputs["action"]}
    assert graph_json(captured)["inputs"] == captured.inputs


def test_the_page_stands_alone(dreamer_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file: no address in it is loaded, and data cannot end its script."""
    monkeypatch.setattr("rl_lab.export.dream_page.STARTS", 2)
    data = dream_data(DreamModel(load_plain(dreamer_run)))
    assert len(data["reference"]["steps"]) == REFERENCE_STEPS
    html = render({**data, "environment": "</script><script>alert(1)</script>"})
    assert html.count("</script>") == 2
    assert "<script>alert" not in html
    assert "src=" not in html.split("<script", 1)[0]
    assert "default-src 'none'" in html


def test_commands(rl_lab: Callable[..., tuple[int, str, str]], dreamer_run: Path, random_run: Path) -> None:
    code, out, _ = rl_lab("export", dreamer_run, "--torchscript", "--out", "agent.pt")
    assert code == 0
    assert "largest difference" in out
    code, _, err = rl_lab("export", random_run, "--web")
    assert code == 2
    assert "no world model" in err
    assert rl_lab("export", dreamer_run)[0] == 2
