"""A function of tensors as a graph of PyTorch's core operators, with every random draw as an input of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from rl_lab.errors import ConfigError

Tensors = dict[str, Tensor]

# What is drawn, by the function that draws it. Whatever else is random cannot be captured.
_DRAWS = {
    torch.Tensor.uniform_: "uniform",
    torch.Tensor.normal_: "normal",
    torch.Tensor.exponential_: "exponential",
    torch.rand: "uniform",
    torch.rand_like: "uniform",
    torch.randn: "normal",
    torch.randn_like: "normal",
}


class Noise(NamedTuple):
    """Standard noise that a call needs: uniform in [0, 1), normal, or exponential."""

    kind: str
    shape: tuple[int, ...]


class _Recorded(TorchFunctionMode):
    """Lets every draw happen and keeps it."""

    def __init__(self) -> None:
        self.kinds: list[Noise] = []
        self.values: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _DRAWS:
            self.kinds.append(Noise(_DRAWS[func], tuple(result.shape)))
            self.values.append(result.clone())
        return result


class _Given(TorchFunctionMode):
    """Answers every draw with a tensor that was handed in."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values = iter(values)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DRAWS:
            return next(self._values).clone()  # what is drawn may be written to
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded_noise() -> Iterator[_Recorded]:
    """Inside, what is drawn is kept: the inputs with which a captured graph must give the same."""
    with _Recorded() as record:
        yield record


@dataclass
class Captured:
    """`graph(*inputs, *noise)` returns the outputs in the order of `outputs`."""

    graph: fx.GraphModule
    inputs: list[str]
    outputs: list[str]
    noise: list[Noise]
    examples: Tensors = field(default_factory=dict)

    def __call__(self, inputs: Mapping[str, Tensor], noise: Sequence[Tensor]) -> Tensors:
        values = self.graph(*(inputs[name] for name in self.inputs), *noise)
        return dict(zip(self.outputs, values, strict=True))

    @property
    def noise_names(self) -> list[str]:
        return [f"noise_{index}" for index in range(len(self.noise))]


@torch.no_grad()
def capture(function: Callable[[Tensors], Tensors], examples: Mapping[str, Tensor]) -> Captured:
    """Trace a function from named tensors to named tensors. Shapes and branches are those of the examples."""
    from torch._decomp import core_aten_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(examples)
    with _Recorded() as record:
        outputs = function(dict(examples))
    result_names = list(outputs)

    def flat(*values: Tensor) -> list[Tensor]:
        with _Given(values[len(names) :]):
            found = function(dict(zip(names, values[: len(names)], strict=True)))
        return [found[name] for name in result_names]

    inputs = [*(examples[name] for name in names), *record.values]
    table: Any = {**core_aten_decompositions(), torch.ops.aten.max.dim: _max_along}
    decomposed = make_fx(flat, decomposition_table=table)(*inputs)
    # Decompositions write in place themselves: this comes after them.
    graph = make_fx(torch.func.functionalize(decomposed, remove="mutations"))(*inputs)
    _drop_identities(graph)
    _fold_constants(graph)
    _refuse_random(graph)
    return Captured(graph, names, result_names, record.kinds, dict(examples))


def _max_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The largest values and where they stand, as two operations that every reader of a graph knows."""
    return x.amax(dim, keepdim), x.argmax(dim, keepdim)


@contextmanager
def arrays_stay_tensors() -> Iterator[None]:
    """Inside, `Tensor.numpy()` returns the tensor: code that ends in NumPy can be traced to its end."""
    with patch.object(torch.Tensor, "numpy", lambda tensor, *_, **__: tensor):
        yield


def _drop_identities(graph: fx.GraphModule) -> None:
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def _fold_constants(graph: fx.GraphModule) -> None:
    """Compute what depends on weights alone once, now."""
    known: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(graph, node.target)
        elif node.op == "call_function" and all(entry in known for entry in node.all_input_nodes):
            arguments = fx.map_arg((node.args, node.kwargs), lambda entry: known[entry])
            value = node.target(*arguments[0], **arguments[1])
            if isinstance(value, Tensor):
                known[node] = value
    for number, (node, value) in enumerate(list(known.items())):
        if node.op == "get_attr" or all(user in known for user in node.users):
            continue
        name = f"_folded_{number}"
        graph.register_buffer(name, value.detach().clone())
        with graph.graph.inserting_before(node):
            node.replace_all_uses_with(graph.graph.get_attr(name))
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _refuse_random(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in tags:
            raise ConfigError(f"This agent draws with {node.target}, which has no form outside of PyTorch yet.")
