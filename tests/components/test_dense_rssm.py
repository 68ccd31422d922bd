"""The dense RSSMs of PlaNet, Dreamer v1, v2 and v3-2023 against literal forms of their equations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.components.dense_models import (
    CLASSES,
    DETER,
    FORMS,
    GROUPS,
    HIDDEN,
    SIZES,
    STOCH,
    B,
    T,
    make_model,
    sequence,
)
from torch import Tensor

from rl_lab.components.world_models.base import StateSpaceModel
from rl_lab.components.world_models.dense_rssm import DenseCategoricalRSSM, GaussianRSSM

PUBLISHED = {"deter": 200, "hidden": 200, "stoch": 30}  # of PlaNet and Dreamer v1


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(form: str) -> StateSpaceModel:
    return make_model(form)


# The equations, from named weights ------------------------------------------------------------------------


def dense(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def layer_norm(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def hidden_layer(form: str, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    x = dense(weights, f"{name}.linear", x)
    if form == "planet":
        return x.clamp(min=0.0)
    if form == "dreamer_v3_2023":
        x = layer_norm(weights, f"{name}.norm", x)
        return x * torch.sigmoid(x)
    return torch.where(x > 0, x, x.exp() - 1.0)


def recurrence(form: str, weights: dict[str, Tensor], x: Tensor, h: Tensor) -> Tensor:
    if form == "planet":
        reset, update = torch.sigmoid(dense(weights, "cell.gates", torch.cat([x, h], -1))).split(DETER, -1)
        candidate = torch.tanh(dense(weights, "cell.candidate", torch.cat([x, reset * h], -1)))
        return update * h + (1.0 - update) * candidate
    if form == "dreamer_v1":
        own = x @ weights["cell.cell.weight_ih"].T + weights["cell.cell.bias_ih"]
        past = h @ weights["cell.cell.weight_hh"].T + weights["cell.cell.bias_hh"]
        (r, z, n), (rh, zh, nh) = own.split(DETER, -1), past.split(DETER, -1)
        update = torch.sigmoid(z + zh)
        return update * h + (1.0 - update) * torch.tanh(n + torch.sigmoid(r + rh) * nh)
    parts = layer_norm(weights, "cell.norm", dense(weights, "cell.gates", torch.cat([x, h], -1)))
    reset, candidate, update = parts.split(DETER, -1)
    candidate = torch.tanh(torch.sigmoid(reset) * candidate)
    update = torch.sigmoid(update - 1.0)
    return update * candidate + (1.0 - update) * h


def head(form: str, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    x = hidden_layer(form, weights, f"{name}.trunk.0", x)
    outputs = [dense(weights, f"{name}.outputs.{n}", x) for n in range(2) if f"{name}.outputs.{n}.weight" in weights]
    return torch.cat(outputs, -1)


def probabilities(form: str, outputs: Tensor) -> Tensor:
    probs = torch.softmax(outputs.reshape(*outputs.shape[:-1], GROUPS, CLASSES), -1)
    return 0.99 * probs + 0.01 / CLASSES if form == "dreamer_v3_2023" else probs


def sampled(form: str, outputs: Tensor, noise: Tensor) -> Tensor:
    if form in ("planet", "dreamer_v1"):
        mean, raw = outputs.split(STOCH, -1)
        return mean + (torch.log1p(raw.exp()) + 0.1) * noise
    index = (probabilities(form, outputs) / noise).argmax(-1)
    return F.one_hot(index, CLASSES).double().flatten(-2)


def reference(form: str, model: StateSpaceModel, data: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Deterministic states, samples and posterior outputs, one step and one line after the other."""
    weights = dict(model.named_parameters())
    h, z = data["initial"].deter, data["initial"].stoch
    start_h, start_z = torch.zeros(DETER).double(), torch.zeros(z.shape[-1]).double()
    if form == "dreamer_v3_2023":
        start_h = torch.tanh(weights["initial_deter"])
        best = probabilities(form, head(form, weights, "prior_head", start_h)).argmax(-1)
        start_z = F.one_hot(best, CLASSES).double().flatten()
    found = []
    for t in range(T):
        fresh = data["is_first"][:, t, None]
        h, z = torch.where(fresh, start_h, h), torch.where(fresh, start_z, z)
        action = torch.where(fresh, 0.0, data["prev_action"][:, t])
        if form == "dreamer_v3_2023":
            action = action / action.abs().clamp(min=1.0)
        x = hidden_layer(form, weights, "input_layer", torch.cat([z, action], -1))
        h = recurrence(form, weights, x, h)
        outputs = head(form, weights, "posterior_head", torch.cat([h, data["embed"][:, t]], -1))
        z = sampled(form, outputs, data["noise"][t])
        found.append((h, z, outputs))
    return tuple(torch.stack(parts, 1) for parts in zip(*found, strict=True))


def test_filtering_equals_the_equations(form: str, model: StateSpaceModel) -> None:
    """States, samples and parameters, with resets inside the sequence."""
    data = sequence(model)
    states, params = model.observe(**data)
    deter, stoch, outputs = reference(form, model, data)
    torch.testing.assert_close(states.deter, deter)
    torch.testing.assert_close(states.stoch, stoch)
    torch.testing.assert_close(params.reshape(outputs.shape), outputs)
    prior = head(form, dict(model.named_parameters()), "prior_head", deter)
    torch.testing.assert_close(model.prior(deter).reshape(outputs.shape), prior)


