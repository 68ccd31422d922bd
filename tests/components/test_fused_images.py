"""Image networks on kernels of their own compute what their plain layers do: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from rl_lab.components.decoders import MultiKeyDecoder
from rl_lab.components.encoders.multi_key import MultiKeyEncoder
from rl_lab.components.representation_learners.base import LatentState
from rl_lab.specs import ObservationSpec

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAWS = 6
SPECS = {
    "camera": ObservationSpec("image", (32, 16, 3), "uint8"),
    "joints": ObservationSpec("vector", (3,), "float32"),
}


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions with whole factors."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)


def observation(*lead: int) -> dict[str, Tensor]:
    camera = torch.randint(0, 256, (*lead, 32, 16, 3), dtype=torch.uint8, device=DEVICE)
    return {"camera": camera, "joints": torch.randn(*lead, 3, device=DEVICE)}


def shaken(module: nn.Module) -> nn.Module:
    """Scales and biases that do not start at 1 and 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module.to(DEVICE)


def distances(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[float]:
    return [float((x.double() - y.double()).norm() / y.double().norm()) for x, y in zip(left, right, strict=True)]


def with_gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    above = torch.linspace(-1.0, 1.0, output.numel(), device=DEVICE).view(output.shape).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, above)]


def errors(run: Callable[[], Tensor], image: nn.Module, inputs: list[Tensor]) -> list[list[float]]:
    """How far the plain and the fused form in bfloat16 are from float32, in value and in gradient, where both agree."""
    image.fused = False
    exact = with_gradients(run(), inputs)
    image.fused = True
    assert max(distances(with_gradients(run(), inputs), exact)) < 1e-4
    half = []
    for fused in (False, True):
        image.fused = fused
        with torch.autocast(DEVICE, torch.bfloat16):
            half.append(distances(with_gradients(run(), inputs), exact))
    return half


def assert_as_good(draw: Callable[[], list[list[float]]]) -> None:
    """In bfloat16 rounding decides which of nearly equal pixels is the largest: a matter of luck for each gradient, so
    it is over several draws that the fused form must be as close to float32 as the plain one is."""
    plain, fused = torch.tensor([draw() for _ in range(DRAWS)]).mean(0)
    assert fused[0] < plain[0] + 0.005, (plain, fused)  # the value
    assert fused[1:].mean() < 1.5 * plain[1:].mean() + 0.005, (plain, fused)


@pytest.mark.parametrize("depth", [3, 8])
def test_fused_encoder_equals_the_plain_one(depth: int) -> None:
    """Also with numbers of channels that must be filled up."""

    def draw() -> list[list[float]]:
        encoder = shaken(MultiKeyEncoder(observation=SPECS, units=8, layers=1, depth=depth))
        seen = observation(1, 2)
        assert encoder.fuse() == (DEVICE == "cuda")
        return errors(lambda: encoder(seen), encoder.image, list(encoder.image.parameters()))

    assert_as_good(draw)


def test_fused_decoder_equals_the_plain_one() -> None:
    """The loss of the image and its gradients; the other keys as ever."""
    decoder = shaken(MultiKeyDecoder(observation=SPECS, deter=32, stoch_size=12, units=8, layers=1, depth=2, blocks=8))
    seen, embed = observation(2, 3), torch.zeros(2, 3, 1)
    deter, stoch = (torch.randn(2, 3, size, device=DEVICE, requires_grad=True) for size in (32, 12))
    state = LatentState(deter, stoch)
    assert decoder.fuse() == (DEVICE == "cuda")
    inputs = [deter, stoch, *decoder.image.parameters()]

    def draw() -> list[list[float]]:
        shaken(decoder)
        return errors(lambda: decoder.losses(state, embed, seen)["camera"], decoder.image, inputs)

    assert_as_good(draw)
    fused = decoder.losses(state, embed, seen)
    decoder.image.fused = False
    plain = decoder.losses(state, embed, seen)
    assert list(fused) == list(plain)
    torch.testing.assert_close(fused["joints"], plain["joints"])


def test_decoder_of_several_images_is_not_fused() -> None:
    """Its kernel knows one image."""
    specs = SPECS | {"depth": ObservationSpec("image", (32, 16, 1), "uint8")}
    decoder = MultiKeyDecoder(observation=specs, deter=32, stoch_size=12, units=8, depth=2, blocks=8).to(DEVICE)
    assert not decoder.fuse()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_rehearsed_kernels_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled ahead is what runs, whatever the number of images."""
    from triton import knobs

    made: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: made.append(src.name))
    image = {"camera": SPECS["camera"]}
    # Of a size that no other test has compiled in this process.
    encoder = MultiKeyEncoder(observation=image, depth=40).to(DEVICE)
    decoder = MultiKeyDecoder(observation=image, deter=32, stoch_size=12, units=8, depth=40, blocks=8).to(DEVICE)
    for part in (encoder, decoder):
        assert part.fuse()
        part.rehearse(torch.bfloat16)
    assert made
    made.clear()
    deter, stoch = (torch.randn(2, 3, size, device=DEVICE) for size in (32, 12))
    with torch.autocast(DEVICE, torch.bfloat16):
        embed = encoder(observation(2, 3))
        loss = decoder.losses(LatentState(deter, stoch), embed, observation(2, 3))["camera"]
    (embed.float().sum() + loss.sum()).backward()
    assert made == []
