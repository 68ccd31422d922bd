"""The parts of TD-MPC and TD-MPC2: sizes as published, SimNorm, the ensemble against a loop, policies, images."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.workflows.tdmpc_parts import make_part
from torch import nn

from rl_lab.components.dynamics.tdmpc import episode_discount
from rl_lab.components.encoders.tdmpc import ShiftedImages
from rl_lab.errors import ConfigError
from rl_lab.experiment.config import compose
from rl_lab.kernels.copies import WorkingCopies
from rl_lab.nn.tdmpc_layers import TDMPCMLP, EnsembleMLP, Mish, SimNorm, hidden_layers
from rl_lab.specs import ActionSpec, ObservationSpec

IMAGES = {"image": ObservationSpec("image", (64, 64, 9), "uint8")}
TASK = 96  # entries of the embedding that the published multi-task sizes include
PUBLISHED = {"1m": 1_435_067, "5m": 5_389_930, "19m": 18_970_218, "48m": 48_791_146, "317m": 317_383_129}


def vector(size: int) -> dict[str, ObservationSpec]:
    return {"vector": ObservationSpec("vector", (size,), "float32")}


def count(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters() if p.requires_grad)


@pytest.fixture(autouse=True)
def _scalar_without_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are counted without memory, where the values of the bins cannot be read."""
    if "sizes" in request.node.name:
        for place in ("dynamics.tdmpc", "q_functions.ensemble"):
            monkeypatch.setattr(
                f"rl_lab.components.{place}.make_scalar", lambda bins, limit: SimpleNamespace(size=bins)
            )


def build(preset: dict[str, int], observation: int, action: int) -> dict[str, nn.Module]:
    latent, units = preset["latent"], preset["units"]
    size = {"latent_size": latent, "action_size": action, "units": units}
    with torch.device("meta"):
        return {
            "encoder": make_part(
                "encoder", observation=vector(observation), latent_size=latent, units=preset["encoder_units"],
                layers=preset["encoder_layers"],
            ),
            "model": make_part("model", **size, episodic=False),
            "policy": make_part("policy", action=ActionSpec("continuous", (action,)), latent_size=latent, units=units),
            "q": make_part("q", **size, members=preset["members"]),
        }  # fmt: skip


@pytest.mark.parametrize("size", PUBLISHED)
def test_presets_have_the_published_sizes(size: str) -> None:
    """Those of the 80-task models (39 observations, 6 actions), less what a task's embedding adds."""
    preset = compose(["+experiment=tdmpc2", f"size={size}"]).presets[size]
    networks = 3 + preset["members"]  # dynamics, reward, policy and the Qs each take the embedding in
    embedding = TASK * (preset["encoder_units"] + preset["units"] * networks) + 80 * TASK
    assert count(*build(preset, 39, 6).values()) + embedding == PUBLISHED[size]


def test_single_task_sizes_are_the_published_ones() -> None:
    preset = compose(["+experiment=tdmpc2", "size=5m"]).presets["5m"]
    assert count(*build(preset, 17, 6).values()) == 4_958_826  # cheetah-run
    assert count(*build(preset, 223, 38).values()) == 5_159_082  # dog-run
    cartpole = {name: count(module) for name, module in build(preset, 5, 1).items()}
    assert cartpole == {"encoder": 134_656, "model": 791_552 + 579_685, "policy": 528_386, "q": 2_898_425}


def test_sizes_in_the_manual_are_true() -> None:
    """The table of docs/tdmpc2.md."""
    text = (Path(__file__).parents[2] / "docs" / "tdmpc2.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d,]+) \|$", text, re.MULTILINE)
    presets = compose(["+experiment=tdmpc2", "size=5m"]).presets
    keys = ("encoder_units", "encoder_layers", "units", "latent", "members")
    assert {name: tuple(map(int, numbers[:-1])) for name, *numbers in rows} == {
        name: tuple(preset[key] for key in keys) for name, preset in presets.items()
    }
    for name, *numbers in rows:
        assert count(*build(presets[name], 17, 6).values()) == int(numbers[-1].replace(",", ""))


def test_sim_norm_makes_simplices() -> None:
    """Every group of eight is a softmax of its own."""
    x = torch.randn(3, 5, 24)
    result = SimNorm(8)(x)
    torch.testing.assert_close(result.unflatten(-1, (3, 8)).sum(-1), torch.ones(3, 5, 3))
    torch.testing.assert_close(result[..., 8:16], x[..., 8:16].softmax(-1))
    with pytest.raises(ConfigError, match="multiple of 8"):
        make_part("encoder", observation=vector(3), latent_size=20)


