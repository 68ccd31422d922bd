"""A whole tree search in MuZero's vector model as one compiled call (Numba): walks, dynamics, reward, policy and value.

The products are BLAS calls; what lies between them is done while a row is in the cache. The weights are copied
when a search begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import nn

from rl_lab.kernels.catalogue import SEARCHED_MODEL
from rl_lab.kernels.cpu import mcts as trees
from rl_lab.kernels.registry import full_name, reason_against

SIMULATOR = "rl_lab.simulation.muzero.MuZeroSimulator"
JIT: dict[str, Any] = trees.JIT | {"fastmath": {"reassoc", "contract", "nsz"}}
COUNTING = JIT | {"_nrt": True}  # references, which products of arrays ask for
EPSILON = 1e-3  # of the value transform
TINY = 1e-5  # smallest range of a latent
NORM_EPSILON = 1e-5  # of LayerNorm


def supports_grow(planner: Any) -> str | None:
    """Why whole searches cannot be compiled for a planner; each model is looked at when it is searched in."""
    return None if planner.enumerates else "its actions are sampled"


def grow(planner: Any, tree: Any, rule: Any, state: Any) -> bool:
    """In place of the loop of `MCTS._grow`, where the model is MuZero's: all simulations in one call. False where
    something is not as the compiled search knows it; then nothing was done."""
    simulator, walker = planner.simulator, trees.walker(planner, tree, rule)
    if walker is None or full_name(type(simulator)) != SIMULATOR or not planner._predicts:
        return False
    model = simulator.model
    has_planes, has_prefix = len(model.representation.latent_shape) != 1, model.dynamics.lstm is not None
    if has_planes or has_prefix or reason_against(SEARCHED_MODEL, model):
        return False
    parameters = _parameters(model)
    if parameters[0].dtype != np.float32:
        return False
    latents = np.empty((tree.simulations + 1, *state.latent.shape), np.float32)
    latents[0] = state.latent.numpy()
    discounts = np.full(tree.roots, planner.discount if planner.players == 1 else -planner.discount, np.float32)
    compiled = search_gumbel if walker.is_gumbel else search_puct
    compiled(discounts, *walker.arguments, parameters, latents, _space(tree, parameters[1], latents))
    tree.size = tree.simulations + 1
    return True


def _parameters(model: Any) -> tuple[np.ndarray, ...]:
    """What `advance` needs of a model: all weights in one vector, where each layer's lie in it, which layers belong to
    which of the five networks, and the bins of reward and value. One kind of arrays for every size and depth, so that
    one compiled version serves all."""
    dynamics, prediction = model.dynamics, model.prediction
    networks = (dynamics.trunk, dynamics.head, prediction.trunk, prediction.policy_head, prediction.value_head)
    weights, layout, starts, size = list[torch.Tensor](), list[list[int]](), [0], 0
    for network in networks:
        for part in network:
            if isinstance(part, nn.Linear):  # weight, outputs, inputs, bias, then gain and shift of a norm
                layout.append([size, *part.weight.shape, size + part.weight.numel(), -1, -1])
            elif isinstance(part, nn.LayerNorm):
                layout[-1][4:] = [size, size + part.weight.numel()]
            else:
                continue
            weights += [part.weight.detach().flatten(), part.bias.detach()]
            size += weights[-2].numel() + weights[-1].numel()
        starts.append(len(layout))
    bins = dynamics.support.bins.numpy(), prediction.support.bins.numpy()
    return torch.cat(weights).numpy(), np.array(layout), np.array(starts), *bins


def _space(tree: Any, layout: np.ndarray, latents: np.ndarray) -> tuple[np.ndarray, ...]:
    """Where a simulation computes: what is given to the dynamics, logits, reward, value, and the outputs of each
    layer."""
    roots, actions = tree.roots, tree.actions
    given, outputs = (roots, latents.shape[2] + actions), (len(layout), roots * layout[:, 1].max())
    return tuple(np.empty(shape, np.float32) for shape in (given, (roots, actions), roots, roots, outputs))


@njit(**JIT)
def _activate(x, bias, gain, shift, relu):
    """Bias, norm and ReLU of every row, in place."""
    rows, size = x.shape
    for row in range(rows):
        for column in range(size):
            x[row, column] += bias[column]
        if gain.shape[0]:
            mean = np.float32(0.0)
            for column in range(size):
                mean += x[row, column]
            mean /= np.float32(size)
            variance = np.float32(0.0)
            for column in range(size):
                variance += (x[row, column] - mean) ** 2
            scale = np.float32(1.0) / np.sqrt(variance / np.float32(size) + np.float32(NORM_EPSILON))
            for column in range(size):
                x[row, column] = (x[row, column] - mean) * scale * gain[column] + shift[column]
        if relu:
            for column in range(size):
                x[row, column] = max(x[row, column], np.float32(0.0))


@njit(**COUNTING)
def _mlp(x, weights, layout, first, last, linear_output, room):
    """The layers first … last - 1 on rows x; the outputs of each lie in its row of `room`."""
    for layer in range(first, last):
        weight, outputs, inputs, bias, gain, shift = layout[layer]
        y = room[layer, : x.shape[0] * outputs].reshape(x.shape[0], outputs)
        np.dot(x, weights[weight : weight + outputs * inputs].reshape(outputs, inputs).T, y)
        x = y
        own_gain = weights[gain : gain + outputs] if gain >= 0 else weights[:0]
        own_shift = weights[shift : shift + outputs] if gain >= 0 else weights[:0]
        is_hidden = layer < last - 1 or not linear_output
        _activate(x, weights[bias : bias + outputs], own_gain, own_shift, is_hidden)
    return x


@njit(**JIT)
def _exp(x):
    """exp(x) of x ≤ 0 to 3e-8, without a branch or a call, so that a loop of it becomes vectors: a polynomial of
    x / 256, squared eight times."""
    x = (-80.0 if x < -80.0 else x) * (1.0 / 256.0)
    y = 1.0 / 5040.0 + x * (1.0 / 40320.0)
    y = 1.0 / 24.0 + x * (1.0 / 120.0 + x * (1.0 / 720.0 + x * y))
    y = 1.0 + x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * y)))
    for _ in range(8):
        y *= y
    return y


@njit(**JIT)
def _means(logits, bins, out):
    """The inverse transform of the expected bin of each row."""
    rows, size = logits.shape
    for row in range(rows):
        highest = logits[row, 0]
        for column in range(1, size):
            highest = max(highest, logits[row, column])
        total, mean = 0.0, 0.0
        for column in range(size):
            weight = _exp(np.float64(logits[row, column] - highest))
            total += weight
            mean += weight * bins[column]
        y = mean / total
        root = (np.sqrt(1.0 + 4.0 * EPSILON * (abs(y) + 1.0 + EPSILON)) - 1.0) / (2.0 * EPSILON)
        out[row] = np.sign(y) * (root * root - 1.0)


@njit(**COUNTING)
def advance(given, weights, layout, starts, reward_bins, value_bins, latent, reward, policy, value, room):
    """Latent and action [rows, latent + action] to what follows: latent, reward, policy outputs, value."""
    rows, size = latent.shape
    change = _mlp(given, weights, layout, starts[0], starts[1], True, room)
    for row in range(rows):
        low, high = np.float32(np.inf), np.float32(-np.inf)
        for column in range(size):
            own = change[row, column] + given[row, column]
            latent[row, column] = own
            low, high = min(low, own), max(high, own)
        scale = np.float32(1.0) / max(high - low, np.float32(TINY))
        for column in range(size):
            latent[row, column] = (latent[row, column] - low) * scale
    _means(_mlp(latent, weights, layout, starts[1], starts[2], True, room), reward_bins, reward)
    features = _mlp(latent, weights, layout, starts[2], starts[3], False, room)
    outputs = _mlp(features, weights, layout, starts[3], starts[4], True, room)
    for row in range(rows):
        for column in range(policy.shape[1]):
            policy[row, column] = outputs[row, column]
    _means(_mlp(features, weights, layout, starts[4], starts[5], True, room), value_bins, value)


@njit(**JIT)
def _given(latents, node, action, given):
    """The latents of some nodes with the one-hots of their actions."""
    size = latents.shape[2]
    for row in range(given.shape[0]):  # item by item: assigned slices take seconds to compile
        for column in range(size):
            given[row, column] = latents[node[row], row, column]
        for column in range(size, given.shape[1]):
            given[row, column] = np.float32(column == size + action[row])


@njit(**JIT)
def _priors(policy, prior):
    """The softmax of each row."""
    for row in range(policy.shape[0]):
        highest, total = policy[row, 0], np.float32(0.0)
        for edge in range(1, policy.shape[1]):
            highest = max(highest, policy[row, edge])
        for edge in range(policy.shape[1]):
            prior[row, edge] = np.exp(policy[row, edge] - highest)
            total += prior[row, edge]
        for edge in range(policy.shape[1]):
            prior[row, edge] /= total


@njit(**COUNTING)
def _extend(new, discounts, edges, bounds, chosen, links, learns_bounds, model, latents, space):
    """Take the chosen edges in the model and add what follows."""
    prior, (node, action) = edges[1], chosen
    given, policy, reward, value, room = space
    _given(latents, node, action, given)
    weights, layout, starts, reward_bins, value_bins = model
    advance(given, weights, layout, starts, reward_bins, value_bins, latents[new], reward, policy, value, room)
    _priors(policy, prior[:, new])
    trees.expand(new, (reward, discounts, policy, value), edges, bounds, chosen, links, learns_bounds)


@njit(**COUNTING)
def search_puct(discounts, edges, bounds, legal, rule, chosen, links, learns_bounds, model, latents, space):
    for new in range(1, len(latents)):
        trees.select_puct(edges, bounds, legal, rule, chosen)
        _extend(new, discounts, edges, bounds, chosen, links, learns_bounds, model, latents, space)


@njit(**COUNTING)
def search_gumbel(discounts, edges, bounds, legal, rule, chosen, links, learns_bounds, model, latents, space):
    for new in range(1, len(latents)):
        trees.select_gumbel(edges, bounds, legal, rule, chosen)
        _extend(new, discounts, edges, bounds, chosen, links, learns_bounds, model, latents, space)
