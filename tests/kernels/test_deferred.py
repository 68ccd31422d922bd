"""Loops with deferred weight gradients against autograd through the same loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.components.dense_models import ACTION, FORMS, make_model, sequence
from torch import Tensor

from rl_lab.components.actors.dreamer import Actor, make_actor
from rl_lab.components.world_models.base import Dream, GaussianModel, LatentState, StateSpaceModel
from rl_lab.kernels import graphs
from rl_lab.kernels.deferred import DeferredFiltering, DeferredLoop
from rl_lab.kernels.dreams import DeferredDream
from rl_lab.specs import ActionSpec

T, B, SIZE = 5, 3, 4


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(SIZE, SIZE, dtype=torch.float64, requires_grad=True)


def step(x: Tensor, y: Tensor, push: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A state of two parts, a copy of the first as an output, and one more output."""
    x, y = torch.tanh(x @ weight + push), torch.sigmoid(y * x)
    return x, y, x.clone(), (x * y) @ weight


def by_autograd(state: tuple[Tensor, ...], pushes: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    outputs = []
    for push in pushes:
        *state, first, second = step(*state, push, weight)
        outputs.append((first, second))
    return tuple(torch.stack(parts) for parts in zip(*outputs, strict=True))


def start() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(B, SIZE, dtype=torch.float64, generator=generator) for _ in range(2))


def loss(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0].square().sum() + outputs[1].sin().sum()


def test_replaying_all_steps_at_once_gives_the_gradients_of_the_loop(weight):
    """Weights and inputs: the loop itself sees none that require gradients."""
    pushes = torch.randn(T, B, SIZE, dtype=torch.float64, requires_grad=True)
    expected = by_autograd(start(), pushes, weight)
    loop = DeferredLoop(step, start())
    for push in pushes:
        loop.advance((), (push, weight))
    outputs = loop.replayed(*step(*loop.before(), pushes, weight))
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss(outputs), (weight, pushes)), torch.autograd.grad(loss(expected), (weight, pushes))
    )


def test_driving_inputs_get_their_gradients_from_the_loop(weight):
    """A network that chose the inputs from detached states gets the gradients of all steps at once."""
    chooser = torch.randn(SIZE, SIZE, dtype=torch.float64, requires_grad=True)
    fixed = weight.detach()
    state, expected = start(), []
    for _ in range(T):
        *state, first, second = step(*state, state[0].detach() @ chooser, fixed)
        expected.append((first, second))
    expected = tuple(torch.stack(parts) for parts in zip(*expected, strict=True))
    loop = DeferredLoop(step, start())
    for _ in range(T):
        loop.advance((loop.state[0] @ chooser,), (fixed,))
    outputs = loop.driven_by(loop.before()[0] @ chooser)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss(outputs), chooser), torch.autograd.grad(loss(expected), chooser)
    )


def test_an_output_that_no_loss_uses_has_no_gradient(weight):
    """Autograd then gives zeros for it."""
    pushes = torch.randn(T, B, SIZE, dtype=torch.float64)
    loop = DeferredLoop(step, start())
    for push in pushes:
        loop.advance((), (push, weight))
    (_, second) = loop.replayed(*step(*loop.before(), pushes, weight))
    expected = by_autograd(start(), pushes, weight)[1]
    torch.testing.assert_close(torch.autograd.grad(second.sum(), weight), torch.autograd.grad(expected.sum(), weight))


# Filtering and dreaming with the dense RSSMs ---------------------------------------------------------------


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    graphs.configure(compiling=False)
    yield
    graphs.configure(compiling=True)


@pytest.fixture(params=FORMS)
def model(request: pytest.FixtureRequest) -> StateSpaceModel:
    return make_model(request.param)


def in_half_precision(model: StateSpaceModel, data: dict) -> dict:
    """Parameters and data in float32, for a computation whose products are in bfloat16."""
    model.float()
    data |= {name: data[name].float() for name in ("embed", "prev_action", "noise")}
    return data | {"initial": data["initial"].map(Tensor.float)}