def test_fast_mish_is_mish() -> None:
    """Values and slopes, far out on both sides too, and in half precision."""
    mish = Mish()
    half = torch.tensor([-20.0, 3.0, 30.0], dtype=torch.float16)
    torch.testing.assert_close(mish(half), F.mish(half))
    x = torch.cat([torch.linspace(-30.0, 30.0, 301), torch.tensor([-100.0, 100.0])]).requires_grad_()
    torch.testing.assert_close(mish(x), F.mish(x))
    torch.testing.assert_close(mish(x.detach()), F.mish(x.detach()))
    ours, theirs = (torch.autograd.grad(function(x).sum(), x)[0] for function in (mish, F.mish))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_ensemble_equals_a_loop_over_its_members() -> None:
    """One batched product is members that know nothing of each other: dropout first, then their own norms."""
    torch.manual_seed(0)
    ensemble = EnsembleMLP(3, 5, hidden_layers("tdmpc2", 16, 2), 7, style="tdmpc2")
    with torch.no_grad():
        for value in ensemble.parameters():
            value += 0.3 * torch.randn(value.shape)
    x, keep = torch.randn(4, 5), (torch.rand(3, 4, 16) > 0.2).float() / 0.8
    for member in range(3):
        y = x
        for place, layer in enumerate(ensemble.layers):
            y = y @ layer.linear.weight[member] + layer.linear.bias[member]
            if place < 2:
                y = y * keep[member] if place == 0 else y
                y = F.mish(F.layer_norm(y, (16,), layer.norm.weight[member, 0], layer.norm.bias[member, 0]))
        torch.testing.assert_close(ensemble(x, keep=keep)[member], y, rtol=1e-4, atol=1e-5)
    chosen = torch.tensor([2, 0])
    torch.testing.assert_close(ensemble(x, members=chosen), ensemble(x)[chosen])


def test_working_copies_follow_the_weights() -> None:
    torch.manual_seed(0)
    ensemble = EnsembleMLP(3, 13, hidden_layers("tdmpc2", 20, 2), 7, style="tdmpc2")
    copies = WorkingCopies(torch.float32)
    twin = copies.add(ensemble)
    with torch.no_grad():
        for value in ensemble.parameters():
            value += 0.3 * torch.randn(value.shape)
    copies.refresh()
    x, chosen = torch.randn(4, 13), torch.tensor([2, 0])
    torch.testing.assert_close(twin(x), ensemble(x))
    torch.testing.assert_close(twin(x, members=chosen), ensemble(x, members=chosen))
    assert not any(value.requires_grad for value in twin.parameters())


def test_frozen_values_pass_the_gradient_on() -> None:
    q = make_part("q", latent_size=8, action_size=2, members=3, units=8)
    with torch.no_grad():
        q.online.layers[-1].linear.weight.normal_()
    action = torch.rand(4, 2, requires_grad=True)
    q.mean(q(torch.rand(4, 8), action, members=q.draw_pair(), frozen=True)).sum().backward()
    assert bool(action.grad.abs().sum() > 0)
    assert all(p.grad is None for p in q.parameters())


