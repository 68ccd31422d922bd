"""TD-MPC2 beside a recorded update and plans of the original: loss by loss, gradient by gradient, plan by plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from tests.golden.tdmpc2_recording import CASES, PATHS, Recording, make_workflow, place_of, tensors_of
from torch import Tensor

from rl_lab.metrics.values import TensorMetrics
from rl_lab.workflows.tdmpc2 import TDMPC2

# Both sides compute in float32, but not in the same order.
FORWARD = 3e-6  # of the largest value of an array
LOSS = 1e-6  # of the loss
GRADIENT = 1e-5  # of the gradient's norm
PARAMETER = 2e-7
PLAN = 2e-5  # of the largest value: candidates go through all networks, iteration after iteration


class Update(NamedTuple):
    """Our side of the recorded update."""

    recording: Recording
    workflow: TDMPC2
    metrics: TensorMetrics


def inject_draws(monkeypatch: pytest.MonkeyPatch, workflow: TDMPC2, noise: list[Tensor], pairs: list[Tensor]) -> None:
    """Hand out the recorded draws of the policy and of pairs of Qs, in their order."""
    draws, permutations = iter(noise), iter(pairs)
    monkeypatch.setattr(workflow.policy, "draw_noise", lambda lead: next(draws).reshape(*lead, 2))
    monkeypatch.setattr(workflow.q, "draw_pair", lambda: next(permutations)[:2])


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    if request.param == "kernels":
        pytest.importorskip("triton")
    return request.param


@pytest.fixture(scope="module", params=CASES)
def update(request: pytest.FixtureRequest, path: str) -> Iterator[Update]:
    """After the update."""
    recording = Recording(request.param)
    workflow = make_workflow(recording, path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise, pairs = ([recording[f"noise/{name}"] for name in names] for names in
                        (("td_pi", "pi"), ("td_q_perm", "pi_q_perm")))  # fmt: skip
        inject_draws(monkeypatch, workflow, noise, pairs)
        monkeypatch.setattr(workflow, "_window", lambda _: recording.window())
        outputs = workflow._train_step({})
        yield Update(recording, workflow, TensorMetrics(workflow._metric_names["update"], outputs["metrics"]))


def parts_of(workflow: TDMPC2) -> dict[str, Tensor]:
    return tensors_of(dict(workflow.context.components) | dict(workflow.context.controllers.items()))


def assert_all_close(errors: dict[str, float], tolerance: float) -> None:
    """Names every one that is too large, the worst first."""
    bad = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not bad, sorted(bad.items(), key=lambda item: -item[1])


def assert_forward(got: Tensor, expected: Tensor, tolerance: float = FORWARD) -> None:
    """Each entry within the tolerance of the largest."""
    expected = expected.view_as(got)
    torch.testing.assert_close(got.detach(), expected, rtol=0.0, atol=tolerance * expected.abs().max().item())


# The update -----------------------------------------------------------------------------------------------------------


def test_losses(update: Update) -> None:
    names = {"consistency": "consistency", "reward": "reward", "value": "value", "total": "total", "policy": "pi"}
    names |= {"termination": "termination"} if update.workflow.model.episodic else {}
    for ours, original in names.items():
        expected = float(update.recording[f"ref/loss/{original}"])
        assert float(update.metrics[f"loss/{ours}"]) == pytest.approx(expected, rel=LOSS), ours
    for ours, original in (("model", "model"), ("policy", "pi")):
        expected = float(update.recording[f"ref/{original}_grad_norm"])
        assert float(update.metrics[f"optimizer/{ours}_grad_norm"]) == pytest.approx(expected, rel=GRADIENT)
    assert float(update.metrics["policy/entropy"]) == pytest.approx(
        float(update.recording["ref/pi/scaled_entropy"].mean()), rel=1e-4
    )


@pytest.mark.parametrize("part", ["model", "pi"])
def test_gradients(update: Update, part: str) -> None:
    """By every parameter; the optimiser has scaled them in place where the norm was beyond its limit."""
    tensors, errors = parts_of(update.workflow), {}
    norm, limit = float(update.recording[f"ref/{part}_grad_norm"]), update.recording.config["grad_clip_norm"]
    for name, expected in update.recording.state(f"grad/{part}").items():
        place = place_of(name)
        got = place.view(tensors[place.name].grad) * max(1.0, norm / limit)
        errors[name] = float((got - expected).norm() / expected.norm())
    assert len(errors) > 9
    assert_all_close(errors, GRADIENT)


def test_parameters_after_the_update(update: Update) -> None:
    """Target Qs and the running scale among them."""
    tensors, errors = parts_of(update.workflow), {}
    for name, expected in update.recording.state("after").items():
        place = place_of(name)
        own = place.view(tensors[place.name]).detach()
        errors[name] = float((own - expected.view_as(own)).abs().max())
    assert len(errors) > 50
    assert_all_close(errors, PARAMETER)


# Part by part, each on the original's inputs: which one is to blame where the update differs --------------------------


@pytest.mark.parametrize("case", CASES)
def test_networks(case: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoder, dynamics, reward, termination, Qs and policy."""
    recording = Recording(case)
    workflow, window = make_workflow(recording, path), recording.window()
    inject_draws(monkeypatch, workflow, [recording["noise/td_pi"]], [recording["noise/td_q_perm"]])
    following, target = workflow.targets(window)
    assert_forward(following, recording["ref/next_z"])
    assert_forward(target, recording["ref/td_targets"])
    rolled = workflow.roll_out(window)
    assert_forward(rolled.latents, recording["ref/zs"])
    assert_forward(rolled.reward, recording["ref/reward_logits"])
    assert_forward(workflow.model.reward_loss(rolled.reward, window.reward), recording["ref/reward_ce"])
    outputs = workflow.q(rolled.latents[:-1].flatten(0, 1), window.action.flatten(0, 1)).unflatten(1, (3, 8))
    assert_forward(outputs, recording["ref/q_logits"])
    assert_forward(workflow.q.loss(outputs, target.expand(5, -1, -1)).transpose(0, 1), recording["ref/value_ce"])
    if workflow.model.episodic:
        assert_forward(workflow.model.termination_logit(rolled.latents[1:]), recording["ref/termination_logit"])
    states = recording["ref/zs"].flatten(0, 1)
    choices = workflow.policy.choices(states, recording["noise/pi"].flatten(0, 1))
    assert_forward(choices.action[0], recording["ref/pi/action"].flatten(0, 1))
    assert_forward(choices.entropy, recording["ref/pi/scaled_entropy"].flatten(), 1e-5)


# Plans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan_a", "plan_b"])
@pytest.mark.parametrize("case", CASES)
def test_plans(case: str, name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every iteration's candidates, returns and elites, and what is done and remembered in the end."""
    recording = Recording(case)
    workflow = make_workflow(recording, path)
    planner, model, iterations = workflow.planner, workflow.model, recording.config["iterations"]
    if model.episodic:  # the original cuts at 0.5
        probability = model.continuation
        monkeypatch.setattr(model, "continuation", lambda latent: (probability(latent) >= 0.5).float())
    final = [draw for draw in recording[f"{name}/noise/final_pi"]]
    inject_draws(
        monkeypatch, workflow, [*recording[f"{name}/noise/pi_traj"], *final], list(recording[f"{name}/noise/q_perm"])
    )
    scored: list[tuple[Tensor, Tensor]] = []
    score = planner.score

    def recorded_score(state: Tensor, candidates: Tensor) -> Tensor:
        returns = score(state, candidates)
        scored.append((candidates, returns))
        return returns

    monkeypatch.setattr(planner, "score", recorded_score)
    previous = recording[f"{name}/prev_mean_before"]  # of the last decision: the planner keeps it one step on
    known = torch.zeros(1) if recording[f"{name}/t0"] else torch.ones(1)
    shifted = torch.cat([previous[1:], torch.zeros(1, 2)])[None]
    noise = {
        "candidates": recording[f"{name}/noise/samples"].transpose(1, 2)[:, None],
        "choice": recording[f"{name}/noise/exponential"][None],
    }
    with torch.no_grad():
        latent = workflow.simulator.observe({"vector": recording[f"{name}/obs"]})
        plan = planner.plan(latent, {"plan_mean": shifted * known, "plan_known": known}, noise=noise)
    assert_forward(latent, recording[f"{name}/z"])
    assert len(scored) == iterations
    for i, (candidates, returns) in enumerate(scored):
        assert_forward(candidates[0].transpose(0, 1), recording[f"{name}/iter/actions"][i], PLAN)
        assert_forward(returns[0], recording[f"{name}/iter/value"][i], PLAN)
        best = returns[0].topk(recording.config["num_elites"]).indices
        assert torch.equal(best, recording[f"{name}/iter/elite_idxs"][i])
    assert_forward(plan.actions[0], recording[f"{name}/selected"], PLAN)
    assert_forward(plan.std[0], recording[f"{name}/iter/std"][-1], PLAN)
    after = recording[f"{name}/prev_mean_after"]
    assert_forward(plan.memory["plan_mean"][0, :-1], after[1:], PLAN)
    action = plan.action[0]
    if not recording[f"{name}/eval_mode"]:
        monkeypatch.setattr(torch, "randn_like", lambda _: recording[f"{name}/noise/action"][None])
        action = workflow._explore(plan)[0]
    assert_forward(action, recording[f"{name}/action"], PLAN)