def test_filtering_has_the_gradients_of_the_plain_loop(model: StateSpaceModel) -> None:
    """States, parameters of the posterior, and the gradient of every weight and of the observations."""
    data = sequence(model)
    data["embed"].requires_grad_()
    results = []
    for observe in (model.observe, DeferredFiltering(model, torch.float64)):
        states, params = observe(**data)
        loss = states.deter.square().sum() + (states.stoch * torch.arange(model.stoch_size)).sum() + params.sin().sum()
        gradients = torch.autograd.grad(loss, [data["embed"], *model.parameters()], allow_unused=True)
        results.append([states.deter, states.stoch, params, *(x for x in gradients if x is not None)])
    assert len(results[0]) > 8
    torch.testing.assert_close(results[1], results[0])


def test_filtering_follows_the_weights(model: StateSpaceModel) -> None:
    """The loop's own copy of the weights has no gradient, and is no part of the model."""
    names, data = list(model.state_dict()), sequence(model)
    filtering = DeferredFiltering(model, torch.float64)
    assert list(model.state_dict()) == names
    assert not any(value.requires_grad for value in filtering._copy.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    torch.testing.assert_close(filtering(**data)[0].deter, model.observe(**data)[0].deter)


def test_filtering_in_half_precision(model: StateSpaceModel) -> None:
    """With weights that are rounded once: what autocast gives, which rounds them in every step."""
    data = in_half_precision(model, sequence(model))
    results = []
    for observe in (model.observe, DeferredFiltering(model, torch.bfloat16)):
        with torch.autocast("cpu", torch.bfloat16):
            states, params = observe(**data | {"embed": data["embed"].bfloat16()})
        assert states.deter.dtype == torch.bfloat16
        loss = states.deter.float().square().sum() + params.float().sin().sum()
        gradients = torch.autograd.grad(loss, [model.input_layer.linear.weight, model.posterior_head.outputs[0].weight])
        results.append((states.deter.float(), *gradients))
    distances = [(x - y).norm() / y.norm() for x, y in zip(*results, strict=True)]
    assert max(distances) < 0.1, distances


def make_policy(model: StateSpaceModel, kind: str) -> Actor:
    spec = ActionSpec("continuous", (ACTION,)) if kind == "continuous" else ActionSpec("discrete", (1,), (ACTION,))
    return make_actor(action=spec, feature_size=model.feature_size, units=8, layers=1, outscale=1.0)


def dreams_of(model: StateSpaceModel, actor: Actor, dtype: torch.dtype, fast: object) -> list[tuple]:
    """The plain and the faster form, from the same start and noise: states, actions, and the actor's gradient."""
    torch.manual_seed(1)
    start = LatentState(torch.randn(B, model.deter), sequence(model)["initial"].stoch).map(lambda x: x.to(dtype))
    noise = model.draw_noise((T, B), "cpu").to(dtype)
    action_noise = actor.draw_noise((T, B), "cpu").to(dtype)

    def policy(features: Tensor, step_noise: Tensor) -> Tensor:
        return actor.distribution(actor(features.detach())).sample(step_noise)

    plain = model.imagine(start, policy, latent_noise=noise, action_noise=action_noise)
    return [plain, fast(start, noise, action_noise)]


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_dreams_have_the_actors_gradient_through_the_model(model: StateSpaceModel, kind: str) -> None:
    """Which the frozen model's steps pass on; states and actions are those of the plain loop."""
    actor = make_policy(model, kind).double()
    model.requires_grad_(False)
    results = []
    for dream in dreams_of(model, actor, torch.float64, DeferredDream(model, actor, torch.float64, Dream.of)):
        loss = dream.features.square().sum() + (dream.states.stoch * torch.arange(model.stoch_size)).sum()
        gradients = torch.autograd.grad(loss, list(actor.parameters()))
        assert sum(gradient.abs().sum() for gradient in gradients) > 0
        results.append((*dream.states[:2], dream.features, dream.actions, *gradients))
    torch.testing.assert_close(results[1], results[0])


def test_dreams_in_half_precision(model: StateSpaceModel) -> None:
    """As far from float32 as autocast is: the actor's gradient points the same way."""
    actor = make_policy(model, "continuous")
    model.float().requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        plain, deferred = dreams_of(model, actor, torch.bfloat16, DeferredDream(model, actor, torch.bfloat16, Dream.of))
    assert deferred.features.dtype == plain.features.dtype
    if isinstance(model, GaussianModel):  # no sample can flip
        torch.testing.assert_close(deferred.features.float(), plain.features.float(), rtol=0.1, atol=0.1)
    loss = deferred.features.float().square().sum()
    gradients = torch.autograd.grad(loss, list(actor.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert sum(gradient.abs().sum() for gradient in gradients) > 0