def test_first_predictions_are_zero_and_weights_small() -> None:
    """Reward and values start at exactly 0; hidden weights have a deviation of 0.02; the policy is not zero."""
    torch.manual_seed(0)
    model, q = make_part("model", latent_size=16, action_size=2), make_part("q", latent_size=16, action_size=2)
    latent, action = torch.rand(3, 16), torch.rand(3, 2)
    assert not model.reward_mean(model.step(latent, action).reward).any()
    assert not q.mean(q(latent, action)).any()
    for weight in (model.trunks.layers[1].linear.weight, q.online.layers[1].linear.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    policy = make_part("policy", action=ActionSpec("continuous", (2,)), latent_size=16)
    assert bool(policy(latent).any())


def test_old_layers_are_those_of_tdmpc() -> None:
    """ELU without a norm, orthogonal weights; the values begin with LayerNorm and tanh; outputs of rewards are 0."""
    network = TDMPCMLP(4, hidden_layers("tdmpc", 8, 1), 6, style="tdmpc")
    x = torch.randn(3, 4)
    first, last = network[0].linear, network[1]
    torch.testing.assert_close(network(x), F.linear(F.elu(F.linear(x, first.weight)), last.weight))
    torch.testing.assert_close(first.weight.T @ first.weight, torch.eye(4), rtol=1e-4, atol=1e-5)
    q = make_part("q", latent_size=4, action_size=1, members=2, units=8, bins=1, dropout=0.0, style="tdmpc")
    layers = q.online.layers
    with torch.no_grad():
        layers[2].linear.weight.normal_()
    z, a = torch.randn(3, 4), torch.rand(3, 1)
    y = torch.tanh(F.layer_norm(torch.cat([z, a], -1) @ layers[0].linear.weight[1], (8,)))
    y = F.elu(y @ layers[1].linear.weight[1]) @ layers[2].linear.weight[1]
    torch.testing.assert_close(q.mean(q(z, a))[1], y[:, 0])


@pytest.mark.parametrize(("length", "discount"), [(50, 0.95), (100, 0.95), (200, 0.975), (500, 0.99), (1000, 0.995)])
def test_discount_follows_the_length_of_an_episode(length: int, discount: float) -> None:
    assert episode_discount(length) == pytest.approx(discount)
    assert episode_discount(None) == 0.995


def test_termination_decides_the_continuation() -> None:
    model = make_part("model", latent_size=16, action_size=1)
    latent = torch.rand(4, 16)
    torch.testing.assert_close(model.continuation(latent), 1.0 - torch.sigmoid(model.termination_logit(latent)))
    endless = make_part("model", latent_size=16, action_size=1, episodic=False)
    assert bool((endless.continuation(latent) == 1.0).all())


# Policies -------------------------------------------------------------------------------------------------------------


def test_many_discrete_actions_are_learned_from_samples() -> None:
    """Where not all joint actions can be tried, the gradient goes straight through one of them."""
    few = make_part("policy", action=ActionSpec("discrete", (2,), (3, 4)), latent_size=8, units=8)
    many = make_part("policy", action=ActionSpec("discrete", (2,), (30, 40)), latent_size=8, units=8)
    latent = torch.rand(5, 8)
    choices = few.choices(latent, few.draw_noise((5,)))
    assert choices.action.shape == (12, 5, 7)
    assert few.choice_count == 12
    torch.testing.assert_close(choices.weight.sum(0), torch.ones(5))
    assert len({tuple(row.tolist()) for row in choices.action[:, 0]}) == 12
    sampled = many.choices(latent, many.draw_noise((5,)))
    assert sampled.action.shape == (1, 5, 70)
    (sampled.action * torch.randn(70)).sum().backward()
    assert any(bool(p.grad.abs().sum() > 0) for p in many.parameters() if p.grad is not None)


def test_noise_of_tdmpc_is_cut_off() -> None:
    policy = make_part("policy", action=ActionSpec("continuous", (2,)), latent_size=8, units=8, style="tdmpc")
    latent = torch.randn(4, 8)
    far = policy.sample(latent, torch.full((4, 2), 100.0))
    torch.testing.assert_close(far, (policy.mode(latent) + 0.3).clamp(max=1 - 1e-6))


# Images ---------------------------------------------------------------------------------------------------------------


def test_images_become_latents_without_a_linear_layer() -> None:
    """64 → 29 → 13 → 6 → 4: 32 channels make 512 entries, of which each eight are a simplex."""
    encoder = make_part("encoder", observation=IMAGES)
    image = torch.randint(0, 256, (2, 3, 64, 64, 9), dtype=torch.uint8)
    latent = encoder(encoder.augment({"image": image}))
    assert latent.shape == (2, 3, 512)
    torch.testing.assert_close(latent.unflatten(-1, (64, 8)).sum(-1), torch.ones(2, 3, 64))
    kernels = (7 * 7 * 9, 5 * 5 * 32, 3 * 3 * 32, 3 * 3 * 32)
    assert count(encoder) == sum(size * 32 + 32 for size in kernels)
    with pytest.raises(ConfigError, match="image_size=64"):
        make_part("encoder", observation={"image": ObservationSpec("image", (84, 84, 9), "uint8")})
    old = make_part("encoder", observation=IMAGES, latent_size=50, simplex=None, style="tdmpc")
    assert old(old.augment({"image": image})).shape == (2, 3, 50)


def test_shifts_are_crops_of_the_padded_image() -> None:
    """Whole pixels, at most three each way, the border repeated, the same for all channels of an image."""
    torch.manual_seed(0)
    part = ShiftedImages(IMAGES, latent_size=512, style="tdmpc2", simplex=8)
    image = torch.randint(0, 256, (6, 64, 64, 9), dtype=torch.uint8)
    padded = F.pad(image.permute(0, 3, 1, 2).float(), (3, 3, 3, 3), mode="replicate").permute(0, 2, 3, 1).byte()
    crops = {}
    for number, shifted in enumerate(part.shift(image)):
        found = [
            (down, right)
            for down in range(7)
            for right in range(7)
            if torch.equal(shifted, padded[number, down : down + 64, right : right + 64])
        ]
        assert len(found) == 1
        crops[number] = found[0]
    assert len(set(crops.values())) > 1


def test_images_and_vectors_meet_in_the_middle() -> None:
    """The mean of two simplices is one."""
    encoder = make_part("encoder", observation=IMAGES | vector(3))
    seen = {"image": torch.zeros(2, 64, 64, 9, dtype=torch.uint8), "vector": torch.randn(2, 3)}
    latent = encoder(encoder.augment(seen))
    torch.testing.assert_close(latent.unflatten(-1, (64, 8)).sum(-1), torch.ones(2, 64))
    assert set(encoder.wiring()) == {"image", "vector"}
