"""On a GPU: the fused kernels of the posterior scan compute what its plain steps do."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.representation_learners.posterior_scan import ScanInputs, ScanShape, ScanWeights, StepLoops
from rl_lab.components.representation_learners.rssm import BlockRSSM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Powers of two that are loaded at once; and sizes with a remainder: rows, padded groups, several chunks.
SIZES = {
    "small": {"batch": 16, "deter": 512, "hidden": 64, "groups": 32, "classes": 4, "blocks": 8},
    "uneven": {"batch": 19, "deter": 768, "hidden": 192, "groups": 16, "classes": 24, "blocks": 4},
}
STEPS = 6


def make_problem(
    *, batch: int, deter: int, hidden: int, groups: int, classes: int, blocks: int, dtype: torch.dtype
) -> tuple[ScanShape, ScanWeights, ScanInputs, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    sizes = {"deter": deter, "hidden": hidden, "groups": groups, "classes": classes, "blocks": blocks}
    model = BlockRSSM(embed_size=8, action_size=2, **sizes).cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        weights, *_ = model._scan_weights(dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    choice = torch.randint(0, classes, (batch, groups), device="cuda")
    inputs = ScanInputs(
        deter=0.3 * normal(batch, deter), stoch=torch.eye(classes, device="cuda")[choice].flatten(1).to(dtype),
        keep=(torch.rand(STEPS, batch, 1, device="cuda") > 0.2).float(),
        action_part=normal(STEPS, batch, deter), embed_part=normal(STEPS, batch, hidden),
        noise=torch.empty(STEPS, batch, groups, classes, device="cuda").exponential_(),
    )  # fmt: skip
    stoch = groups * classes
    grads = normal(STEPS, batch, deter), normal(STEPS, batch, stoch), normal(STEPS, batch, stoch)
    return model.scan_shape, weights, inputs, grads


def relative_error(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("sizes", SIZES)
def test_kernels_equal_the_plain_steps(sizes):
    """Every value of the path and every gradient, in float32, to rounding."""
    from rl_lab.components.representation_learners.kernel_loops import KernelLoops

    torch.set_float32_matmul_precision("highest")
    shape, weights, inputs, grads = make_problem(**SIZES[sizes], dtype=torch.float32)
    paths = [loops.forward(inputs, weights, shape) for loops in (StepLoops(), KernelLoops())]
    for plain, fused in zip(*paths, strict=True):
        assert relative_error(fused, plain) < 1e-5
    gradients = [
        loops.backward(grads, inputs, path, weights, shape)
        for loops, path in zip((StepLoops(), KernelLoops()), paths, strict=True)
    ]
    for plain, fused in zip(*gradients, strict=True):
        assert relative_error(fused, plain) < 1e-5


@pytest.mark.parametrize("sizes", SIZES)
def test_kernels_in_half_precision_stay_within_its_rounding(sizes):
    """In bfloat16 both forms are as far from float32 as its rounding; a changed sample would change all that follows,
    so one step is compared, and gradients on the same path."""
    from rl_lab.components.representation_learners.kernel_loops import KernelLoops

    shape, weights, inputs, grads = make_problem(**SIZES[sizes], dtype=torch.bfloat16)
    assert KernelLoops().suit(inputs, weights)
    plain, fused = (loops.forward(inputs, weights, shape) for loops in (StepLoops(), KernelLoops()))
    assert (plain.stoch[0] == fused.stoch[0]).float().mean() > 0.99
    for name in ("deter", "logits", "inputs_pre", "core_pre", "gates", "posterior_pre"):
        assert relative_error(getattr(fused, name)[0], getattr(plain, name)[0]) < 0.02, name
    gradients = (loops.backward(grads, inputs, plain, weights, shape) for loops in (StepLoops(), KernelLoops()))
    for by_plain, by_fused in zip(*gradients, strict=True):
        assert relative_error(by_fused, by_plain) < 0.03


def test_rehearsed_kernels_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled ahead is what runs, whatever the number of steps."""
    from triton import knobs

    from rl_lab.components.representation_learners.kernel_loops import KernelLoops

    made: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: made.append(src.name))
    # Of a size that no other test has compiled in this process.
    sizes = {"batch": 16, "deter": 1024, "hidden": 128, "groups": 32, "classes": 8, "blocks": 8}
    shape, weights, inputs, grads = make_problem(**sizes, dtype=torch.bfloat16)
    KernelLoops().rehearse(weights, shape, 16)
    assert made
    made.clear()
    path = KernelLoops().forward(inputs, weights, shape)
    KernelLoops().backward(grads, inputs, path, weights, shape)
    assert made == []
