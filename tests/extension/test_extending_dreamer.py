"""What a researcher overrides in a Dreamer or in PlaNet is what runs: on the CPU with kernels on, by the GPU's own path
as far as it runs here, and on a GPU, compiled and captured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.extension.overriding import assert_captured_anew, assert_differ, overriding
from tests.overrides import QUIET, TINY_DREAMER
from tests.workflows import dreamer_parts, planet_parts
from tests.workflows.dreamer_family import make_v1, make_v2, make_v3_2023
from tests.workflows.dreamer_parts import CONTINUOUS, DISCRETE, make_dreamer
from tests.workflows.planet_parts import make_planet
from torch import Tensor, nn

from rl_lab.components.world_models.transformer_ssm import TransformerSSM
from rl_lab.errors import ConfigError
from rl_lab.kernels import graphs, registry
from rl_lab.kernels.graphs import CapturedStep
from rl_lab.nn.optimizers import LaProp
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.planet import PlaNet

PHASE = PhaseView("train", "online")
FITTING = {"deter": 512, "hidden": 64, "groups": 16, "classes": 4, "units": 16, "depth": 2}  # the kernels' sizes
INTERPRETED = find_spec("triton") is not None and "TRITON_INTERPRET" in os.environ
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PATHS = ["cpu", "deferred", pytest.param("cuda", marks=needs_gpu), pytest.param("bfloat16", marks=needs_gpu)]
Change = Callable[[Workflow, WorkflowContext], None]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """cpu: as a run on the CPU. deferred: the GPU's loops and dreams, without a compiler, and with Triton's kernels in
    its interpreter where it is installed. cuda, bfloat16: compiled and captured, in float32 and in half precision."""
    if request.param != "deferred":
        yield request.param
        return
    candidates = registry._candidates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_candidates", lambda module, _: [
            kernel for kernel in candidates(module, torch.device("cuda"))
            if INTERPRETED or "kernels.triton" not in kernel.implementation
        ])  # fmt: skip
        patch.setattr(registry, "is_installed", lambda package: True)
        patch.setattr(CapturedStep, "__call__", lambda self, inputs: self._function(dict(inputs)))
        graphs.configure(compiling=False)
        yield request.param
        graphs.configure(compiling=True)


def make_transformer(**settings: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dreamer_parts, "BlockRSSM", partial(TransformerSSM, window=4, heads=2, layers=1))
        return make_dreamer(**settings)


FAMILIES: dict[str, Callable[..., Any]] = {
    "v3": partial(make_dreamer, bin_limit=3.0),
    "transformer": partial(make_transformer, bin_limit=3.0),
    "v3_2023": partial(make_v3_2023, CONTINUOUS),
    "v2": partial(make_v2, DISCRETE),
    "v1": make_v1,
    "planet": partial(make_planet, overshooting_distance=2, loss_scales={"overshooting": 1.0}),
}


def make(path: str, family: str, change: Change | None = None) -> Any:
    """A small workflow in which `change(workflow, context)` was called before it was initialised."""
    device = "cpu" if path in ("cpu", "deferred") else "cuda"
    settings: dict[str, Any] = {"device": device, "compile_": path != "cpu"}
    if path == "bfloat16" and family == "v3":
        settings |= {"sizes": FITTING, "autocast_dtype": torch.bfloat16}
    initialize = Workflow.initialize

    def after_change(self: Workflow, context: WorkflowContext) -> None:
        modules = {**context.components, **dict(context.controllers.items())}
        with torch.no_grad():  # zeros that outputs start with would hide much
            for value in (value for module in modules.values() for value in module.parameters()):
                value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(3)).to(device)
        if change is not None:
            change(self, context)
        dtype = context.autocast_dtype or torch.float32
        registry.enable(modules, device=torch.device(device), dtype=dtype, mode="auto")
        initialize(self, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workflow, "initialize", after_change)
        return FAMILIES[family](**settings)


def results(workflow: Any, hook: str = "") -> dict[str, Tensor]:
    """The metrics of an update, and every parameter after it, from one random stream."""
    device = str(workflow.context.device)
    if isinstance(workflow, PlaNet):
        batch = planet_parts.make_batch(workflow, device=device)
    else:
        batch = dreamer_parts.make_batch(workflow, latents=bool(workflow.latent_specs), device=device)
    update = getattr(workflow, hook or workflow.update_hooks[0])
    torch.manual_seed(1)
    metrics = dict(update(batch, phase=PHASE))
    modules = {**workflow.context.components, **dict(workflow.context.controllers.items())}
    found = {
        f"{part}.{name}": value.detach().cpu().clone()
        for part, module in modules.items()
        for name, value in module.named_parameters()
    }
    found |= {name: torch.as_tensor(value).detach().cpu().clone() for name, value in metrics.items()}
    assert all(value.isfinite().all() for value in found.values())
    return found


@cache
def plain_results(path: str, family: str, hook: str = "") -> dict[str, Tensor]:
    return results(make(path, family), hook)


def part_of(context: WorkflowContext, name: str) -> nn.Module:
    return context.components[name] if name in context.components else dict(context.controllers.items())[name]


def overriding_inputs(base: type, name: str, calls: list[str]) -> type:
    """A subclass whose method `name` gets other numbers than its parent's: for one that returns no tensor."""

    def method(self: Any, params: Tensor) -> Any:
        if name not in calls:  # once, as in overriding.py
            calls.append(name)
        return getattr(super(kind, self), name)(0.7 * params.flip(-1) + 0.1)

    kind = type(f"My{base.__name__}", (base,), {name: method})
    return kind


