"""Distributions against torch.distributions and Monte Carlo."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributions as td

from rl_lab.nn.distributions import Bernoulli, MultiCategorical, UnimixCategorical, categorical_kl, draw_noise, softmax
from rl_lab.nn.normals import BoundedNormal, TanhNormal, TruncatedNormal


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def reference_categorical(logits: torch.Tensor, unimix: float) -> td.Categorical:
    return td.Categorical(probs=(1 - unimix) * logits.softmax(-1) + unimix / logits.shape[-1])


@pytest.mark.parametrize("shape", [(7, 3, 8), (2, 1), (5, 40)])
def test_probabilities_in_float32_have_the_derivative_of_those_in_float64(shape: tuple[int, ...]) -> None:
    """On the CPU they and their logarithms come together; the logits may be far apart."""
    logits = (8.0 * torch.randn(shape)).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    weights, log_weights = torch.randn(shape), torch.randn(shape)
    for given in (logits, exact):
        ours = UnimixCategorical(given, unimix=0.01)
        (ours.probs * weights.to(given.dtype) + ours.log_probs * log_weights.to(given.dtype)).sum().backward()
    assert logits.grad is not None
    assert exact.grad is not None
    ours, wide = UnimixCategorical(logits), UnimixCategorical(exact)
    torch.testing.assert_close(ours.log_probs.double(), wide.log_probs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(wrong: float) -> None:
    """In the probabilities and in their logarithms: a run must see it in its losses. Other rows are not touched."""
    logits = torch.zeros(3, 8)
    logits[1, 4] = wrong
    ours = UnimixCategorical(logits)
    for values in (ours.probs, ours.log_probs):
        assert not values[1].isfinite().all()
        assert values[[0, 2]].isfinite().all()


@pytest.mark.parametrize("unimix", [0.01, 0.0])
def test_categorical_matches_torch(unimix: float) -> None:
    """log_prob of one-hots and of indices, and the entropy."""
    logits = torch.randn(4, 5, 6) * 3
    ours, theirs = UnimixCategorical(logits, unimix=unimix), reference_categorical(logits, unimix)
    index = torch.randint(0, 6, (4, 5))
    torch.testing.assert_close(ours.log_prob(torch.eye(6)[index]), theirs.log_prob(index))
    torch.testing.assert_close(ours.log_prob_index(index), theirs.log_prob(index))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())


def test_unimix_keeps_every_class_alive() -> None:
    """No probability is below unimix/classes, however sure the logits are."""
    probs = UnimixCategorical(torch.tensor([100.0, 0.0, 0.0, -100.0])).probs
    torch.testing.assert_close(probs, torch.tensor([0.9925, 0.0025, 0.0025, 0.0025]))


def test_categorical_samples_have_the_right_frequencies() -> None:
    """argmax(p / exponential noise) draws from p."""
    dist = UnimixCategorical(torch.randn(5).expand(40_000, 5))
    sample = dist.sample(draw_noise("exponential", (40_000, 5), "cpu"))
    assert torch.equal(sample.sum(-1), torch.ones(40_000))
    torch.testing.assert_close(sample.mean(0), dist.probs[0], atol=0.01, rtol=0.0)


def test_the_same_noise_gives_the_same_sample() -> None:
    dist, noise = UnimixCategorical(torch.randn(8, 4)), draw_noise("exponential", (8, 4), "cpu")
    assert torch.equal(dist.sample(noise), dist.sample(noise))
    assert torch.equal(dist.sample(noise).argmax(-1), dist.sample_index(noise))


@pytest.mark.parametrize("unimix", [0.01, 0.5, 0.0])
def test_samples_are_the_same_with_and_without_gradients(unimix: float) -> None:
    """Without, nothing needs the probabilities, and numbers in proportion to them are compared instead."""
    logits, noise = 30.0 * torch.randn(2_000, 4, 5), draw_noise("exponential", (2_000, 4, 5), "cpu")
    index = UnimixCategorical(logits, unimix=unimix).sample_index(noise)
    with torch.no_grad():
        assert torch.equal(UnimixCategorical(logits, unimix=unimix).sample_index(noise), index)
    assert len(index.unique()) == 5


def test_straight_through_gradient_is_that_of_the_probabilities() -> None:
    """The sample's value is exactly one-hot; its gradient is as if it were p (after unimix)."""
    logits, weight = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 4, 5)
    sample = UnimixCategorical(logits).sample()
    assert torch.equal(sample.detach().sort(-1).values[..., :-1], torch.zeros(3, 4, 4))
    assert torch.equal(sample.detach().amax(-1), torch.ones(3, 4))
    got = torch.autograd.grad((sample * weight).sum(), logits)[0]
    expected = torch.autograd.grad((UnimixCategorical(logits).probs * weight).sum(), logits)[0]
    torch.testing.assert_close(got, expected)
    assert expected.abs().max() > 0


def test_kl_sums_over_groups_and_matches_torch() -> None:
    left, right = torch.randn(4, 3, 6) * 2, torch.randn(4, 3, 6) * 2
    expected = td.kl_divergence(reference_categorical(left, 0.01), reference_categorical(right, 0.01)).sum(-1)
    torch.testing.assert_close(categorical_kl(UnimixCategorical(left), UnimixCategorical(right)), expected)


def test_detached_sides_of_the_kl_decide_who_learns() -> None:
    """KL(sg(post) || prior) trains the prior only, KL(post || sg(prior)) the posterior only."""
    post_logits, prior_logits = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    post, prior = UnimixCategorical(post_logits), UnimixCategorical(prior_logits)
    dynamics, representation = categorical_kl(post.detach(), prior), categorical_kl(post, prior.detach())
    torch.testing.assert_close(dynamics, representation)
    for loss, learns, fixed in ((dynamics, prior_logits, post_logits), (representation, post_logits, prior_logits)):
        grads = torch.autograd.grad(loss.sum(), [learns, fixed], allow_unused=True, retain_graph=True)
        assert grads[0].abs().max() > 0
        assert grads[1] is None


def test_multi_categorical_adds_up_its_components() -> None:
    classes = (3, 2, 4)
    logits, index = torch.randn(5, 9), torch.stack([torch.randint(0, n, (5,)) for n in classes], -1)
    dist = MultiCategorical(logits, classes)
    parts = [reference_categorical(part, 0.01) for part in logits.split(classes, -1)]
    expected = sum(part.log_prob(index[:, k]) for k, part in enumerate(parts))
    encoded = torch.cat([torch.eye(n)[index[:, k]] for k, n in enumerate(classes)], -1)
    torch.testing.assert_close(dist.log_prob(encoded), expected)
    torch.testing.assert_close(dist.log_prob_index(index), expected)
    torch.testing.assert_close(dist.entropy(), sum(part.entropy() for part in parts))
    for value in (dist.sample(), dist.mode()):
        assert all(torch.equal(part.sum(-1), torch.ones(5)) for part in value.split(classes, -1))


def test_bounded_normal_matches_torch() -> None:
    """An untruncated normal, mean tanh(m), deviation 0.1 + 0.9·sigmoid(s + 2)."""
    params = torch.randn(7, 6)
    dist = BoundedNormal(params)
    theirs = td.Normal(params[:, :3].tanh(), 0.1 + 0.9 * torch.sigmoid(params[:, 3:] + 2))
    value, noise = torch.randn(7, 3), torch.randn(7, 3)
    torch.testing.assert_close(dist.log_prob(value), theirs.log_prob(value).sum(-1))
    torch.testing.assert_close(dist.entropy(), theirs.entropy().sum(-1))
    torch.testing.assert_close(dist.sample(noise), theirs.loc + theirs.scale * noise)
    assert torch.equal(dist.mode(), theirs.loc)


def test_bounded_normal_samples_leave_the_unit_box() -> None:
    """They are not squashed: environments clip, the model rescales."""
    assert BoundedNormal(torch.zeros(1000, 2)).sample().abs().max() > 1.0


def test_tanh_normal_matches_torch() -> None:
    """Log-probability against torch's transformed normal; V1's initial deviation is 5."""
    params = torch.randn(7, 6)
    dist = TanhNormal(params)
    assert TanhNormal(torch.zeros(1, 2)).std.item() == pytest.approx(5.0 + 1e-4, rel=1e-5)
    base = td.Normal(5 * torch.tanh(params[:, :3] / 5), dist.std)
    theirs = td.TransformedDistribution(base, [td.TanhTransform()])
    value = torch.rand(7, 3) * 1.8 - 0.9
    torch.testing.assert_close(dist.log_prob(value), theirs.log_prob(value).sum(-1), rtol=1e-4, atol=1e-4)
    assert torch.isfinite(dist.log_prob(torch.ones(7, 3))).all()


