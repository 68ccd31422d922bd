"""DreamerV3 beside a recorded training step of the original: loss by loss, gradient by gradient, and what it leaves."""

from __future__ import annotations

from typing import Literal, NamedTuple

import pytest
import torch
from tests.golden.dreamer_v3_recording import (
    CASES,
    LOSSES,
    PATHS,
    Recording,
    all_tensors,
    make_dreamer,
    modules_of,
    moments_of,
    trainable,
)
from torch import Tensor

from rl_lab.components.actors.dreamer import Actor
from rl_lab.components.world_models.base import DETER, STOCH, LatentState, StateSpaceModel
from rl_lab.metrics.values import TensorMetrics
from rl_lab.workflows.context import PhaseView
from rl_lab.workflows.dreamer_v3 import DreamerV3

# Both sides compute in float32, but not in the same order.
FORWARD = 2e-6  # of the largest value of an array
LOSS = 1e-6  # of the loss
GRADIENT = 5e-6  # of its norm. The recorded reward gradients are 3e-6 from the exact ones (in float64), ours 2e-7.
PARAMETER = 2.5e-7  # of max(1, |parameter|): two roundings
MOMENTUM, SECOND_MOMENT = 2e-5, 4e-6  # of its norm


class Step(NamedTuple):
    """Our side of the recorded step."""

    recording: Recording
    workflow: DreamerV3
    metrics: TensorMetrics


def inject_noise(monkeypatch: pytest.MonkeyPatch, recording: Recording) -> None:
    """Hand out the recorded draws: those of the posterior, those of the dream, and those of its actions.

    The original chooses an action in the last imagined state too, which nothing depends on: that draw is left out.
    """
    latent_draws = {(8, 4): "noise/post", (5, 32): "noise/prior"}  # [time, rows], [horizon, starts]

    def latent_noise(self: StateSpaceModel, lead: tuple[int, ...], device: torch.device | str) -> Tensor:
        return recording.noise(latent_draws[tuple(lead)], self.noise)

    def action_noise(self: Actor, lead: tuple[int, ...], device: torch.device | str) -> Tensor:
        assert tuple(lead) == (5, 32)
        return recording.noise("noise/act", self.noise)[:5]

    # In the classes: a kernel steps aside where a method of an instance was replaced.
    monkeypatch.setattr(StateSpaceModel, "draw_noise", latent_noise)
    monkeypatch.setattr(Actor, "draw_noise", action_noise)


@pytest.fixture(scope="module", params=[(case, path) for case in CASES for path in PATHS], ids="-".join)
def step(request: pytest.FixtureRequest) -> Step:
    """After the step, on one of the paths."""
    case, path = request.param
    recording = Recording(case)
    with pytest.MonkeyPatch.context() as monkeypatch:
        inject_noise(monkeypatch, recording)
        workflow = make_dreamer(recording, path=path)
        metrics = workflow.update(recording.batch(), phase=PhaseView("main", "online", data_source="replay"))
    return Step(recording, workflow, metrics)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Of the norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def assert_all_close(errors: dict[str, float], tolerance: float) -> None:
    """Names every one that is too large, the worst first."""
    bad = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not bad, sorted(bad.items(), key=lambda item: -item[1])


# The whole step -------------------------------------------------------------------------------------------------------


def test_losses(step: Step) -> None:
    """Each term, and their scaled sum."""
    means = {LOSSES[name]: step.recording[f"ref/loss/{name}"].double().mean() for name in LOSSES}
    means["total"] = step.recording["ref/loss_total"].double()
    errors = {name: float(abs(step.metrics[f"loss/{name}"] - mean) / mean.abs()) for name, mean in means.items()}
    assert_all_close(errors, LOSS)


def test_gradients(step: Step) -> None:
    """Of the scaled sum, by every parameter."""
    expected, parameters = step.recording.state("grad"), trainable(modules_of(step.workflow))
    assert set(expected) == set(parameters)
    errors = {name: relative_error(parameters[name].grad, expected[name]) for name in expected}
    assert_all_close(errors, GRADIENT)
    norm = step.recording["metric/opt/grad_norm"]
    assert step.metrics["optimizer/grad_norm"].item() == pytest.approx(norm.item(), rel=GRADIENT)