def test_gate_by_gate_a_gru_is_torchs_own() -> None:
    """With its gradients: the form that a GPU takes."""
    cell = FORMS["dreamer_v1"]().double().cell
    x, h = (torch.randn(B, size, dtype=torch.float64, requires_grad=True) for size in (HIDDEN, DETER))
    leaves = [x, h, *cell.parameters()]
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    results = [form(x, h) for form in (cell.cell, cell.by_gates)]
    torch.testing.assert_close(results[1], results[0])
    gradients = [torch.autograd.grad(result.sin().sum(), leaves) for result in results]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_acting_step_by_step_equals_filtering(model: StateSpaceModel) -> None:
    """`observe_step` from an empty memory, as an agent takes it, is the first step of a sequence that begins there."""
    data = sequence(model)
    data["is_first"] = torch.zeros(B, T, dtype=torch.bool)
    data["is_first"][:, 0] = True
    states, _ = model.observe(**data)
    state = model.initial(B)
    for t in range(T):
        action = data["prev_action"][:, t] * (t > 0)
        state, _ = model.observe_step(state, action, data["embed"][:, t], data["noise"][t])
        torch.testing.assert_close(state.deter, states.deter[:, t])


def test_normal_divergence_and_entropy() -> None:
    """Closed forms against torch's own."""
    model = FORMS["planet"]().double()
    left, right = (model.distribution(torch.randn(5, 2 * STOCH, dtype=torch.float64)) for _ in range(2))
    plain = [torch.distributions.Normal(item.mean, item.std) for item in (left, right)]
    expected = torch.distributions.kl_divergence(*plain).sum(-1)
    torch.testing.assert_close(model.divergence(left, right), expected)
    torch.testing.assert_close(model.entropy(left), plain[0].entropy().sum(-1))


def test_deviation_of_v2s_normal_latents() -> None:
    """2·sigmoid(s / 2) + 0.1."""
    model = GaussianRSSM(**SIZES, stoch=STOCH, std_form="sigmoid")
    params = torch.randn(5, 2 * STOCH)
    expected = 2.0 / (1.0 + torch.exp(-params[:, STOCH:] / 2.0)) + 0.1
    torch.testing.assert_close(model.distribution(params).std, expected)


@pytest.mark.parametrize(
    ("build", "by_hand"),
    [
        # input layer, GRU (two gates and the candidate), prior, posterior; embed 1024, 6 actions.
        (
            lambda: GaussianRSSM(embed_size=1024, action_size=6, **PUBLISHED),
            (36 * 200 + 200) + 3 * (400 * 200 + 200) + (200 * 200 + 200) + (1224 * 200 + 200) + 2 * (200 * 60 + 60),
        ),
        # torch's GRU has two biases a gate.
        (
            lambda: GaussianRSSM(
                embed_size=1024, action_size=6, **PUBLISHED, cell="reset_after", style="dreamer_v1", separate_std=False
            ),
            (36 * 200 + 200) + 3 * (400 * 200 + 400) + (200 * 200 + 200) + (1224 * 200 + 200) + 2 * (200 * 60 + 60),
        ),
        # Atari: h and hidden layers 600, 32 × 32; scale and offset of the GRU's norm.
        (
            lambda: DenseCategoricalRSSM(embed_size=1536, action_size=18, deter=600, hidden=600, groups=32, classes=32),
            (1042 * 600 + 600) + (1200 * 1800 + 3 * 1800) + (600 * 600 + 600) + (2136 * 600 + 600)
            + 2 * (600 * 1024 + 1024),
        ),
        # size S of 2023: no bias before a norm, a learned initial state.
        (
            lambda: DenseCategoricalRSSM(
                embed_size=512, action_size=6, deter=512, hidden=512, groups=32, classes=32, style="dreamer_v3_2023",
                unimix=0.01, learned_initial=True,
            ),
            (1030 * 512 + 1024) + (1024 * 1536 + 2 * 1536) + (512 * 512 + 1024) + (1024 * 512 + 1024)
            + 2 * (512 * 1024 + 1024) + 512,
        ),
    ],
    ids=FORMS,
)  # fmt: skip
def test_parameter_counts(build, by_hand: int) -> None:
    """Counted by hand from the layer lists."""
    assert sum(parameter.numel() for parameter in build().parameters()) == by_hand


def test_how_weights_begin() -> None:
    """Glorot-uniform layers with zero biases; PlaNet's gates at 1; v1's recurrent kernel orthogonal."""
    planet, first = GaussianRSSM(embed_size=64, action_size=6, **PUBLISHED), FORMS["dreamer_v1"]()
    limit = (6.0 / (64 + 200 + 200)) ** 0.5
    weight = planet.posterior_head.trunk[0].linear.weight
    assert 0.99 * limit < weight.abs().max() <= limit
    assert torch.count_nonzero(planet.posterior_head.trunk[0].linear.bias) == 0
    assert (planet.cell.gates.bias == 1.0).all()
    kernel = first.cell.cell.weight_hh
    torch.testing.assert_close(kernel.T @ kernel, torch.eye(DETER), atol=1e-5, rtol=0.0)


def test_latents_come_back_from_the_replay(model: StateSpaceModel) -> None:
    """To half precision; classes exactly."""
    states, _ = model.observe(**sequence(model))
    state = states.flatten().map(torch.Tensor.float)
    back = model.from_stored(model.to_stored(state))
    torch.testing.assert_close(back.deter, state.deter, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(back.stoch, state.stoch, atol=2e-3, rtol=2e-3)


def test_a_changed_gru_cell_is_what_runs_on_a_gpu_too() -> None:
    """There its gates are computed one by one, which holds for torch's own cell alone."""

    class MyCell(torch.nn.GRUCell):
        pass

    cell = make_model("dreamer_v1").cell
    assert cell.is_torchs_own
    hook = cell.cell.register_forward_hook(lambda *_: None)
    assert not cell.is_torchs_own
    hook.remove()
    cell.cell = MyCell(HIDDEN, DETER)
    assert not cell.is_torchs_own
