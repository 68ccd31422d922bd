"""A captured graph as JSON and one array of weights: what the page of an exported dream computes with."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import fx

from rl_lab.errors import ConfigError
from rl_lab.export.capture import Captured

# What web/src/exported/graph.ts computes. Others are refused here, not in a visitor's browser.
_NAMES = """
abs add sub mul div neg exp log log1p expm1 sqrt rsqrt reciprocal sigmoid tanh relu gelu sin cos sign floor round pow
clamp clamp_min clamp_max maximum minimum ge gt le lt eq ne logical_not logical_and logical_or where leaky_relu elu
softplus mean sum amax amin argmax cumsum mm addmm bmm convolution native_layer_norm _softmax _log_softmax embedding
gather index_select view reshape _unsafe_view permute transpose t expand squeeze unsqueeze slice select split_with_sizes
getitem cat stack flip repeat constant_pad_nd clone alias detach _to_copy contiguous copy arange full zeros ones empty
full_like zeros_like ones_like scalar_tensor
"""
OPERATORS = frozenset(_NAMES.split())


def graph_json(captured: Captured) -> dict[str, Any]:
    """Inputs, noise, nodes in order of computation, outputs, and all constants in base64 (float32)."""
    constants: list[np.ndarray] = []
    numbers: dict[fx.Node, int] = {}
    nodes: list[dict[str, Any]] = []
    outputs: list[int] = []
    offset = 0
    for node in captured.graph.graph.nodes:
        if node.op == "output":
            outputs = [numbers[entry] for entry in node.args[0]]
            continue
        numbers[node] = len(nodes)
        if node.op == "placeholder":
            nodes.append({"op": "input"})
        elif node.op == "get_attr":
            value = getattr(captured.graph, node.target)
            array = value.detach().to(torch.float32).cpu().numpy()
            constants.append(array.reshape(-1))
            nodes.append({"op": "constant", "shape": list(array.shape), "offset": offset})
            offset += array.size
        else:
            nodes.append(_call(node, numbers))
    data = np.concatenate(constants) if constants else np.zeros(0, np.float32)
    return {
        "inputs": captured.inputs,
        "noise": [{"kind": noise.kind, "shape": list(noise.shape)} for noise in captured.noise],
        "nodes": nodes,
        "outputs": dict(zip(captured.outputs, outputs, strict=True)),
        "weights": base64.b64encode(data.astype("<f4").tobytes()).decode(),
    }


def _call(node: fx.Node, numbers: dict[fx.Node, int]) -> dict[str, Any]:
    name = node.target.__name__ if not hasattr(node.target, "_schema") else node.target._schema.name.split("::")[-1]  # type: ignore[union-attr]
    if name not in OPERATORS:
        raise ConfigError(f"The page of an exported dream cannot compute {node.target} yet. Export a smaller model.")
    arguments: list[Any] = list(node.args)
    schema = getattr(node.target, "_schema", None)
    if schema is not None:  # named arguments take their places, so that the page sees one form
        for place, own in enumerate(schema.arguments):
            if own.name in node.kwargs and not own.kwarg_only:
                arguments += [None] * (place + 1 - len(arguments))
                arguments[place] = node.kwargs[own.name]
    alpha = node.kwargs.get("alpha")
    call = {"op": name, "args": [_plain(value, numbers) for value in arguments]}
    return call if alpha is None else {**call, "alpha": alpha}


def _plain(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"node": numbers[value]}
    if isinstance(value, list | tuple):
        return [_plain(entry, numbers) for entry in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    return str(value)  # a dtype, a device, a memory format: numbers are all float32 there