def test_parameters_after_the_step(step: Step) -> None:
    """The slow critic and the return normaliser among them."""
    expected, state = step.recording.state("after"), all_tensors(step.workflow)
    errors = {
        name: ((state[name] - value).abs() / value.abs().clamp(min=1.0)).max().item()
        for name, value in expected.items()
    }
    assert_all_close(errors, PARAMETER)


@pytest.mark.parametrize(
    ("name", "original", "tolerance"), [("momentum", "mu", MOMENTUM), ("second_moment", "nu", SECOND_MOMENT)]
)
def test_moments_after_the_step(step: Step, name: str, original: str, tolerance: float) -> None:
    parameters = trainable(modules_of(step.workflow))
    moments = moments_of(step.workflow.context.optimizers["main"], parameters, name)
    expected = step.recording.state(f"after/opt/{original}")
    assert_all_close({key: relative_error(moments[key], value) for key, value in expected.items()}, tolerance)


def test_learning_rate(step: Step) -> None:
    """The count before the step decides: 3 of 10 updates of warm-up are over, or all 1000."""
    expected = {"discrete": 0.3 * 1e-3, "continuous": 4e-5}[step.recording.case]
    assert step.metrics["optimizer/learning_rate"].item() == pytest.approx(expected, rel=1e-6)