def test_tanh_normal_entropy_and_mode_come_from_samples() -> None:
    """The entropy is E[-log p]; the mode is the likeliest of the samples."""
    dist = TanhNormal(torch.randn(1, 4), init_std=0.5)
    value = TanhNormal(torch.cat([dist.mean, torch.zeros(1, 2)], -1), init_std=0.5)
    noise = torch.randn(50_000, 1, 2)
    samples = torch.tanh(dist.mean + dist.std * noise)
    torch.testing.assert_close(dist.entropy(noise)[0], -dist.log_prob(samples).mean(), atol=0.02, rtol=0.0)
    few = noise[:50]
    mode = dist.mode(few)
    assert dist.log_prob(mode).item() == pytest.approx(dist.log_prob(samples[:50]).max().item(), rel=1e-3)
    assert value.mode().shape == (1, 2)


def test_truncated_normal_integrates_to_one_with_exact_entropy() -> None:
    """By numerical integration over [-1, 1]."""
    params = torch.tensor([[0.3, -1.0], [2.0, 1.0], [-3.0, -4.0]], dtype=torch.float64)
    dist = TruncatedNormal(params)
    grid = torch.linspace(-1, 1, 200_001, dtype=torch.float64)
    for row in range(3):
        one = TruncatedNormal(params[row : row + 1].expand(len(grid), 2))
        log_density = one.log_prob(grid[:, None])
        assert torch.trapezoid(log_density.exp(), grid).item() == pytest.approx(1.0, abs=1e-6)
        entropy = torch.trapezoid(-log_density.exp() * log_density, grid).item()
        assert dist.entropy()[row].item() == pytest.approx(entropy, abs=1e-6)


def test_truncated_normal_samples_stay_inside_and_keep_their_gradient() -> None:
    """V2 clips with an identity gradient; the mean moves the sample even where the clip acts."""
    params = torch.tensor([[1.5, 0.0]]).expand(20_000, 2).clone().requires_grad_()
    dist = TruncatedNormal(params)
    sample = dist.sample()
    assert sample.abs().max() <= 1.0 - 9e-7
    grid = torch.linspace(-1, 1, 20_001)[:, None]
    density = TruncatedNormal(params.detach()[:1].expand(20_001, 2)).log_prob(grid).exp()
    assert sample.mean().item() == pytest.approx(torch.trapezoid(density * grid[:, 0], grid[:, 0]).item(), abs=0.01)
    grad = torch.autograd.grad(sample.sum(), params)[0]
    assert torch.isfinite(grad).all()
    extreme = TruncatedNormal(torch.tensor([[8.0, -20.0]], requires_grad=True))
    for uniform in (0.0, 1.0):
        value = extreme.sample(torch.full((1, 1), uniform))
        assert torch.isfinite(value).all()
        assert value.abs().max() <= 1.0


def test_bernoulli_with_soft_labels() -> None:
    """Minus the binary cross-entropy with a label between 0 and 1."""
    logits, label = torch.randn(9), torch.rand(9)
    probs = torch.sigmoid(logits)
    dist = Bernoulli(logits)
    expected = label * probs.log() + (1 - label) * (1 - probs).log()
    torch.testing.assert_close(dist.log_prob(label), expected)
    torch.testing.assert_close(dist.entropy(), td.Bernoulli(logits=logits).entropy())
    assert torch.equal(dist.mode(), (probs > 0.5).float())
    assert dist.sample(torch.full((9,), 1.0)).sum() == 0
    assert dist.sample(torch.zeros(9)).sum() == 9


def test_maximum_entropy_of_a_fresh_categorical() -> None:
    assert UnimixCategorical(torch.zeros(3)).entropy().item() == pytest.approx(math.log(3.0))


@pytest.mark.parametrize("classes", [2, 8, 15, 16, 40])
def test_softmax_is_the_same_for_short_and_long_axes(classes: int) -> None:
    """Values and gradients, large logits included."""
    logits = (100 * torch.randn(3, 4, classes, dtype=torch.float64)).requires_grad_()
    weight = torch.randn(3, 4, classes, dtype=torch.float64)
    ours, theirs = softmax(logits), torch.softmax(logits, -1)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad((probs * weight).sum(), logits)[0] for probs in (ours, theirs)]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_exponential_noise_is_exponential() -> None:
    """Mean and spread 1, never 0: a clock that rings at once would make its class certain."""
    torch.manual_seed(0)
    noise = draw_noise("exponential", (200_000,), "cpu")
    assert noise.mean().item() == pytest.approx(1.0, abs=0.02)
    assert noise.std().item() == pytest.approx(1.0, abs=0.02)
    assert (noise > 0).all()
    assert (noise > 3.0).float().mean().item() == pytest.approx(math.exp(-3.0), abs=0.003)
