"""Image networks on kernels of their own compute what their plain layers do: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rl_lab.components.decoders import MultiKeyDecoder
from rl_lab.components.encoders.multi_key import MultiKeyEncoder
from rl_lab.components.representation_learners.base import LatentState
from rl_lab.specs import ObservationSpec

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = {
    "camera": ObservationSpec("image", (32, 16, 3), "uint8"),
    "joints": ObservationSpec("vector", (3,), "float32"),
}


def observation(*lead: int) -> dict[str, Tensor]:
    camera = torch.randint(0, 256, (*lead, 32, 16, 3), dtype=torch.uint8, device=DEVICE)
    return {"camera": camera, "joints": torch.randn(*lead, 3, device=DEVICE)}


def shaken(module: nn.Module) -> nn.Module:
    """Scales and biases that do not start at 1 and 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module.to(DEVICE)


def assert_equal(got: Tensor, expected: Tensor, inputs: list[Tensor], *, tolerance: float) -> None:
    """In value and in gradient, relative to the size of the whole."""
    above = torch.randn_like(expected)
    pairs = [(got, expected)]
    pairs += zip(*(torch.autograd.grad(output, inputs, above) for output in (got, expected)), strict=True)
    for left, right in pairs:
        assert (left.double() - right.double()).norm() <= tolerance * right.double().norm()


@pytest.fixture(params=[torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def tolerance(dtype: torch.dtype) -> float:
    return 1e-3 if dtype == torch.float32 else 0.05  # a GPU's convolutions in float32 take shorter factors


@pytest.mark.parametrize("depth", [3, 8])
def test_fused_encoder_equals_the_plain_one(depth: int, dtype: torch.dtype) -> None:
    """Also with numbers of channels that must be filled up."""
    torch.manual_seed(0)
    encoder = shaken(MultiKeyEncoder(observation=SPECS, units=8, layers=1, depth=depth))
    seen = observation(1, 2)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected = encoder(seen)
        assert isinstance(encoder.image, nn.Module)
        assert encoder.fuse() == (DEVICE == "cuda")
        encoder.image.fused = True  # in the interpreter too
        got = encoder(seen)
    assert_equal(got, expected, list(encoder.parameters()), tolerance=tolerance(dtype))


def test_fused_decoder_equals_the_plain_one(dtype: torch.dtype) -> None:
    """The loss of each key, and its gradients."""
    torch.manual_seed(0)
    decoder = shaken(MultiKeyDecoder(observation=SPECS, deter=32, stoch_size=12, units=8, layers=1, depth=2, blocks=8))
    seen, embed = observation(2, 3), torch.zeros(2, 3, 1)
    deter, stoch = (torch.randn(2, 3, size, device=DEVICE, requires_grad=True) for size in (32, 12))
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        plain = decoder.losses(LatentState(deter, stoch), embed, seen)
        assert decoder.fuse() == (DEVICE == "cuda")
        decoder.image.fused = True
        fused = decoder.losses(LatentState(deter, stoch), embed, seen)
    assert list(plain) == list(fused)
    inputs = [deter, stoch, *decoder.image.parameters()]
    assert_equal(fused["camera"], plain["camera"], inputs, tolerance=tolerance(dtype))
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
