"""MuZero's networks: shapes, scaled latents, where gradients go, and what they predict before learning."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.muzero.dynamics import Dynamics
from rl_lab.components.muzero.layers import scale_latent
from rl_lab.components.muzero.model import MuZeroModel, Projection, make_slow_model
from rl_lab.components.muzero.prediction import PolicyValueNetwork, SquashedNormalPolicy
from rl_lab.components.muzero.representation import make_representation
from rl_lab.errors import ConfigError
from rl_lab.specs import ActionSpec, ObservationSpec

ACTION = ActionSpec("discrete", (1,), (4,))


def image(size: int) -> dict[str, ObservationSpec]:
    return {"image": ObservationSpec("image", (size, size, 3), "uint8")}


BOARD = {
    "board": ObservationSpec("vector", (6, 7), "float32"),
    "action_mask": ObservationSpec("vector", (7,), "float32"),
}
VECTOR = {"vector": ObservationSpec("vector", (5,), "float32")}


def make_model(observation: dict[str, ObservationSpec], **settings) -> MuZeroModel:
    torch.manual_seed(0)
    representation = make_representation(observation=observation, latent_size=16, units=16, channels=8, **settings)
    shape = representation.latent_shape
    return MuZeroModel(
        representation=representation,
        dynamics=Dynamics(latent_shape=shape, action_size=4, units=16, bins=21, limit=10.0),
        prediction=PolicyValueNetwork(latent_shape=shape, action=ACTION, units=16, bins=21, limit=10.0),
    )


def observe(observation: dict[str, ObservationSpec], rows: int) -> dict[str, torch.Tensor]:
    seen = {}
    for key, spec in observation.items():
        seen[key] = torch.randint(0, 256, (rows, *spec.shape), dtype=torch.uint8) if spec.kind == "image" else (
            torch.randint(-1, 2, (rows, *spec.shape)).float()
        )  # fmt: skip
    return seen


@pytest.mark.parametrize(
    ("observation", "settings", "shape"),
    [
        (VECTOR, {}, (16,)),
        (image(96), {}, (8, 6, 6)),
        (image(64), {}, (8, 8, 8)),
        (BOARD, {"board": True, "mask": "action_mask"}, (8, 6, 7)),
        (BOARD, {"mask": "action_mask"}, (16,)),
    ],
)
def test_latents_have_the_published_shapes_and_stay_in_the_unit_range(observation, settings, shape) -> None:
    """96×96 becomes 6×6, 64×64 becomes 8×8; a board keeps its size. Before learning the policy is uniform, and value
    and reward are 0."""
    model = make_model(observation, **settings)
    state = model.initial(observe(observation, 3))
    assert state.latent.shape == (3, *shape)
    for _ in range(4):
        state, reward, _ = model.step(state, torch.eye(4)[:3])
        assert (state.latent.flatten(1).amin(1) == 0.0).all()
        torch.testing.assert_close(state.latent.flatten(1).amax(1), torch.ones(3))
        assert reward.abs().max() < 1e-3
    output = model.predict(state)
    assert (output.policy == 0.0).all()
    assert model.prediction.support.mean(output.value).abs().max() < 1e-3


def test_a_constant_latent_scales_to_zeros() -> None:
    assert (scale_latent(torch.full((2, 5), 3.0)) == 0.0).all()


def test_the_gradient_is_halved_at_each_step() -> None:
    """The first latent gets a quarter of the gradient that it would get without scaling, after two steps."""
    model = make_model(VECTOR)
    action = torch.eye(4)[:2][:, None].expand(2, 2, 4)
    gradients = []
    for scale in (1.0, 0.5):
        latent = torch.rand(2, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        latents, _ = model.dynamics.unroll(latent, action, gradient_scale=scale)
        (latents[-1] * torch.arange(16.0)).sum().backward()
        gradients.append(latent.grad)
    assert gradients[0].abs().sum() > 0.0
    torch.testing.assert_close(gradients[1], 0.25 * gradients[0])


def test_unrolling_equals_stepping() -> None:
    model = make_model(VECTOR)
    state, action = model.initial(observe(VECTOR, 2)), torch.eye(4)[torch.tensor([[0, 1, 2], [3, 3, 0]])]
    latents, outputs = model.dynamics.unroll(state.latent, action)
    for time in range(3):
        state, _, output = model.step(state, action[:, time])
        torch.testing.assert_close(latents[time], state.latent)
        torch.testing.assert_close(outputs[time], output)


def test_the_projection_pulls_the_prediction_and_not_the_target() -> None:
    projection = Projection(latent_size=16, units=8, hidden=4)
    predicted, true = torch.rand(3, 16, requires_grad=True), torch.rand(3, 16, requires_grad=True)
    loss = projection.loss(predicted, true)
    assert ((loss >= -1.0) & (loss <= 1.0)).all()
    loss.sum().backward()
    assert predicted.grad.abs().sum() > 0.0
    assert true.grad is None


def test_a_squashed_normal_has_the_density_of_its_samples() -> None:
    """The probabilities of one action integrate to 1 over [-1, 1]."""
    policy = SquashedNormalPolicy(ActionSpec("continuous", (1,)))
    params = torch.tensor([0.4, -0.3])
    grid = torch.linspace(-0.9999, 0.9999, 20001)[:, None]
    density = policy.log_prob(params.expand(len(grid), 2), grid).exp()
    assert float(torch.trapezoid(density, grid[:, 0])) == pytest.approx(1.0, abs=0.01)
    assert policy.sample(params[None], 7).shape == (1, 7, 1)


def test_the_slow_copy_follows_at_its_own_pace() -> None:
    model = make_model(VECTOR)
    parts = {"representation": model.representation, "dynamics": model.dynamics, "prediction": model.prediction}
    slow = make_slow_model(**parts, every=2)
    with torch.no_grad():
        next(model.representation.parameters()).add_(1.0)
    first = next(slow.network.parameters()).clone()
    slow.update(model)
    assert torch.equal(next(slow.network.parameters()), first)
    slow.update(model)
    assert torch.equal(next(slow.network.parameters()), next(model.representation.parameters()))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="images alone"):
        make_representation(observation=image(64) | VECTOR)
    with pytest.raises(ConfigError, match="rows, columns"):
        make_representation(observation=VECTOR, board=True)