def test_latents_written_back(step: Step) -> None:
    """The replay keeps h in half precision, and z as class numbers."""
    written = step.workflow.context.data_sources["replay"]
    assert torch.equal(written.indices, step.recording.batch().indices[:, 1:])
    torch.testing.assert_close(
        written.fields[DETER].float(), step.recording["replay_update/dyn/deter"], rtol=2.0**-11, atol=1e-6
    )
    classes = step.recording["replay_update/dyn/stoch"].argmax(-1)
    assert torch.equal(written.fields[STOCH].long(), classes)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_each_loss_has_its_own_gradients(
    case: str, path: Literal["auto", "off"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norms of the gradient of every single loss by every tensor: 0 where a stop-gradient stands in between."""
    recording = Recording(case)
    inject_noise(monkeypatch, recording)
    workflow = make_dreamer(recording, path=path)
    losses, parameters = workflow.batch_losses(recording.batch()), trainable(modules_of(workflow))
    tensors = [recording.places[name].name for name in recording.arrays["lossgradnorm/param_names"]]
    for name, norms in zip(recording.arrays["lossgradnorm/loss_names"], recording["lossgradnorm/table"], strict=True):
        chosen = [parameters[tensor] for tensor in tensors]
        gradients = torch.autograd.grad(losses[LOSSES[name]], chosen, retain_graph=True, allow_unused=True)
        own = torch.stack([torch.zeros(()) if gradient is None else gradient.norm() for gradient in gradients])
        assert torch.equal(own == 0.0, norms == 0.0), name
        errors = ((own - norms).abs() / norms.clamp(min=1e-12)).tolist()
        assert_all_close(dict(zip([f"{name}: {tensor}" for tensor in tensors], errors, strict=True)), GRADIENT)


# Part by part, each on the original's inputs: which one is to blame where the step differs ----------------------------


class Parts(NamedTuple):
    recording: Recording
    workflow: DreamerV3
    states: LatentState  # the recorded posterior states [batch, time]
    imagined: LatentState  # the recorded dreams [starts, horizon + 1]


@pytest.fixture(scope="module", params=[(case, path) for case in CASES for path in PATHS], ids="-".join)
def parts(request: pytest.FixtureRequest) -> Parts:
    case, path = request.param
    recording = Recording(case)
    posterior, imagined = (
        LatentState(recording[f"{name}/deter"], recording[f"{name}/stoch"].flatten(-2))
        for name in ("ref/wm/post", "ref/imag")
    )
    return Parts(recording, make_dreamer(recording, path=path), posterior, imagined)


def assert_forward(got: Tensor, expected: Tensor) -> None:
    """Equal shapes, and each entry within the tolerance of the largest."""
    torch.testing.assert_close(got.detach(), expected, rtol=0.0, atol=FORWARD * expected.abs().max().item())


def test_filtering(parts: Parts) -> None:
    """Encoder, recurrence with its resets, posterior: the recorded classes are drawn."""
    recording, rssm = parts.recording, parts.workflow.rssm
    embed = parts.workflow.encoder({"vector": recording["ref/in/obs/vector"]})
    assert_forward(embed, recording["ref/wm/tokens"])
    action = recording["ref/in/prevact/action"]
    action = parts.workflow.codec.encode(action.unsqueeze(-1) if recording.case == "discrete" else action)
    initial = LatentState(recording["ref/in/carry/deter"], recording["ref/in/carry/stoch"].flatten(-2))
    noise = recording.noise("noise/post", rssm.noise)
    states, logits = rssm.observe(embed, action, recording["ref/in/obs/is_first"], initial, noise)
    assert_forward(states.deter, parts.states.deter)
    assert_forward(states.stoch, parts.states.stoch)
    assert_forward(logits, recording["ref/wm/post/logit"])


def test_predictions(parts: Parts) -> None:
    """Prior, decoder, reward and continuation at the replayed states."""
    recording, workflow, states = parts.recording, parts.workflow, parts.states
    assert_forward(workflow.rssm.prior(states.deter), recording["ref/wm/prior_logit"])
    assert_forward(workflow.decoder(states.deter, states.stoch)["vector"], recording["ref/wm/recon_vector"])
    reward = workflow.reward(states.features)
    assert_forward(reward, recording["ref/wm/rew_logits"])
    assert_forward(workflow.reward.mean(reward), recording["ref/wm/rew_pred"])
    assert_forward(workflow.continuation(states.features), recording["ref/wm/con_logit"])


def test_dreaming(parts: Parts) -> None:
    """The recorded actions lead through the recorded states, and the actor chooses them there."""
    recording, workflow = parts.recording, parts.workflow
    latent_noise = recording.noise("noise/prior", workflow.rssm.noise)
    action_noise = recording.noise("noise/act", workflow.actor.noise)
    actions = recording["ref/imag/act_action"]
    actions = workflow.codec.encode(actions.unsqueeze(-1) if recording.case == "discrete" else actions)
    state = parts.imagined.map(lambda part: part[:, 0])
    for t in range(5):
        chosen = workflow.actor.distribution(workflow.actor(state.features)).sample(action_noise[t])
        assert_forward(chosen, actions[:, t])
        state = workflow.rssm.predict_step(state, actions[:, t], latent_noise[t])
        assert_forward(state.deter, parts.imagined.deter[:, t + 1])
        assert_forward(state.stoch, parts.imagined.stoch[:, t + 1])


def test_judging_dreams(parts: Parts) -> None:
    """Reward, continuation, value and policy at the imagined states."""
    recording, workflow, features = parts.recording, parts.workflow, parts.imagined.features
    assert_forward(workflow.reward.mean(workflow.reward(features)), recording["ref/imag/rew"])
    assert_forward(workflow.continuation.mean(workflow.continuation(features)), recording["ref/imag/con"])
    assert_forward(workflow.critic.mean(workflow.critic(features)), recording["ref/imag/val"])
    assert_forward(workflow.critic.slow_mean(features), recording["ref/imag/slowval"])
    policy = workflow.actor.distribution(workflow.actor(features[:, :-1]))
    actions = recording["ref/imag/act_action"][:, :-1]
    actions = workflow.codec.encode(actions.unsqueeze(-1) if recording.case == "discrete" else actions)
    assert_forward(policy.log_prob(actions), recording["ref/imag/logpi"])
    assert_forward(policy.entropy(), recording["ref/imag/ent_action"])
