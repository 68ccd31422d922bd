"""What a researcher overrides in TD-MPC, TD-MPC2 and the planners is what runs: on the CPU with kernels on, by the
GPU's own path as far as it runs here, and on a GPU."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.components.planner_models import CONTINUOUS as LAYOUT
from tests.components.planner_models import ValuedPull, make_planner
from tests.docs.documents import blocks
from tests.extension.overriding import assert_captured_anew, assert_differ, overriding
from tests.workflows.tdmpc_parts import CONTINUOUS, DISCRETE, KINDS, PLANNER, make_batch, make_workflow, randomize
from torch import Tensor, nn

from rl_lab.components.actors.tdmpc import CategoricalPrior, NoisyMean, SquashedGaussian
from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.gradient import GradientPlanner
from rl_lab.components.planners.icem import ICEM
from rl_lab.components.planners.mppi import MPPI
from rl_lab.components.planners.policy_guided import PolicyGuided
from rl_lab.components.planners.random_shooting import RandomShooting
from rl_lab.kernels.graphs import CapturedStep
from rl_lab.specs import ActionSpec
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.tdmpc import TDMPC
from rl_lab.workflows.tdmpc2 import TDMPC2

PHASE = PhaseView("train", "online")
SMALL = {"units": 8, "latent": 8, "batch_size": 2, "members": 2, "planner": PLANNER | {"iterations": 1}}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PATHS = ["cpu", "copies", pytest.param("cuda", marks=needs_gpu)]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """cpu: as a run on the CPU. copies: the GPU's plans, with 16-bit copies, without a compiler. cuda: compiled and
    captured."""
    if request.param == "copies":
        for place in ("simulation.tdmpc", "components.planners.tdmpc", "workflows.tdmpc_base"):
            monkeypatch.setattr(f"rl_lab.{place}.compile_block", lambda function, **_: function)
        monkeypatch.setattr(CapturedStep, "__call__", lambda self, inputs: self._function(dict(inputs)))
        monkeypatch.setattr(WorkflowContext, "planning_dtype", torch.float16)
    return request.param


def make(path: str, kind: type = TDMPC2, action: ActionSpec = CONTINUOUS, **settings: Any) -> Any:
    device = "cuda" if path == "cuda" else "cpu"
    workflow = make_workflow(kind, action, device=device, compile_=path != "cpu", **SMALL | settings)
    return workflow


def results(workflow: Any) -> dict[str, Tensor]:
    """Everything that an update, a plan and a decision give, from one random stream."""
    torch.manual_seed(0)
    randomize(workflow.model, workflow.q)
    batch = make_batch(workflow, weighted=isinstance(workflow, TDMPC))
    torch.manual_seed(1)
    metrics = workflow.update(batch, phase=PHASE).values_vector.detach().cpu().clone()
    seen = {"vector": np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(2, 4)}
    plan, _ = workflow.plan(seen, workflow.initial_state(2))
    decided = {mode: workflow.act(seen, workflow.initial_state(2), mode=mode)[0] for mode in ("train", "eval")}
    found = {"metrics": metrics, "returns": plan.returns, "mean": plan.memory["plan_mean"], "std": plan.std}
    return {name: value.cpu() for name, value in found.items()} | {
        mode: torch.as_tensor(action) for mode, action in decided.items()
    }


@cache
def plain_results(path: str, kind: type, action: ActionSpec, act_with: str) -> dict[str, Tensor]:
    return results(make(path, kind, action, act_with=act_with))


PARTS = {
    "encoder": ("forward", "augment"),
    "model": ("step", "reward_mean", "reward_loss", "termination_logit", "continuation"),
    "q": ("forward", "target", "mean", "loss", "draw_pair"),
    "planner": ("score", "draw_noise", "policy_sequences", "start", "propose", "refit", "remember"),
}


@pytest.mark.parametrize(("part", "method"), [(part, method) for part, methods in PARTS.items() for method in methods])
def test_parts(path: str, part: str, method: str) -> None:
    """Encoder, model, Qs and planner."""
    calls: list[str] = []
    workflow = make(path, kinds={part: overriding(KINDS[part], method, calls)})
    if method == "draw_pair":  # its numbers are no floats: always the first, twice
        workflow.q.draw_pair = lambda: (
            calls.append(method) if not calls else None,
            torch.zeros(2, dtype=torch.int64, device=path_device(path)),
        )[1]
    changed = results(workflow)
    assert calls
    assert_differ(changed, plain_results(path, TDMPC2, CONTINUOUS, "planner"), f"{part}.{method}")


def path_device(path: str) -> str:
    return "cuda" if path == "cuda" else "cpu"


@pytest.mark.parametrize("method", ["forward", "sample", "drawn", "choices", "mode", "draw_noise"])
@pytest.mark.parametrize("policy", [SquashedGaussian, CategoricalPrior, NoisyMean])
def test_policies(path: str, policy: type, method: str) -> None:
    """Their network, their distribution, and how actions are drawn and judged; `mode` where the policy acts alone."""
    kind = TDMPC if policy is NoisyMean else TDMPC2
    action, act_with = (
        DISCRETE if policy is CategoricalPrior else CONTINUOUS,
        "policy" if method == "mode" else "planner",
    )
    calls: list[str] = []
    changed = results(make(path, kind, action, kinds={"policy": overriding(policy, method, calls)}, act_with=act_with))
    assert calls
    assert_differ(changed, plain_results(path, kind, action, act_with), f"{policy.__name__}.{method}")


LOSSES = ("model_losses", "world_model_losses", "value_loss", "targets", "roll_out", "policy_loss", "policy_values")


@pytest.mark.parametrize("method", LOSSES)
@pytest.mark.parametrize("kind", [TDMPC2, TDMPC])
def test_losses(path: str, kind: type, method: str) -> None:
    """Every loss and target of the workflows."""
    calls: list[str] = []
    changed = results(make(path, overriding(kind, method, calls)))
    assert calls
    assert_differ(changed, plain_results(path, kind, CONTINUOUS, "planner"), f"{kind.__name__}.{method}")


def test_a_further_loss() -> None:
    """The snippet of docs/tdmpc2.md: under ten lines of code, its loss is there and counts."""
    (text,) = [block.text for block in blocks("python") if block.page == "docs/tdmpc2.md"]
    assert len([line for line in text.splitlines() if line.strip()]) < 10
    names: dict[str, Any] = {}
    exec(text, names)
    scales = {"consistency": 20.0, "reward": 0.1, "value": 0.1, "termination": 1.0}
    metrics = []
    for weight in (0.0, 1.0):
        workflow = make("cpu", names["SmoothTDMPC2"], loss_scales=scales | {"smoothness": weight})
        batch = make_batch(workflow)
        metrics.append([workflow.update(batch, phase=PHASE) for _ in range(20)][-1])
    assert float(metrics[1]["loss/smoothness"]) < float(metrics[0]["loss/smoothness"])


def swap_activation(workflow: Any) -> None:
    workflow.model.trunks.layers[0].activation = nn.GELU()


def swap_simplex(workflow: Any) -> None:
    workflow.model.latent_output.activation = nn.Softplus()


def hook_layer(workflow: Any) -> None:
    workflow.q.online.layers[1].register_forward_hook(lambda module, inputs, output: output + 0.3)


def replace_method(workflow: Any) -> None:
    step = workflow.model.step
    workflow.model.step = lambda latent, action: step(latent, 0.5 * action)


def hook_output(workflow: Any) -> None:
    workflow.model.reward_output.register_forward_hook(
        lambda module, inputs, output: output + torch.arange(101.0).to(output) / 100
    )


@pytest.mark.parametrize("change", [swap_activation, swap_simplex, hook_layer, replace_method, hook_output])
def test_changed_modules(path: str, change: Any) -> None:
    """Swapped layers, hooks and methods of one instance, before the first update: in updates and in plans."""
    workflow = make(path)
    change(workflow)
    changed, plain = results(workflow), plain_results(path, TDMPC2, CONTINUOUS, "planner")
    for name in ("metrics", "returns"):
        assert not torch.equal(changed[name], plain[name]), name


@pytest.mark.parametrize("step", ["update", "update_world_model", "act"])
@pytest.mark.parametrize("kind", [TDMPC, TDMPC2])
def test_hooks_after_the_capture(kind: type, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph is made anew for a module that was changed since."""
    for place in ("simulation.tdmpc", "components.planners.tdmpc", "workflows.tdmpc_base"):
        monkeypatch.setattr(f"rl_lab.{place}.compile_block", lambda function, **_: function)
    workflow = make("copies", kind)
    batch, seen = make_batch(workflow, weighted=kind is TDMPC), {"vector": np.zeros((2, 4), np.float32)}
    state = workflow.initial_state(2)
    run = partial(workflow.act, seen, state) if step == "act" else partial(getattr(workflow, step), batch, phase=PHASE)
    assert_captured_anew(run, workflow.model.reward_output)


def test_plans_on_copies_follow_a_hook(path: str) -> None:
    """One that comes after the first plan."""
    if path == "cuda":
        pytest.skip("the graph's part is tested above")
    workflow = make(path)
    randomize(workflow.model, workflow.q)
    seen, state = {"vector": np.ones((2, 4), np.float32)}, workflow.initial_state(2)

    def returns() -> Tensor:
        torch.manual_seed(1)
        return workflow.plan(seen, state)[0].returns

    before = returns()
    assert torch.equal(returns(), before)
    hook = workflow.model.reward_output.register_forward_hook(
        lambda module, inputs, output: output + torch.arange(101.0).to(output) / 100
    )
    assert not torch.equal(returns(), before)
    hook.remove()
    assert torch.equal(returns(), before)


PLANNERS: dict[type, tuple[str, ...]] = {
    RandomShooting: ("score", "draw_noise"),
    CEM: ("score", "draw_noise", "_start", "_draw", "_refit", "_next_memory"),
    ICEM: ("score", "draw_noise", "_start", "_draw", "_refit", "_remember"),
    MPPI: ("score", "draw_noise", "_weights", "_refit", "_next_memory"),
    PolicyGuided: ("score", "draw_noise", "_fixed_candidates", "_weights", "_refit"),
    GradientPlanner: ("score", "draw_noise", "_climb"),
}


@pytest.mark.parametrize(("planner", "method"), [(kind, name) for kind, names in PLANNERS.items() for name in names])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_planners(device: str, planner: type, method: str) -> None:
    """The parts of every planner."""
    calls: list[str] = []
    found = []
    for kind in (planner, overriding(planner, method, calls)):
        torch.manual_seed(0)
        made = make_planner(kind, action=LAYOUT, horizon=3).to(device)
        made.attach(ValuedPull(LAYOUT))
        state = torch.tensor([[0.6, -0.4], [-0.2, 0.9]], device=device)
        plan = made.plan(state, made.initial_memory(2))
        found.append({"actions": plan.actions, "returns": plan.returns, "mean": plan.memory["plan_mean"]})
    assert calls
    assert_differ(found[1], found[0], f"{planner.__name__}.{method}")