def subclassed(name: str, method: str, calls: list[str]) -> Change:
    """Makes a part an instance of a subclass that overrides a method."""

    def change(workflow: Workflow, context: WorkflowContext) -> None:
        part, kind = part_of(context, name), overriding_inputs if method == "distribution" else overriding
        part.__class__ = kind(type(part), method, calls)

    return change


def check(path: str, family: str, change: Change, calls: list[str], name: str, hook: str = "") -> None:
    changed = results(make(path, family, change), hook)
    assert calls, f"{name} was overridden, and never called"
    assert_differ(changed, plain_results(path, family, hook), name)


WORLD_MODEL = ("advance", "prior", "posterior", "distribution", "sample")
PARTS: dict[str, tuple[str, ...]] = {
    "rssm": (*WORLD_MODEL, "divergence", "entropy"),
    "encoder": ("forward",),
    "decoder": ("losses",),
    "reward": ("forward", "mean", "loss"),
    "continue": ("forward", "mean", "loss"),
    "policy": ("forward", "distribution"),
    "critic": ("forward", "mean", "loss"),
}
CASES = [
    *(("v3", part, method) for part in PARTS for method in PARTS[part]),
    *((family, "rssm", method) for family in FAMILIES if family != "v3" for method in WORLD_MODEL),
    *((family, "rssm", "observe") for family in ("v3", "v1", "planet")),
    *((family, "rssm", "imagine") for family in ("v3", "v2", "v1")),
    *((family, "policy", method) for family in ("v2", "v1") for method in PARTS["policy"]),
    ("v3", "return_normalizer", "forward"),
    ("v3_2023", "critic", "loss"),
    ("v2", "critic", "slow_mean"),
    ("v1", "critic", "loss"),
    ("planet", "reward", "loss"),
]


@pytest.mark.parametrize(("family", "part", "method"), CASES)
def test_parts(path: str, family: str, part: str, method: str) -> None:
    """Of world models, encoder and decoder, predictors, actor and critic: a subclass with one method of its own."""
    calls: list[str] = []
    check(path, family, subclassed(part, method, calls), calls, f"{part}.{method}")


ACTING = [
    *(("v3", part, method) for part, methods in PARTS.items() if part in ("encoder", "policy") for method in methods),
    *((family, "rssm", method) for family in ("v3", "planet") for method in ("advance", "posterior", "sample")),
    ("planet", "rssm", "prior"),
    ("planet", "reward", "mean"),
]


def actions(workflow: Any) -> dict[str, Tensor]:
    """The actions for some observations and the states after them, twice: the second call replays a captured graph."""
    generator = torch.Generator().manual_seed(0)
    rows = 32  # discrete choices change for some of them
    state = workflow.initial_state(rows)
    for seed in (1, 2):
        seen = {
            key: torch.rand(rows, *spec.shape, generator=generator).numpy()
            for key, spec in workflow.context.observation_spec.items()
        }
        torch.manual_seed(seed)
        action, state = workflow.act(seen, state, mode="train")
    return {"action": torch.as_tensor(action)} | {name: value.cpu() for name, value in state.items()}


@pytest.mark.parametrize(("family", "part", "method"), ACTING)
def test_acting(path: str, family: str, part: str, method: str) -> None:
    """Filtering and choosing, or planning in the model."""
    calls: list[str] = []
    changed = actions(make(path, family, subclassed(part, method, calls)))
    assert calls
    assert_differ(changed, actions(make(path, family)), f"{part}.{method}")


LOSSES = [
    *((family, name) for family in ("v3", "v1") for name in ("losses", "world_model_losses", "behaviour_losses")),
    *((family, name) for family in ("v3_2023", "v2") for name in ("world_model_losses", "behaviour_losses")),
    *(("v1", name) for name in ("filter", "dream", "predictions", "total", "dreamt_action")),
    *(("v3", name) for name in ("replay_losses", "value_loss", "encode", "dream", "dreamt_action")),
    *(("v3", name) for name in ("value_logits", "policy_params")),
    *(("planet", name) for name in ("losses", "world_model_losses", "overshooting_loss", "prediction_losses")),
]  # fmt: skip


@pytest.mark.parametrize(("family", "method"), LOSSES)
def test_losses(path: str, family: str, method: str) -> None:
    """Of each workflow, and what they are made of."""
    calls: list[str] = []

    def change(workflow: Workflow, context: WorkflowContext) -> None:
        workflow.__class__ = overriding(type(workflow), method, calls)

    check(path, family, change, calls, method)


@pytest.mark.parametrize(
    ("hook", "method"), [("update_world_model", "world_model_losses"), ("update_controller", "behaviour_losses"),
                         ("update_controller", "replay_losses")],
)  # fmt: skip
@pytest.mark.parametrize("family", ["v3", "v2"])
def test_losses_of_a_hook(path: str, family: str, hook: str, method: str) -> None:
    """The world model alone, and the behaviour alone, learn from the same methods."""
    calls: list[str] = []

    def change(workflow: Workflow, context: WorkflowContext) -> None:
        workflow.__class__ = overriding(type(workflow), method, calls)

    if (family, method) == ("v2", "replay_losses"):  # it has none: nothing to change
        results(make(path, family, change), hook)
        assert calls
    else:
        check(path, family, change, calls, method, hook)


def test_losses_that_would_not_be_called_are_refused() -> None:
    """Where the model makes its step before it dreams there is no sum of all losses."""

    def change(workflow: Workflow, context: WorkflowContext) -> None:
        workflow.__class__ = overriding(type(workflow), "losses", [])

    with pytest.raises(ConfigError, match="model_first"):
        make("cpu", "v2", change)


def hook(workflow: Workflow, context: WorkflowContext) -> None:
    layer = context.components["rssm"].prior_logits
    layer.register_forward_hook(lambda module, inputs, output: 0.7 * output.flip(-1))


def replace_method(workflow: Workflow, context: WorkflowContext) -> None:
    rssm: Any = context.components["rssm"]
    advance = rssm.advance
    rssm.advance = lambda state, action: (advance(state, action)[0].flip(-1), None)


def swap_layer(workflow: Workflow, context: WorkflowContext) -> None:
    rssm: Any = context.components["rssm"]
    rssm.core_norm = nn.Identity()


def swap_activation(workflow: Workflow, context: WorkflowContext) -> None:
    rssm: Any = context.components["rssm"]
    rssm.deter_layer.activate = torch.tanh


def swap_activation_of_the_critic(workflow: Workflow, context: WorkflowContext) -> None:
    critic: Any = dict(context.controllers.items())["critic"]
    critic.head.trunk[0].activate = torch.tanh


def parametrise(workflow: Workflow, context: WorkflowContext) -> None:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 0.5 * weight

    rssm: Any = context.components["rssm"]
    nn.utils.parametrize.register_parametrization(rssm.deter_layer.linear, "weight", Halved())


CHANGES = [hook, replace_method, swap_layer, swap_activation, swap_activation_of_the_critic]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_instances(path: str, change: Change) -> None:
    """Hooks, methods of one instance, swapped layers and activations, before the run begins."""
    changed = results(make(path, "v3", change))
    plain = plain_results(path, "v3")
    common = changed.keys() & plain.keys()
    assert_differ({name: changed[name] for name in common}, {name: plain[name] for name in common}, change.__name__)


def test_parametrised_weights(path: str) -> None:
    """They have other parameters; the losses of the first update show them."""
    changed, plain = results(make(path, "v3", parametrise)), plain_results(path, "v3")
    assert changed["loss/dynamics"] != plain["loss/dynamics"]


@pytest.mark.parametrize("step", ["update", "update_world_model", "act"])
@pytest.mark.parametrize("family", ["v3", "v2", "v1", "planet"])
def test_hooks_after_the_capture(family: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph is made anew for a module that was changed since."""
    monkeypatch.setattr(graphs, "_enabled", False)
    workflow = make("deferred", family)
    parts = planet_parts if family == "planet" else dreamer_parts
    latents = {} if family == "planet" else {"latents": bool(workflow.latent_specs)}
    batch = parts.make_batch(workflow, device="cpu", **latents)
    state = workflow.initial_state(2)
    seen = {key: np.zeros((2, *spec.shape), np.float32) for key, spec in workflow.context.observation_spec.items()}
    if step == "act":
        run = partial(workflow.act, seen, state, mode="eval")
    else:
        run = partial(getattr(workflow, workflow.update_hooks[0] if family == "planet" else step), batch, phase=PHASE)
    assert_captured_anew(run, workflow.rssm.get_submodule("posterior_layer" if family == "v3" else "posterior_head"))


def test_an_optimiser_of_ones_own(path: str) -> None:
    """Any of torch's, and a subclass of ours."""
    steps: list[str] = []

    class MyAdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            steps.append("adamw")
            return super().step(closure)

    class MyLaProp(LaProp):
        def step(self, closure: Any = None, **arguments: Any) -> Any:
            steps.append("laprop")
            for value in (value for group in self.param_groups for value in group["params"]):
                value.grad = None if value.grad is None else value.grad.sign()
            return super().step(closure, **arguments)

    for kind in (MyAdamW, MyLaProp):

        def change(workflow: Workflow, context: WorkflowContext, kind: Any = kind) -> None:
            held = [value for group in context.optimizers["main"].param_groups for value in group["params"]]
            context.optimizers["main"] = kind(held, lr=1e-3)

        steps.clear()
        workflow = make(path, "v3", change)
        names = plain_results(path, "v3").keys()
        changed = {name: value for name, value in results(workflow).items() if name in names}
        plain = {name: value for name, value in plain_results(path, "v3").items() if name in changed}
        assert steps
        assert_differ(changed, plain, kind.__name__)


def test_off_imports_no_kernel(tmp_path: Path) -> None:
    """A short training run, in a process of its own."""
    overrides = [
        *TINY_DREAMER, *QUIET, "+experiment=dreamer_v3_cartpole", "training.kernels=off", "training.compile=off",
        f"run_root={tmp_path}",
    ]  # fmt: skip
    overrides.remove("+experiment=dreamer_v3")
    script = (
        "import sys; from rl_lab.experiment.train import run_training; outcome = run_training(sys.argv[1:]); "
        "assert outcome.code == 0; "
        "print([n for n in sys.modules if n.startswith(('rl_lab.kernels.cpu', 'rl_lab.kernels.triton', 'numba'))])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script, *overrides], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "[]"
