"""What a researcher overrides in PPO is what runs, on the CPU with kernels on and on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.docs.documents import blocks
from tests.extension.overriding import altered, assert_differ, overriding
from tests.workflows.ppo_parts import CONTINUOUS, DISCRETE, PHASE, POLICY, VALUE, VECTOR, make_ppo, make_rollout, whole
from torch import Tensor, nn

from rl_lab.components.actors.action_distributions import Categoricals, DiagonalNormal
from rl_lab.components.actors.ppo import GaussianPolicy, SoftmaxPolicy, ValueHead
from rl_lab.components.encoders import MultiKeyEncoder
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.specs import ActionSpec
from rl_lab.workflows.ppo import PPO

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def results(ppo: PPO) -> dict[str, Tensor]:
    """Metrics and parameters after two updates on one rollout, and the actions of a state."""
    rollout = make_rollout(ppo)
    metrics = [ppo.update(whole(rollout, is_final=False), phase=PHASE) for _ in range(2)][-1]
    values = {name: torch.tensor(float(value)) for name, value in metrics.items() if name != "loss/kl"}
    torch.manual_seed(0)
    action, _ = ppo.act({"vector": np.linspace(-2.0, 2.0, 20, dtype=np.float32).reshape(10, 2)}, {}, mode="train")
    parameters = [p for part in (ppo.policy, ppo.critic) for p in part.parameters()]
    weights = {f"parameter {number}": value.detach().cpu() for number, value in enumerate(parameters)}
    return values | weights | {"action": torch.from_numpy(action)}


def assert_changes(name: str, calls: list[str], device: str, action: ActionSpec = DISCRETE, **parts: Any) -> None:
    """The override was called, and the result is another one."""
    changed = results(make_ppo(action, device=device, **parts))
    assert calls, f"{name} was overridden and never called"
    assert_differ(results(make_ppo(action, device=device)), changed, name)


@pytest.mark.parametrize("method", ["forward", "distribution"])
@pytest.mark.parametrize(
    ("kind", "action"), [(SoftmaxPolicy, DISCRETE), (GaussianPolicy, CONTINUOUS)], ids=["softmax", "gaussian"]
)
def test_policy(method: str, kind: type, action: ActionSpec, device: str) -> None:
    """`forward` with other parameters; `distribution` with another temperature or deviation: acting and learning."""
    calls: list[str] = []
    settings = {key: value for key, value in POLICY.items() if kind is GaussianPolicy or key != "log_std"}

    class Other(kind):  # type: ignore[misc, valid-type]
        def distribution(self, params: Tensor) -> Categoricals | DiagonalNormal:
            calls.append("distribution")
            if kind is SoftmaxPolicy:
                return Categoricals(3.0 * params, self.spec.classes)
            return DiagonalNormal(params, self.log_std - 1.0, self.spec.shape)

    chosen = Other if method == "distribution" else overriding(kind, method, calls)
    torch.manual_seed(0)
    policy = chosen(action=action, feature_size=2, **settings)
    assert_changes(method, calls, device, action, controllers={"policy": policy})


def test_samples_and_losses_share_the_distribution() -> None:
    """An overridden policy acts and learns by the same law: the first minibatch has ratio 1."""
    calls: list[str] = []
    policy = overriding(SoftmaxPolicy, "forward", calls)(
        action=DISCRETE, feature_size=2, **{key: value for key, value in POLICY.items() if key != "log_std"}
    )
    ppo = make_ppo(controllers={"policy": policy})
    log_ratio = ppo.predict(ppo._minibatch(whole(make_rollout(ppo)))).log_ratio
    assert log_ratio.abs().max() < 1e-5


def test_value_head(device: str) -> None:
    calls: list[str] = []
    critic = overriding(ValueHead, "forward", calls)(feature_size=2, **VALUE)
    assert_changes("ValueHead.forward", calls, device, controllers={"critic": critic})


def test_encoder(device: str) -> None:
    """Though the usual encoder hands a vector on as it is."""
    calls: list[str] = []
    encoder = overriding(MultiKeyEncoder, "forward", calls)(observation=VECTOR, layers=0, use_symlog=False)
    assert_changes("encoder", calls, device, components={"encoder": encoder})


@pytest.mark.parametrize("method", ["losses", "predict", "advantages"])
def test_workflow(method: str, device: str) -> None:
    calls: list[str] = []
    assert_changes(method, calls, device, workflow=overriding(PPO, method, calls))


def test_hooks_and_swapped_layers(device: str) -> None:
    """A forward hook of a layer, and another activation in its place."""
    plain, calls = results(make_ppo(device=device)), list[str]()
    hooked, swapped = make_ppo(device=device), make_ppo(device=device)

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        calls.append("hook")
        return altered(output)

    hooked.policy.head[0].register_forward_hook(hook)
    swapped.critic.head[1] = nn.SiLU()
    assert_differ(plain, results(hooked), "a hook")
    assert calls
    assert_differ(plain, results(swapped), "an activation")


@pytest.mark.parametrize("make", [torch.optim.RMSprop, overriding], ids=["torch's own", "a subclass"])
def test_optimizer(make: Any, device: str) -> None:
    """Any of torch's, or a subclass of the usual one whose step does more."""
    calls: list[str] = []

    class Slower(FlatAdam):
        def step(self, closure: None = None, *, loss: Any = None) -> None:  # type: ignore[override]
            calls.append("step")
            self.gradient.mul_(0.1)
            self.weights.mul_(0.999)
            super().step(loss=loss)

    if make is overriding:
        assert_changes("step", calls, device, optimizer=partial(Slower, lr=1e-2, eps=1e-8, clip=0.5))
        return
    calls.append("made")
    assert_changes("RMSprop", calls, device, optimizer=lambda parameters: make(parameters, lr=1e-2))


def test_torch_optimizers_leave_bad_updates_out() -> None:
    """And the learning rate of each of their groups falls with the run."""
    ppo = make_ppo(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2))
    before = [value.clone() for value in ppo.policy.parameters()]
    rollout = make_rollout(ppo)
    rollout.reward[0, 0] = float("nan")
    metrics = ppo.update(whole(rollout), phase=PHASE)
    assert metrics["optimizer/nonfinite"] == 1.0
    assert all(torch.equal(one, other) for one, other in zip(before, ppo.policy.parameters(), strict=True))


def test_the_documented_kl_penalty(device: str) -> None:
    """The snippet of docs/ppo.md: under fifteen lines, its loss is there, and it holds the policy back."""
    (text,) = [block.text for block in blocks("python") if block.page == "docs/ppo.md" and "kl_estimate" in block.text]
    body = text[text.index("class ") :]
    assert len([line for line in body.splitlines() if line.strip()]) < 15
    space: dict[str, Any] = {}
    exec(text, space)
    moved = []
    for scale in (0.0, 50.0):
        ppo = make_ppo(device=device, workflow=space["PenalizedPPO"], kl_scale=scale, clip=0.9)
        rollout = make_rollout(ppo)
        for _ in range(30):
            metrics = ppo.update(whole(rollout, is_final=False), phase=PHASE)
        assert float(metrics["loss/kl"]) == pytest.approx(float(metrics["policy/kl"]), rel=1e-4)
        moved.append(float(metrics["policy/kl"]))
    assert moved[1] < 0.5 * moved[0]
