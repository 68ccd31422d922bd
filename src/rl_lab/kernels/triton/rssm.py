"""`BlockRSSM.observe` in bfloat16 on a GPU: one autograd function over all steps, a few fused kernels a step."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.kernels.graphs import compile_block
from rl_lab.kernels.triton.posterior_loops import SHARED, PosteriorLoops, backward_tables, precompile
from rl_lab.kernels.triton.posterior_scan import Path, ScanInputs, ScanShape, ScanWeights, weight_gradients


def supports_observe(rssm: Any) -> str | None:
    layers = (rssm.deter_layer, rssm.stoch_layer, rssm.action_layer, rssm.posterior_layer)
    if any(layer.activate is not F.silu for layer in layers):
        return "its layers have another activation than SiLU"
    if any(size % SHARED for size in (rssm.deter // rssm.blocks, rssm.stoch_size, rssm.hidden)):
        return f"its sizes are no multiples of {SHARED}"
    return None if rssm.compute_dtype == torch.bfloat16 else "the precision is not bfloat16"


def observe(
    rssm: Any, embed: Tensor, prev_action: Tensor, is_first: Tensor, initial: Any, noise: Tensor
) -> tuple[Any, Tensor]:
    """Filter sequences: (posterior states, posterior logits), batch first."""
    dtype = embed.dtype
    keep = (~is_first).t().unsqueeze(-1)
    action = (prev_action.transpose(0, 1) * keep).to(dtype)
    with torch.autocast(embed.device.type, enabled=False):
        weights, action_weight, embed_weight = _scan_weights(rssm, dtype)
        action = action / action.abs().clamp_min(1.0)
        layer = rssm.action_layer
        action = F.silu(layer.norm(F.linear(action, layer.linear.weight.to(dtype), layer.linear.bias.to(dtype))))
        action_part = action @ action_weight + rssm.core.bias.to(dtype)
        bias = rssm.posterior_layer.linear.bias.to(dtype)
        embed_part = F.linear(embed.transpose(0, 1), embed_weight.to(dtype), bias)
        inputs = ScanInputs(
            initial.deter.to(dtype), initial.stoch.to(dtype), keep.float(), action_part, embed_part, noise
        )
        deter, stoch, logits = PosteriorScan.apply(_shape(rssm), *inputs, *weights)
    states = type(initial)(deter.transpose(0, 1), stoch.transpose(0, 1))
    return states, rssm.grid(logits.transpose(0, 1))


@torch.no_grad()
def precompile_observe(rssm: Any, *, batch: int, dtype: torch.dtype) -> None:
    """Compile all kernels of `observe` for `batch` sequences."""
    weights, *_ = _scan_weights(rssm, dtype)
    precompile(weights, _shape(rssm), batch)


_compiled = cache(compile_block)


class PosteriorScan(torch.autograd.Function):
    """(deter, stoch, logits) of every step, from the parts that were computed outside the loop."""

    @staticmethod
    def forward(ctx: Any, shape: ScanShape, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors`: those of `ScanInputs`, then those of `ScanWeights`."""
        count = len(ScanInputs._fields)
        path = PosteriorLoops(ScanInputs(*tensors[:count]), ScanWeights(*tensors[count:]), shape).forward()
        ctx.shape = shape
        ctx.save_for_backward(*tensors, *path)
        return path.deter, path.stoch, path.logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        counts = len(ScanInputs._fields), len(ScanInputs._fields) + len(ScanWeights._fields)
        tensors = ctx.saved_tensors
        inputs, path = ScanInputs(*tensors[: counts[0]]), Path(*tensors[counts[1] :])
        weights = ScanWeights(*tensors[counts[0] : counts[1]])
        tables = _compiled(backward_tables)(path, weights, ctx.shape)
        gradients = PosteriorLoops(inputs, weights, ctx.shape).backward((grads[0], grads[1], grads[2]), path, tables)
        action_part, embed_part, by_weight = _compiled(weight_gradients)(inputs, path, gradients, weights, ctx.shape)
        by_input = ScanInputs(None, None, None, action_part, embed_part, None)  # type: ignore[arg-type]
        return None, *by_input, *by_weight


def _shape(rssm: Any) -> ScanShape:
    return ScanShape(rssm.blocks, rssm.groups, rssm.classes, rssm.unimix)


def _scan_weights(rssm: Any, dtype: torch.dtype) -> tuple[ScanWeights, Tensor, Tensor]:
    """The recurrent weights in the scan's layout and dtype; the action's share of the core layer, and the observation's
    share of the posterior layer. Shares are split off together, so that their gradients come back as one tensor."""
    posterior = rssm.posterior_layer.linear.weight
    own, shared = rssm.core.weight.split([rssm.deter // rssm.blocks, 3 * rssm.hidden], 1)
    from_deter, from_embed = posterior.split([rssm.deter, posterior.shape[1] - rssm.deter], 1)
    into_core = shared.permute(1, 0, 2).reshape(3 * rssm.hidden, rssm.deter).to(dtype)
    inputs, action = into_core.tensor_split([2 * rssm.hidden])
    weights = ScanWeights(
        block=own.to(dtype),
        dense=torch.cat([from_deter, rssm.deter_layer.linear.weight]).t().to(dtype),
        stoch=rssm.stoch_layer.linear.weight.t().to(dtype),
        inputs=inputs,
        gates=rssm.gates.weight.to(dtype),
        gates_bias=rssm.gates.bias.to(dtype),
        logits=rssm.posterior_logits.weight.t().to(dtype),
        logits_bias=rssm.posterior_logits.bias.to(dtype),
        inputs_bias=torch.cat([rssm.deter_layer.linear.bias, rssm.stoch_layer.linear.bias]),
        inputs_norm=torch.cat([rssm.deter_layer.norm.weight, rssm.stoch_layer.norm.weight]),
        core_norm=rssm.core_norm.weight,
        posterior_norm=rssm.posterior_layer.norm.weight,
    )
    return weights, action, from_embed
