"""Every kernel for GPUs against the plain method that it stands in for: values, and gradients where it has any.

Triton's run on a GPU, or in its interpreter where it is installed; a kernel that needs no Triton runs anywhere. The
kernels of tree searches have a file of their own, test_mcts_kernel.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.components.dense_models import make_model, sequence
from tests.kernels.triton_anywhere import DEVICE
from torch import Tensor, nn

from rl_lab.components.decoders.cnn import DreamerCNNDecoder
from rl_lab.components.encoders.cnn import DreamerCNN
from rl_lab.components.world_models.base import LatentState
from rl_lab.components.world_models.rssm import BlockRSSM
from rl_lab.kernels import graphs
from rl_lab.kernels.catalogue import KERNELS, Kernel
from rl_lab.kernels.registry import Accelerated, full_name, reason_against

GPU_KERNELS = [kernel for kernel in KERNELS if kernel.backend == "triton" and ".planners." not in kernel.target]
DRAWS = 6
PLUMBING = {  # shapes, sizes and types of numbers
    *(f"rl_lab.components.world_models.base.{name}" for name in ("stack_states", "LatentState.map")),
    *(f"rl_lab.nn.distributions.{name}" for name in ("at_least_float32", "compute_dtype", "one_hot")),
    "rl_lab.nn.distributions.UnimixCategorical.__init__",
    "rl_lab.nn.convolutions.spare_channels",
    "rl_lab.components.encoders.images.flatten_lead",
}


@dataclass
class Example:
    """A module with a kernel somewhere inside, and what to compute with it."""

    module: nn.Module
    run: Callable[[nn.Module], Sequence[Tensor]]
    inputs: list[Tensor] = field(default_factory=list)  # that have gradients beside the parameters
    differentiable: bool = True
    tolerance: float = 1e-4
    unused: tuple[str, ...] = ()  # beginnings of parameters' names that take no part


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


def shaken(module: Any) -> Any:
    """Scales and biases that do not start at 1 and 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module.to(DEVICE)


def block_rssm(dtype: torch.dtype = torch.float32) -> Example:
    """It is for bfloat16 alone; in float32 it computes the same, and can be compared."""
    batch, steps, sizes = 3, 2, {"deter": 128, "hidden": 64, "groups": 16, "classes": 4, "blocks": 2}
    model = shaken(BlockRSSM(embed_size=5, action_size=2, **sizes))
    model.compute_dtype = torch.bfloat16
    embed = normal(batch, steps, 5)
    choice = torch.randint(0, 4, (batch, 16), device=DEVICE)
    initial = LatentState(0.3 * normal(batch, 128).detach(), F.one_hot(choice, 4).flatten(1).float())
    prev_action, is_first = 2.0 * normal(batch, steps, 2).detach(), torch.rand(batch, steps, device=DEVICE) < 0.25
    noise = torch.empty(steps, batch, 16, 4, device=DEVICE).exponential_()

    def run(module: Any) -> list[Tensor]:
        states, logits = module.observe(embed.to(dtype), prev_action, is_first, initial, noise)
        return [states.deter, states.stoch, logits]

    return Example(model, run, [embed], unused=("prior",))


def dense_rssm(form: str) -> Callable[[], Example]:
    def make() -> Example:
        model = make_model(form).float().to(DEVICE)
        data: dict[str, Any] = {
            name: value.map(lambda x: x.float().to(DEVICE)) if isinstance(value, LatentState) else value.to(DEVICE)
            for name, value in sequence(model).items()
        }
        data |= {name: data[name].float() for name in ("embed", "prev_action", "noise")}
        data["embed"].requires_grad_()

        def run(module: Any) -> list[Tensor]:
            states, params = module.observe(**data)
            return [states.deter, states.stoch, params]

        return Example(model, run, [data["embed"]], unused=("prior",))

    return make


def encoder(depth: int = 3) -> Example:
    image = torch.randint(0, 256, (1, 2, 32, 16, 3), dtype=torch.uint8, device=DEVICE)
    return Example(shaken(DreamerCNN(height=32, width=16, channels=3, depth=depth)), lambda module: [module(image)])


def decoder() -> Example:
    image = torch.randint(0, 256, (2, 3, 32, 16, 3), dtype=torch.uint8, device=DEVICE)
    deter, stoch = normal(2, 3, 32), normal(2, 3, 12)
    sizes = {"deter": 32, "stoch_size": 12, "units": 8, "depth": 2, "blocks": 8}
    module = shaken(DreamerCNNDecoder(height=32, width=16, channels=3, **sizes))
    return Example(module, lambda module: [module.image_loss(deter, stoch, image)], [deter, stoch])


EXAMPLES: dict[str, Callable[[], Example]] = {
    "BlockRSSM.observe": block_rssm,
    "GaussianRSSM.observe": dense_rssm("planet"),
    "DenseCategoricalRSSM.observe": dense_rssm("dreamer_v3_2023"),
    "DreamerCNN.forward": encoder,
    "DreamerCNNDecoder.image_loss": decoder,
}


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Convolutions with whole factors; nothing is compiled."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    graphs.configure(compiling=False)
    yield
    graphs.configure(compiling=True)


