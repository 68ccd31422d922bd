"""The dream and the policy of a small model as one HTML file that needs neither a server nor the network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rl_lab.errors import ConfigError
from rl_lab.export.acting import load_plain
from rl_lab.export.capture import Captured, Tensors, capture, recorded_noise
from rl_lab.export.graph_json import graph_json
from rl_lab.ui.dream.legend import action_legend, observation_names
from rl_lab.ui.dream.model import DreamModel
from rl_lab.ui.dream.session import DreamSession

STATIC = Path(__file__).parents[1] / "ui" / "static"
STARTS = 12  # moments of held-out episodes that the page begins in
CONTEXT = 5  # observations that the model has seen there
REFERENCE_STEPS = 20  # that the page computes again when it is opened, and compares
LARGEST = 40_000_000  # bytes of weights
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def export_dream(run: str | Path, out: Path, *, run_root: str | Path = "experiments", trust: bool = False) -> Path:
    """Write the page; its path."""
    loaded = load_plain(run, run_root=run_root, trust=trust)
    model = DreamModel(loaded, trust=trust)
    if model.decode is None:
        raise ConfigError(f"{loaded.run.path}: the model of '{loaded.workflow.name}' shows no observations to draw.")
    data = dream_data(model)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(data), encoding="utf-8")
    return out


@torch.no_grad()
def dream_data(model: DreamModel) -> dict[str, Any]:
    """Everything that the page needs: the step of the model as a graph, where to begin, and steps to compare with."""
    starts = [_start(model, episode) for episode in range(STARTS)]
    captured, step = capture_step(model, starts[0][0])
    graph = graph_json(captured)
    if len(graph["weights"]) * 3 // 4 > LARGEST:
        raise ConfigError(f"The model has more than {LARGEST // 4_000_000} million numbers: too many for one page.")
    context = model.workflow.context
    settings = model.loaded.settings.environment
    session = DreamSession(model)
    data = {
        "environment": settings.id,
        "run": model.loaded.run.path.name,
        "workflow": model.workflow.name,
        "checkpoint": model.checkpoint,
        "legend": action_legend(context.action_spec, session.world),
        "classes": list(context.action_spec.classes),
        "action_size": context.action_spec.encoded_size,
        "names": observation_names(dict(context.observation_spec), settings.id),
        "observations": [{"key": key, "kind": own.kind, "shape": list(own.shape)}
                         for key, own in context.observation_spec.items() if f"observation.{key}" in captured.outputs],
        "rate": session.natural_rate,
        "graph": graph,
        "starts": [{name: _numbers(value) for name, value in shown.items()} for _, shown in starts],
        "reference": _reference(model, captured, step, starts[0][0]),
    }  # fmt: skip
    session.close()
    return data


def capture_step(model: DreamModel, start: Any) -> tuple[Captured, Any]:
    """One step of the dream: (state, action) to the next state, what is seen of it, reward, continuation, value, and
    the action of the model's own policy there. Also the same as a plain function."""
    examples = state_tensors(start)
    _, shape = pytree.tree_flatten(start)
    names = [f"state.{index}" for index in range(shape.num_leaves)]

    def step(inputs: Tensors) -> Tensors:
        state = pytree.tree_unflatten([inputs.get(name) for name in names], shape)
        following = model.simulator.step(state, inputs["action"])
        outputs = state_tensors(following.state)
        outputs |= {"reward": following.reward, "continuation": following.continuation}
        return outputs | _shown(model, following.state)

    examples["action"] = torch.zeros(1, model.codec.encoded_size)
    examples["action"][0, 0] = 1.0
    return capture(step, examples), step


def state_tensors(state: Any) -> Tensors:
    """The tensors of a model's state by name; a part that the model leaves out has none."""
    leaves = pytree.tree_leaves(state)
    return {f"state.{index}": leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}


def _shown(model: DreamModel, state: Any) -> Tensors:
    """The tensors that the page draws for a state; images from 0 to 1."""
    assert model.decode is not None
    decoded = model.decode(state)
    found = {f"observation.{key}": value.float() / (255.0 if value.dtype == torch.uint8 else 1.0)
             for key, value in decoded.items()}  # fmt: skip
    if model.simulator.has_value:
        found["value"] = model.simulator.value(state)
    if model.simulator.has_policy:
        found["policy"] = model.simulator.policy(state)
    return found


def _start(model: DreamModel, episode: int) -> tuple[Any, Tensors]:
    """The model's state after the first observations of a held-out episode, played by the agent; and its picture."""
    session = DreamSession(model, episode=episode)
    session.options.driver, session.options.world = "agent", "game"
    for _ in range(CONTEXT):
        action = session.drivers.choose(None)
        if action is None:
            break
        session.drivers.remember(session.step(action))
    state = session.current.dream
    session.close()
    return state, state_tensors(state) | _shown(model, state)


def _reference(model: DreamModel, captured: Captured, step: Any, start: Any) -> dict[str, Any]:
    """Steps of the simulator itself with the noise that it drew; the captured graph must give the same."""
    names = [name for name in captured.inputs if name.startswith("state.")]
    state = state_tensors(start)
    steps = []
    generator = np.random.default_rng(0)
    for _ in range(REFERENCE_STEPS):
        action = _random_action(model, generator)
        with recorded_noise() as drawn:
            outputs = step({**state, "action": action})
        steps.append({"action": _numbers(action), "noise": [_numbers(value) for value in drawn.values],
                      "outputs": {name: _numbers(value) for name, value in outputs.items()}})  # fmt: skip
        state = {name: outputs[name] for name in names}
    return {"steps": steps}


def _random_action(model: DreamModel, generator: np.random.Generator) -> Tensor:
    spec = model.workflow.context.action_spec
    if spec.kind == "continuous":
        return torch.as_tensor(generator.uniform(-1, 1, (1, spec.encoded_size)), dtype=torch.float32)
    return model.encode(np.array([generator.integers(size) for size in spec.classes], np.int32))


def _numbers(value: Tensor) -> list[float]:
    return [float(f"{number:.8g}") for number in value.detach().double().reshape(-1).tolist()]


def render(data: Mapping[str, Any]) -> str:
    """The page with its script, its style and its data inside."""
    script = (STATIC / "exported.js").read_text(encoding="utf-8").replace("</script", "<\\/script")
    style = (STATIC / "exported.css").read_text(encoding="utf-8")
    title = escape(f"{data['environment']}: a dream – RL Lab")
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # no tag can end the script early
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{title}</title>'
        f'<link rel="icon" href="data:,"><style>{style}</style></head>\n<body><div id="app"></div>\n'
        f'<script type="application/json" id="dream">{text}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )
