"""Schedules, samplers and losses of diffusion models, against hand-computed values and recorded steps of diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_lab.components.diffusion import (
    AveragedModel,
    Denoiser,
    DiffusionModel,
    Guidance,
    Inpainting,
    NoiseSchedule,
    ReverseStep,
    make_denoiser,
)
from rl_lab.errors import ConfigError

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "diffusers_steps.json").read_text())


class Fixed(Denoiser):
    """Predicts the same, whatever it sees."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, noisy: Tensor, level: Tensor, condition: Tensor | None = None) -> Tensor:
        return self.output.expand_as(noisy)


class KnowsTheData(Denoiser):
    """The exact noise predictor of data that is one point: ε = (x - √ᾱ·point)/√(1-ᾱ)."""

    def __init__(self, point: Tensor, schedule: NoiseSchedule) -> None:
        super().__init__()
        self.point, self.schedule = point, schedule

    def forward(self, noisy: Tensor, level: Tensor, condition: Tensor | None = None) -> Tensor:
        return self.schedule.implied_epsilon(self.point.expand_as(noisy), noisy, level)


def test_squared_cosine_schedule_has_the_published_values() -> None:
    schedule = NoiseSchedule(levels=100)
    betas = [float(schedule.betas[k]) for k in (0, 49, 98, 99)]
    assert betas == pytest.approx([6.31e-4, 0.0306, 0.750, 0.999], rel=2e-3)
    bars = [schedule.alpha_bar(k) for k in (0, 49, 98, 99, -1)]
    assert bars == pytest.approx([0.99937, 0.4938, 2.43e-4, 2.43e-7, 1.0], rel=2e-3)


@pytest.mark.parametrize("case", RECORDED["cases"])
def test_one_step_equals_that_of_diffusers(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = NoiseSchedule(kind=case["schedule"])
    model = DiffusionModel(
        network=Fixed(torch.tensor(case["output"])), schedule=schedule, prediction=case["prediction"]
    )
    levels = schedule.sampling_levels(case["steps"])
    if case["levels"] is not None:
        assert levels == case["levels"]
    at = levels.index(case["level"])
    x, seen = torch.tensor(case["x"]), []

    class StopHereError(Exception):
        pass

    class FirstStepOnly(Guidance):
        def mean(self, step: ReverseStep) -> Tensor:
            seen.append(step)
            return step.mean

        def constrain(self, x: Tensor, level: int) -> Tensor:
            if seen:
                seen.append(x)
                raise StopHereError
            return x

    if case["noise"] is not None:
        monkeypatch.setattr(torch, "randn_like", lambda _: torch.tensor(case["noise"]))
    with pytest.raises(StopHereError):
        model.denoise(x, levels[at:], sampler=case["sampler"], guidance=FirstStepOnly())
    torch.testing.assert_close(seen[0].clean, torch.tensor(case["clean"]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen[1], torch.tensor(case["following"]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["epsilon", "x0", "v"])
def test_every_kind_of_prediction_gives_the_clean_sample_back(kind: Any) -> None:
    schedule = NoiseSchedule(levels=50)
    x0, epsilon, level = torch.randn(6, 4, 2), torch.randn(6, 4, 2), torch.tensor([0, 5, 20, 30, 40, 44])
    noisy = schedule.add_noise(x0, epsilon, level)
    target = schedule.target(kind, x0, epsilon, level)
    torch.testing.assert_close(schedule.predicted_x0(kind, target, noisy, level), x0, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(schedule.implied_epsilon(x0, noisy, level), epsilon, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("spacing", "levels"), [("leading", [75, 50, 25, 0]), ("trailing", [99, 74, 49, 24])])
def test_spacings_of_few_steps(spacing: Any, levels: list[int]) -> None:
    assert NoiseSchedule(levels=100).sampling_levels(4, spacing) == levels


@pytest.mark.parametrize(("sampler", "steps"), [("ddpm", None), ("ddpm", 10), ("ddim", 5)])
def test_a_perfect_network_draws_the_data(sampler: Any, steps: int | None) -> None:
    schedule, point = NoiseSchedule(levels=50), torch.tensor([[0.3, -0.8], [0.5, 0.1]])
    model = DiffusionModel(network=KnowsTheData(point, schedule), schedule=schedule)
    drawn = model.sample((3, 2, 2), sampler=sampler, steps=steps)
    torch.testing.assert_close(drawn, point.expand(3, 2, 2), rtol=0, atol=1e-3)


def test_the_loss_is_zero_for_a_perfect_network_and_leaves_known_entries_out() -> None:
    schedule, point = NoiseSchedule(levels=50), torch.tensor([[0.3, -0.8], [0.5, 0.1]])
    perfect = DiffusionModel(network=KnowsTheData(point, schedule), schedule=schedule)
    assert float(perfect.loss(point.expand(64, 2, 2))) < 1e-5
    known = torch.tensor([[True, True], [False, False]])
    guess = DiffusionModel(network=Fixed(torch.zeros(2, 2)), schedule=schedule, prediction="x0")
    assert float(guess.loss(point.expand(8, 2, 2), known=known)) == pytest.approx((0.25 + 0.01) / 4)
    weight = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    assert float(guess.loss(point.expand(8, 2, 2), weight=weight)) == pytest.approx(2 * 0.09 / 4)


def test_known_entries_hold_in_all_that_the_network_sees() -> None:
    seen: list[Tensor] = []

    class Watching(Fixed):
        def forward(self, noisy: Tensor, level: Tensor, condition: Tensor | None = None) -> Tensor:
            seen.append(noisy[:, 0])
            return super().forward(noisy, level, condition)

    model = DiffusionModel(network=Watching(torch.zeros(())), schedule=NoiseSchedule(levels=10))
    values, known = torch.full((2, 3, 2), 0.25), torch.tensor([[True, True], [False, False], [False, False]])
    drawn = model.sample((2, 3, 2), guidance=Inpainting(values, known))
    assert len(seen) == 10
    assert all(bool((row == 0.25).all()) for row in [*seen, drawn[:, 0]])
    assert not bool((drawn[:, 1:] == 0.25).any())


def test_gradient_guidance_shifts_the_mean_by_the_variance() -> None:
    """Standard normal data and the reward βx: the guided distribution is a normal around β."""
    schedule, beta = NoiseSchedule(levels=400), 0.7

    class StandardNormal(Denoiser):
        def forward(self, noisy: Tensor, level: Tensor, condition: Tensor | None = None) -> Tensor:
            return schedule.noise[level].view(-1, 1, 1) * noisy

    class Reward(Guidance):
        def mean(self, step: ReverseStep) -> Tensor:
            gradient = beta * schedule.alpha_bar(step.level) ** 0.5  # of log E[exp(βx_0) | x_k], with E[x_0|x] = √ᾱ·x
            return step.mean + step.std**2 * gradient

    torch.manual_seed(0)
    model = DiffusionModel(network=StandardNormal(), schedule=schedule, clip=None)
    plain, guided = model.sample((4000, 1, 1)), model.sample((4000, 1, 1), guidance=Reward())
    assert float(plain.mean()) == pytest.approx(0.0, abs=0.06)
    assert float(guided.mean()) == pytest.approx(beta, abs=0.08)
    assert float(guided.std()) == pytest.approx(1.0, abs=0.08)


def test_the_average_forgets_its_first_weights_and_follows_ever_more_slowly() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    average = AveragedModel(model)
    decays = [average.decay(n) for n in (1, 2, 3, 10_001, 10**9)]
    assert decays == pytest.approx([0.0, 0.0, 1.0 - 2.0**-0.75, 0.999, 0.9999])
    expected = 0.0
    for n in range(1, 6):
        torch.nn.init.constant_(model.weight, float(n))
        average.update(model)
        expected = average.decay(n) * expected + (1.0 - average.decay(n)) * n
    assert float(average.model.weight) == pytest.approx(expected)
    assert not average.model.weight.requires_grad
    assert not average.train().model.training


def test_both_modes_are_learned() -> None:
    """Sequences of only +0.8 or only -0.8: samples are one of the two, each about as often, and never in between."""
    torch.manual_seed(0)
    denoiser = make_denoiser("mlp", dim=1, horizon=4, condition=1, units=64, layers=2)
    model = DiffusionModel(network=denoiser, schedule=NoiseSchedule(levels=20))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(400):
        sign = torch.where(torch.rand(64, 1, 1) < 0.5, -0.8, 0.8)
        loss = model.loss(sign.expand(64, 4, 1), torch.ones(64, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    drawn = model.sample((256, 4, 1), torch.ones(256, 1))
    means = drawn.mean((1, 2))
    assert float((means.abs() > 0.5).float().mean()) > 0.85
    assert 0.3 < float((means > 0).float().mean()) < 0.7


def test_bad_settings_are_refused_in_one_line() -> None:
    for make, words in [
        (lambda: NoiseSchedule(kind="cosin"), "squared_cosine"),
        (lambda: NoiseSchedule(levels=0), "at least 1"),
        (lambda: NoiseSchedule(levels=10).sampling_levels(11), "from 1 to 10"),
        (lambda: make_denoiser("unett", dim=2, horizon=4, condition=0), "unet"),
        (lambda: make_denoiser("unet", dim=2, horizon=6, condition=0), "multiple of 4"),
        (lambda: make_denoiser("unet", dim=2, horizon=4, condition=0, widths=[9, 16, 32]), "multiples of 8"),
        (lambda: make_denoiser("transformer", dim=2, horizon=4, condition=5, condition_tokens=2), "2 parts"),
        (lambda: DiffusionModel(network=Fixed(torch.zeros(1)), schedule=NoiseSchedule(), prediction="eps"), "epsilon"),
    ]:
        with pytest.raises(ConfigError, match=words) as raised:
            make()
        assert "\n" not in str(raised.value)
    network = make_denoiser("mlp", dim=2, horizon=4, condition=3)
    with pytest.raises(ConfigError, match="condition of 3 numbers and got 0"):
        network(torch.zeros(1, 4, 2), torch.zeros(1, dtype=torch.int64))