def make(kernel: Kernel) -> Example:
    if "kernels.triton" in kernel.implementation and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return EXAMPLES[kernel.name]()


def give(module: nn.Module, kernel: Kernel) -> None:
    """Let the parts of the kernel's class run on it."""
    parts = [part for part in module.modules() if full_name(type(part)) == kernel.target]
    assert parts
    for part in parts:
        assert isinstance(part, Accelerated)
        assert (reason_against(kernel, part) or kernel.supports(part)) is None
        part.kernels = {kernel.method: kernel}


def results(example: Example) -> list[Tensor]:
    """Outputs, and the gradients of some sum of them."""
    if not example.differentiable:
        with torch.no_grad():
            return list(example.run(example.module))
    outputs = example.run(example.module)
    parts = [
        (output * torch.linspace(-1.0, 1.0, output.numel(), device=DEVICE).view(output.shape)).sum()
        for output in outputs
    ]
    names = [name for name, _ in example.module.named_parameters() if not name.startswith(example.unused or "-")]
    leaves = [example.module.get_parameter(name) for name in names] + example.inputs
    gradients = torch.autograd.grad(torch.stack([part.float() for part in parts]).sum(), leaves, allow_unused=True)
    return [*(output.detach() for output in outputs), *(grad for grad in gradients if grad is not None)]


def distances(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[float]:
    return [
        float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-6))
        for x, y in zip(left, right, strict=True)
    ]


def test_every_kernel_has_an_example() -> None:
    """One without is untested: write it first."""
    assert {kernel.name for kernel in GPU_KERNELS} == set(EXAMPLES)


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
def test_values_and_gradients_are_those_of_the_plain_method(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, to rounding."""
    example, loaded, load = make(kernel), [], Kernel.load
    plain = results(example)
    monkeypatch.setattr(Kernel, "load", lambda self: (loaded.append(self.name), load(self))[1])
    give(example.module, kernel)
    fast = results(example)
    assert set(loaded) == {kernel.name}
    assert max(distances(fast, plain)) < example.tolerance, distances(fast, plain)
    assert len(plain) > 3 or not example.differentiable


def called(example: Example) -> set[str]:
    """The full names of the functions of layers and components that take part."""
    names = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        place = frame.f_globals.get("__name__", "")
        if event == "call" and place.startswith(("rl_lab.nn", "rl_lab.components")):
            names.add(f"{place}.{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        example.run(example.module)
    finally:
        sys.setprofile(None)
    return {name for name in names if "<" not in name}


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
def test_whatever_a_kernel_leaves_out_is_mirrored(kernel: Kernel) -> None:
    """A plain function that is not called where the kernel runs must be one whose edits the kernel looks out for."""
    example = make(kernel)
    with nullcontext() if example.differentiable else torch.no_grad():
        plain = called(example)
        give(example.module, kernel)
        fast = called(example)
    assert plain - fast - PLUMBING <= set(kernel.mirrors)


@pytest.mark.parametrize("name", ["DreamerCNN.forward", "DreamerCNNDecoder.image_loss"])
def test_in_bfloat16_they_are_as_close_to_float32_as_the_plain_method_is(name: str) -> None:
    """Rounding decides which of nearly equal pixels is the largest: a matter of luck for each gradient, so it is the
    mean over several draws that counts."""
    (kernel,) = [kernel for kernel in GPU_KERNELS if kernel.name == name]
    errors = []
    for _ in range(DRAWS):
        example = make(kernel)
        exact = results(example)
        found = []
        for fast in (False, True):
            if fast:
                give(example.module, kernel)
            for part in example.module.modules():
                if isinstance(part, Accelerated):
                    part.compute_dtype = torch.bfloat16
            with torch.autocast(DEVICE, torch.bfloat16):
                found.append(distances(results(example), exact))
        errors.append(found)
    plain, fast = torch.tensor(errors).mean(0)
    assert fast[0] < plain[0] + 0.005, (plain, fast)  # the value
    assert fast[1:].mean() < 1.5 * plain[1:].mean() + 0.005, (plain, fast)


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter has no products in bfloat16")
def test_the_block_rssm_in_bfloat16() -> None:
    """A changed sample would change all that follows, so the first step is compared."""
    (kernel,) = [kernel for kernel in GPU_KERNELS if kernel.name == "BlockRSSM.observe"]
    make(kernel)
    example = block_rssm(torch.bfloat16)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        plain = [output[:, 0].float() for output in example.run(example.module)]
        give(example.module, kernel)
        fast = [output[:, 0].float() for output in example.run(example.module)]
    assert distances(fast, plain)[0] < 0.02
    assert distances(fast, plain)[2] < 0.02
    assert (fast[1] == plain[1]).float().mean() > 0.95


REFUSED = {
    "BlockRSSM.observe": lambda module: setattr(module.deter_layer, "activate", F.relu),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_swapped_activation_is_honoured(name: str) -> None:
    """The kernels know one alone."""
    (kernel,) = [kernel for kernel in GPU_KERNELS if kernel.name == name]
    example = make(kernel)
    give(example.module, kernel)
    REFUSED[name](example.module)
    assert example.module.kernel(kernel.method) is None
