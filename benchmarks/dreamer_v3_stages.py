"""Where a DreamerV3 update spends its time on a GPU: each stage captured as a CUDA graph of its own. And where the
seconds before the first one go: each compiled piece, and the kernels of our own."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import get_compilation_metrics
from torch.profiler import ProfilerActivity, profile

from rl_lab.components.world_models.base import LatentState
from rl_lab.kernels.graphs import CapturedStep
from rl_lab.records import SequenceBatch
from rl_lab.workflows.dreamer_v3 import DreamerV3
from rl_lab.workflows.world_model import Filtered


def measure_stage(function: Callable[[], object], *, repeats: int = 20) -> tuple[float, int, float]:
    """(milliseconds, kernels, milliseconds inside kernels) of the captured function."""

    def run(_: dict[str, Tensor]) -> dict[str, Tensor]:
        function()
        return {}

    step = CapturedStep(run, list)
    step({})
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step({})
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step({})
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    inside = sum(event.self_device_time_total for event in events) / 1e3
    return sorted(times)[repeats // 2], sum(event.count for event in events), inside


def backward(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    grads = [torch.ones_like(output) for output in outputs]
    torch.autograd.grad(list(outputs), list(inputs), grads, allow_unused=True)


def trained(*modules: nn.Module) -> list[Tensor]:
    return [value for module in modules for value in module.parameters() if value.requires_grad]


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def stages(workflow: DreamerV3, batch: SequenceBatch) -> dict[str, Callable[[], object]]:
    """The parts of an update, each with its backward pass, on the tensors that it would get."""
    rssm = workflow.rssm
    with workflow.context.autocast():
        data = workflow._replayed(workflow._inputs(batch))
        embed = leaf(workflow.encode(data.observation))
        with torch.no_grad():
            states, posterior = rssm.observe(embed, data.prev_action, data.is_first, data.initial)
            behaviour = workflow.behaviour_losses(states, data)
    states, posterior = LatentState(leaf(states.deter), leaf(states.stoch)), leaf(posterior)
    filtered = Filtered(embed, states, posterior)

    def observe() -> None:
        seen, logits = rssm.observe(embed, data.prev_action, data.is_first, data.initial)
        backward([seen.deter, seen.stoch, logits], [embed, *trained(rssm)])

    def predict() -> None:
        losses, _ = workflow.world_model_losses(filtered, data)
        parts = (workflow.decoder, workflow.reward, workflow.continuation, rssm)
        weights = trained(*(part for part in parts if part is not None))
        backward([workflow.total(losses)], [states.deter, states.stoch, posterior, *weights])

    def dream() -> None:
        with torch.no_grad():
            workflow.dream(rssm.starts(states))

    def behave() -> None:
        losses = workflow.behaviour_losses(states, data).losses
        backward([workflow.total(losses)], trained(workflow.actor, workflow.critic))

    def replay_value() -> None:
        losses = workflow.replay_losses(states, data, behaviour)
        backward([workflow.total(losses)], [states.deter, states.stoch, *trained(workflow.critic)])

    def optimize() -> None:
        workflow.optimizers.step(behaviour.returns.mean())
        workflow.critic.update_slow()

    return {
        "encoder": lambda: backward([workflow.encode(data.observation)], trained(workflow.encoder)),
        "posterior scan": observe,
        "predictions": predict,
        "dream (forward only)": dream,
        "actor and critic, with the dream": behave,
        "replayed values": replay_value,
        "optimiser": optimize,
    }


def print_stages(workflow: DreamerV3, batch: SequenceBatch) -> None:
    print(f"{'stage, forward and backward':34s} {'ms':>8s} {'kernels':>8s} {'busy':>6s}")
    for parameter in trained(*workflow.context.components.values(), workflow.actor, workflow.critic):
        parameter.grad = torch.zeros_like(parameter)
    for name, function in stages(workflow, batch).items():

        def run(function: Callable[[], object] = function) -> None:
            with workflow.context.autocast():
                function()

        milliseconds, kernels, inside = measure_stage(run)
        print(f"{name:34s} {milliseconds:8.3f} {kernels:8d} {inside / milliseconds:6.0%}", flush=True)


@contextmanager
def kernel_seconds() -> Iterator[dict[str, float]]:
    """By name, of the Triton kernels that this process compiles meanwhile; the compiler's own are made elsewhere."""
    seconds: dict[str, float] = defaultdict(float)
    if find_spec("triton") is None:
        yield seconds
        return
    from triton import knobs

    def listen(*, src: Any, times: Any, **_: Any) -> None:
        seconds[str(getattr(src, "name", src))] += times.total / 1e6

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield seconds
    finally:
        knobs.compilation.listener = before


@contextmanager
def first_calls(workflow: DreamerV3) -> Iterator[dict[str, float]]:
    """Seconds of each forward part's first call: compiling, and what the device and cuDNN's choices take."""
    seconds: dict[str, float] = {}
    names = ("encode", "world_model_losses", "behaviour_losses", "replay_losses")
    parts: list[tuple[Any, str]] = [(workflow, name) for name in names]
    parts.append((workflow.rssm, "observe"))
    before = [(owner, name, vars(owner).get(name)) for owner, name in parts]

    def timed(name: str, function: Callable) -> Callable:
        def run(*arguments: Any, **named: Any) -> Any:
            if name in seconds:
                return function(*arguments, **named)
            start = time.perf_counter()
            result = function(*arguments, **named)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - start
            return result

        return run

    for owner, name in parts:
        setattr(owner, name, timed(name, getattr(owner, name)))
    try:
        yield seconds
    finally:
        for owner, name, function in before:
            if function is None:
                delattr(owner, name)
            else:
                setattr(owner, name, function)


def print_warmup(total: float, calls: dict[str, float], kernels: dict[str, float]) -> None:
    """First calls; compiled pieces in their order; the rest of the time is the updates' own and that of cuDNN."""
    print(f"{'first call, forward':34s} {'seconds':>8s}")
    for name, seconds in calls.items():
        print(f"      {name:28s} {seconds:8.1f}")
    pieces: dict[Any, list[Any]] = {}
    for metric in get_compilation_metrics():
        if metric.compile_id is None or metric.duration_us is None:
            continue
        piece = pieces.setdefault(str(metric.compile_id), ["", 0.0, 0.0])
        piece[0] = metric.co_name or piece[0]
        piece[1 if metric.is_forward is not False else 2] += metric.duration_us / 1e6
    print(f"{'warm-up, seconds':34s} {'forward':>8s} {'backward':>8s}")
    for number, (name, forward, backward) in pieces.items():
        print(f"{number:6s}{name:28s} {forward:8.1f} {backward:8.1f}")
    compiled = sum(forward + backward for _, forward, backward in pieces.values())
    own = sum(kernels.values())
    print(f"{'pieces':34s} {compiled:8.1f}\n{f'{len(kernels)} kernels in this process':34s} {own:8.1f}")
    for name, seconds in sorted(kernels.items(), key=lambda item: -item[1])[:8]:
        print(f"      {name:28s} {seconds:8.1f}")
    print(f"{'all':34s} {total:8.1f}", flush=True)
