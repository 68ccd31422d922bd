"""A whole tree search in MuZero's vector model as one compiled call (Numba): walks, dynamics, reward, policy and value.

Every root is a column: products of weights and states are faster so than those of states and weights, most of all
with few roots. They are BLAS calls; the weights are copied when a search begins.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import nn
from torch.nn.utils import parameters_to_vector

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
    is_vector = len(model.representation.latent_shape) == 1 and model.dynamics.lstm is None
    if not is_vector or reason_against(SEARCHED_MODEL, model) or (parameters := _parameters(model)) is None:
        return False
    (roots, size), layout = state.latent.shape, parameters[1]
    latents = torch.empty(tree.simulations + 1, size, roots).numpy()  # a column for each root
    latents[0] = state.latent.t().numpy()
    discounts = np.full(roots, planner.discount if planner.players == 1 else -planner.discount, np.float32)
    # Where a simulation computes: what is given to the dynamics, reward, value, each layer's outputs, sums of columns.
    shapes = (size + tree.actions, roots), roots, roots, (len(layout), layout[:, 1].max(), roots), (2, roots)
    space = tuple(torch.empty(shape).numpy() for shape in shapes)  # unlike NumPy's, they begin at a line of the cache
    compiled = search_gumbel if walker.is_gumbel else search_puct
    compiled(discounts, *walker.arguments, parameters, latents, space)
    tree.size = tree.simulations + 1
    return True


def _parameters(model: Any) -> tuple[np.ndarray, ...] | None:
    """The arrays of a model that `advance` works on: all weights in one vector, where each layer's lie in it, which
    layers belong to which of the five networks, and the bins of reward and value. They are of one kind for every size
    and depth, so that one compiled version serves all. None where layers are of other kinds or orders than `MLP`'s."""
    dynamics, prediction = model.dynamics, model.prediction
    networks = (dynamics.trunk, dynamics.head, prediction.trunk, prediction.policy_head, prediction.value_head)
    weights, layout, starts, size = list[torch.Tensor](), list[list[int]](), [0], 0
    for network in networks:
        if not re.fullmatch("(L(N?R)?)*", "".join(map(_kind, network))):
            return None
        for part in network:
            if isinstance(part, nn.ReLU):
                layout[-1][-1] = 1
                continue
            if isinstance(part, nn.Linear):  # weight, outputs, inputs, bias, gain and size of a norm, whether ReLU
                layout.append([size, *part.weight.shape, size + part.weight.numel(), 0, 0, 0])
            else:
                layout[-1][4:6] = size, len(part.weight)
            weights += [part.weight, part.bias]
            size += part.weight.numel() + len(part.bias)
        starts.append(len(layout))
    bins = dynamics.support.bins.numpy(), prediction.support.bins.numpy()
    return parameters_to_vector(weights).detach().numpy(), np.array(layout), np.array(starts), *bins


def _kind(part: nn.Module) -> str:
    """One letter for each layer that is compiled; ? for one with other settings."""
    if isinstance(part, nn.ReLU):
        return "R"
    if getattr(part, "bias", None) is None or part.weight.dtype != torch.float32:
        return "?"
    return "L" if isinstance(part, nn.Linear) else "N" if part.eps == NORM_EPSILON else "?"


@njit(**JIT)
def _activate(x, bias, norm, relu, numbers):
    """Bias, norm and ReLU of every column, in place."""
    (size, columns), normed, lowest = x.shape, len(norm[0]) > 0, np.float32(0.0 if relu else -np.inf)
    (gain, shift), mean, scale = norm, numbers[0], numbers[1]
    mean[:], scale[:], share = 0.0, NORM_EPSILON, np.float32(1.0 / size)
    for row in range(size):
        for column in range(columns):
            x[row, column] += bias[row]
            mean[column] += x[row, column] * share
    if normed:
        for row in range(size):
            for column in range(columns):
                scale[column] += (x[row, column] - mean[column]) ** 2 * share
        for column in range(columns):
            scale[column] = np.float32(1.0) / np.sqrt(scale[column])
    for row in range(size):
        for column in range(columns):
            if normed:
                x[row, column] = (x[row, column] - mean[column]) * scale[column] * gain[row] + shift[row]
            x[row, column] = max(x[row, column], lowest)


