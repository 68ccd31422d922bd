"""The loops of the posterior scan for small models on the CPU, in float32: there a step costs its calls, not its
arithmetic, so each loop is one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_lab.components.representation_learners.posterior_scan import (
    NORM_EPS,
    Path,
    PathGradients,
    ScanInputs,
    ScanShape,
    ScanWeights,
    with_first,
)
from rl_lab.nn import host_kernels as kernels
from rl_lab.nn.host_mlp import Array
from rl_lab.nn.host_threads import share_rows
from rl_lab.nn.layer_kernels import is_small
from rl_lab.nn.math import in_float32_on_host
from rl_lab.nn.scan_kernels import scan_backward, scan_forward

SEQUENCES = 4  # for which it pays to wake a thread


class HostLoops:
    """`Loops` in kernels. Threads share the sequences."""

    def suit(self, inputs: ScanInputs, weights: ScanWeights) -> bool:
        """Whether the model is small."""
        return in_float32_on_host(weights.stoch) and is_small(*(weight for weight in weights if weight.ndim > 1))

    def forward(self, inputs: ScanInputs, weights: ScanWeights, shape: ScanShape) -> Path:
        (steps, batch, _), deter_size, (stoch_size, hidden) = inputs.keep.shape, len(weights.dense), weights.stoch.shape
        sizes = (deter_size, stoch_size, stoch_size, 2 * hidden, deter_size, 3 * deter_size, hidden)
        path = Path(*(inputs.deter.new_empty(steps, batch, size) for size in sizes))
        arrays, numbers = (_arrays(inputs), _arrays(weights), _arrays(path)), (*_numbers(shape), NORM_EPS)
        share_rows(lambda first, end: scan_forward(*arrays, *numbers, first, end), batch, least=SEQUENCES)
        return path

    def backward(
        self, grads: tuple[Tensor, Tensor, Tensor], inputs: ScanInputs, path: Path, weights: ScanWeights,
        shape: ScanShape,
    ) -> PathGradients:  # fmt: skip
        by_deter, by_stoch, by_logits = grads
        gradients = PathGradients(*(torch.empty_like(part) for part in (
            path.logits, path.posterior_pre, path.gates, path.core_pre, path.inputs_pre
        )))  # fmt: skip
        gradients.logits.copy_(by_logits)
        before = with_first(inputs.deter, path.deter) * inputs.keep
        given = [_array(part) for part in (by_deter, by_stoch, before, inputs.keep)]
        transposed = ScanWeights(*(weight.mT if weight.ndim > 1 else weight for weight in weights))
        arrays, numbers = (_arrays(transposed), _arrays(path), _arrays(gradients)), (*_numbers(shape), NORM_EPS)
        batch = inputs.keep.shape[1]
        share_rows(lambda first, end: scan_backward(*given, *arrays, *numbers, first, end), batch, least=SEQUENCES)
        return gradients


def host_outside_gradients(
    inputs: ScanInputs, path: Path, gradients: PathGradients, weights: ScanWeights, shape: ScanShape
) -> tuple[Tensor, Tensor, ScanWeights]:
    """`outside_gradients` with kernels."""

    def rows(x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    def by_block(x: Tensor) -> Tensor:  # [T, B, G·n] → [G, T·B, n]
        return rows(x).unflatten(-1, (shape.blocks, -1)).transpose(0, 1)

    before, stoch_before = (
        with_first(first, path_part) * inputs.keep
        for first, path_part in ((inputs.deter, path.deter), (inputs.stoch, path.stoch))
    )
    hidden = weights.stoch.shape[1]
    layers, layers_pre, inputs_norm = _normed(gradients.inputs, path.inputs_pre, weights.inputs_norm.view(2, hidden))
    core, core_pre, core_norm = _normed(gradients.core, path.core_pre, weights.core_norm[None])
    posterior, posterior_pre, posterior_norm = _normed(
        gradients.posterior, path.posterior_pre, weights.posterior_norm[None]
    )
    by_weight = ScanWeights(
        block=by_block(before).transpose(1, 2) @ by_block(core_pre),
        dense=torch.cat([
            rows(path.deter).t() @ rows(posterior_pre), rows(before).t() @ rows(layers_pre)[:, :hidden]
        ], -1),
        stoch=rows(stoch_before).t() @ rows(layers_pre)[:, hidden:],
        inputs=rows(layers).t() @ rows(core_pre),
        gates=by_block(core).transpose(1, 2) @ by_block(gradients.gates),
        gates_bias=rows(gradients.gates).sum(0),
        logits=rows(posterior).t() @ rows(gradients.logits),
        logits_bias=rows(gradients.logits).sum(0),
        inputs_bias=rows(layers_pre).sum(0),
        inputs_norm=inputs_norm.flatten(),
        core_norm=core_norm[0],
        posterior_norm=posterior_norm[0],
    )  # fmt: skip
    return core_pre, posterior_pre, by_weight


def _normed(grad: Tensor, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the norm and SiLU gave of `x`, and the gradients by `x` and by the scales [count, size] of its parts."""
    out, by_x, by_scales = torch.empty_like(x), torch.empty_like(x), torch.empty_like(scales)
    norms, size = _array(scales), scales.shape[1]
    given, seen, result, gradient = (_array(part).reshape(-1, size) for part in (grad, x, out, by_x))
    kernels.norm_silu_to(seen, norms, NORM_EPS, result)
    kernels.norm_silu_to_backward(given, seen, norms, NORM_EPS, gradient)
    kernels.norm_silu_scale_backward(given, seen, norms, NORM_EPS, by_scales.numpy())
    return out, by_x, by_scales


def _numbers(shape: ScanShape) -> tuple[int, int, float]:
    return shape.blocks, shape.classes, shape.unimix


def _array(tensor: Tensor) -> Array:
    return tensor.detach().contiguous().numpy()


def _arrays(tensors: ScanInputs | ScanWeights | Path | PathGradients) -> Any:
    """The same record, with arrays in the same memory."""
    return type(tensors)(*(_array(tensor) for tensor in tensors))  # type: ignore[arg-type]
