"""The losses that take a decoder's place, and the probe that looks on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rl_lab.components.decoders import ContrastiveModel, MultiKeyDecoder
from rl_lab.components.decoders.contrastive import barlow_twins, info_nce
from rl_lab.components.world_models.base import LatentState
from rl_lab.errors import ConfigError
from rl_lab.specs import ObservationSpec

VECTOR = {"vector": ObservationSpec("vector", (3,), "float32")}
DETER, STOCH, EMBED = 6, 4, 5


def make_model(**settings) -> ContrastiveModel:
    torch.manual_seed(0)
    probe = MultiKeyDecoder(observation=VECTOR, deter=DETER, stoch_size=STOCH, units=8)
    return ContrastiveModel(embed_size=EMBED, feature_size=DETER + STOCH, probe=probe, **settings)


@pytest.fixture
def batch() -> tuple[LatentState, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    states = LatentState(*(torch.randn(4, 7, size, generator=generator).requires_grad_() for size in (DETER, STOCH)))
    embed = torch.randn(4, 7, EMBED, generator=generator).requires_grad_()
    return states, embed, {"vector": torch.randn(4, 7, 3, generator=generator)}


def test_barlow_twins_equals_its_definition():
    """Correlation by correlation, over all rows, as the sheet writes it."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(20, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = 0.0
    for i in range(3):
        for j in range(3):
            a, b = left[:, i] - left[:, i].mean(), right[:, j] - right[:, j].mean()
            correlation = (a * b).mean() / (a.std(correction=0) * b.std(correction=0))
            expected += (correlation - 1.0) ** 2 if i == j else 5e-4 * correlation**2
    torch.testing.assert_close(barlow_twins(left, right, redundancy=5e-4), expected, rtol=1e-6, atol=1e-8)


def test_barlow_twins_is_lowest_for_independent_dimensions_that_agree():
    """Scale and offset do not count; a constant prediction is worse than a noisy one."""
    target = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert barlow_twins(3.0 * target + 5.0, target, redundancy=5e-4).item() == pytest.approx(0.0, abs=1e-6)
    assert barlow_twins(torch.ones(4, 2), target, redundancy=5e-4).item() == pytest.approx(2.0, abs=1e-6)


def test_info_nce_equals_a_cross_entropy():
    """Each row must pick its own target among all; equal rows leave the logarithm of their number."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(6, 3, generator=generator), torch.randn(6, 3, generator=generator)
    similarity = torch.cosine_similarity(left[:, None], right[None], dim=-1)
    expected = torch.nn.functional.cross_entropy(similarity / 0.2, torch.arange(6), reduction="none")
    torch.testing.assert_close(info_nce(left, right, temperature=0.2), expected)
    same = info_nce(torch.ones(6, 3), torch.ones(6, 3), temperature=0.2)
    torch.testing.assert_close(same, torch.full((6,), math.log(6.0)))


@pytest.mark.parametrize(("objective", "scale"), [("barlow_twins", 0.05), ("info_nce", 1.0)])
def test_the_states_learn_and_the_target_does_not(batch, objective, scale):
    """The encoder's output is a constant in the loss: it learns through the posterior only. The probe gets nothing."""
    states, embed, observation = batch
    model = make_model(objective=objective)
    losses = model.losses(states, embed, observation)
    assert list(losses) == [objective]
    double = make_model(objective=objective, scale=2.0 * scale).losses(states, embed, observation)
    torch.testing.assert_close(double[objective], 2.0 * losses[objective])
    losses[objective].backward()
    assert embed.grad is None
    assert all(part.grad.abs().sum() > 0 for part in (states.deter, states.stoch, model.projection.weight))
    assert all(parameter.grad is None for parameter in model.probe.parameters())


def test_the_probe_learns_alone(batch):
    """Its gradient ends at its own weights."""
    states, _, observation = batch
    model = make_model()
    losses = model.probe_losses(states, observation)
    assert losses["vector"].shape == (4, 7)
    losses["vector"].mean().backward()
    assert states.deter.grad is None
    assert states.stoch.grad is None
    assert model.projection.weight.grad is None
    assert any(parameter.grad.abs().sum() > 0 for parameter in model.probe.parameters())


def test_pictures_are_the_probes(batch):
    """`rl-lab imagine` draws what the probe sees."""
    states, _, _ = batch
    model = make_model()
    torch.testing.assert_close(model.reconstruct(states), model.probe.reconstruct(states))


def test_the_plan_says_that_nothing_is_decoded():
    """Who reads the plan must not take the probe for the model's decoder."""
    text = make_model(objective="info_nce").wiring()["vector"]
    assert text.startswith("no decoder: InfoNCE")
    assert "a probe that trains nothing else: MLPDecoder" in text


def test_a_misspelt_objective_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'info_nce'"):
        make_model(objective="infonce")