@njit(**COUNTING)
def _mlp(x, weights, layout, first, last, room, numbers):
    """The layers first … last - 1 on columns x; the outputs of each lie in its part of `room`."""
    for layer in range(first, last):
        weight, outputs, inputs, bias, gain, normed, relu = layout[layer]
        y, shift = room[layer, :outputs], gain + normed
        np.dot(weights[weight : weight + outputs * inputs].reshape(outputs, inputs), x, y)
        norm = weights[gain:shift], weights[shift : shift + normed]
        _activate(y, weights[bias : bias + outputs], norm, relu, numbers)
        x = y
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
def _means(logits, bins, out, numbers):
    """The inverse transform of the expected bin of each column."""
    size, columns = logits.shape
    highest, total = numbers[0], numbers[1]
    highest[:], total[:], out[:] = -np.inf, 0.0, 0.0
    for row in range(size):
        for column in range(columns):
            highest[column] = max(highest[column], logits[row, column])
    for row in range(size):
        for column in range(columns):
            weight = _exp(np.float64(logits[row, column] - highest[column]))
            total[column] += weight
            out[column] += weight * bins[row]
    for column in range(columns):
        y = np.float64(out[column]) / total[column]
        root = (np.sqrt(1.0 + 4.0 * EPSILON * (abs(y) + 1.0 + EPSILON)) - 1.0) / (2.0 * EPSILON)
        out[column] = np.sign(y) * (root * root - 1.0)


@njit(**COUNTING)
def advance(given, model, latent, reward, value, room, numbers):
    """From latents and actions [latent + action, columns] to what follows: latent, reward and value are filled in, the
    outputs of the policy [actions, columns] come back."""
    weights, layout, starts, reward_bins, value_bins = model
    size, columns = latent.shape
    change = _mlp(given, weights, layout, starts[0], starts[1], room, numbers)
    low, high = numbers[0], numbers[1]
    low[:], high[:] = np.inf, -np.inf
    for row in range(size):
        for column in range(columns):
            own = change[row, column] + given[row, column]
            latent[row, column] = own
            low[column], high[column] = min(low[column], own), max(high[column], own)
    for column in range(columns):
        high[column] = np.float32(1.0) / max(high[column] - low[column], np.float32(TINY))
    for row in range(size):
        for column in range(columns):
            latent[row, column] = (latent[row, column] - low[column]) * high[column]
    _means(_mlp(latent, weights, layout, starts[1], starts[2], room, numbers), reward_bins, reward, numbers)
    features = _mlp(latent, weights, layout, starts[2], starts[3], room, numbers)
    _means(_mlp(features, weights, layout, starts[4], starts[5], room, numbers), value_bins, value, numbers)
    return _mlp(features, weights, layout, starts[3], starts[4], room, numbers)


@njit(**JIT)
def _given(latents, node, action, given):
    """The latents of some nodes with the one-hots of their actions."""
    size = latents.shape[1]
    for row in range(len(given)):  # item by item: assigned slices take seconds to compile
        for column in range(given.shape[1]):
            one_hot = np.float32(row == size + action[column])
            given[row, column] = latents[node[column], row, column] if row < size else one_hot


@njit(**JIT)
def _priors(policy, prior):
    """The softmax of each column."""
    for column in range(policy.shape[1]):
        highest, total = policy[0, column], np.float32(0.0)
        for edge in range(1, len(policy)):
            highest = max(highest, policy[edge, column])
        for edge in range(len(policy)):
            prior[column, edge] = np.exp(policy[edge, column] - highest)
            total += prior[column, edge]
        for edge in range(len(policy)):
            prior[column, edge] /= total


@njit(**COUNTING)
def _extend(new, discounts, edges, bounds, chosen, links, learns_bounds, model, latents, space):
    """Take the chosen edges in the model and add what follows."""
    prior, (node, action) = edges[1], chosen
    given, reward, value, room, numbers = space
    _given(latents, node, action, given)
    policy = advance(given, model, latents[new], reward, value, room, numbers)
    _priors(policy, prior[:, new])
    trees.expand(new, (reward, discounts, policy.T, value), edges, bounds, chosen, links, learns_bounds)


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
