"""Compiled pieces of a training step, and the whole step as one CUDA graph: the device replays thousands of kernels
without the host launching them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial, wraps
from itertools import chain
from operator import itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.kernels.registry import HOOKS, Accelerated, is_installed

Inputs = dict[str, Tensor]
Outputs = dict[str, Tensor]
COMPILER_PATIENCE = 30.0  # seconds
MOST_COMPILERS = 8  # processes: the more there are, the longer they take to start, and this one has work, too
_enabled = True


def configure(*, compiling: bool) -> None:
    """Switch compiling on or off for the process: `training.compile`."""
    global _enabled
    _enabled = compiling


def compile_steps(module: Any) -> None:
    """Compile the steps of a model's loops (`compiled_steps`) that have no kernel; the loops take them from there."""
    for name in module.compiled_steps:
        module.compiled[name] = compile_block(getattr(module, name))


def compile_block(function: Callable, *, dynamic: bool = False) -> Callable:
    """Compile a piece of a training step. Pieces, never unrolled loops: that keeps the warm-up short.

    `dynamic`: one piece of code for all batch sizes, where there are several; else each is compiled for itself. With
    `training.compile=off` the function stays as it is. So does one that the compiler cannot take, because it prints,
    say, or calls another library: it runs as it is written, and a warning says why.
    """
    if not _enabled:
        return function
    from torch._dynamo import exc  # takes a second; most commands compile nothing

    start_compiler()
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # else a hook that comes later is passed over in silence
    chosen = torch.compile(function, dynamic=dynamic, fullgraph=True)

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        nonlocal chosen
        if torch.compiler.is_compiling():  # a part of a larger piece
            return function(*arguments, **named)
        await_compiler()
        try:
            return chosen(*arguments, **named)
        except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
            chosen = function
            _step_aside(f"{function.__qualname__} is not compiled", error)
            return function(*arguments, **named)

    return run


def _step_aside(what: str, error: Exception) -> None:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    warnings.warn(f"{what}: {reason}. It runs as it is written, which is slower.", stacklevel=3)


@cache
def start_compiler() -> None:
    """Start the processes that compile a GPU's kernels side by side. Until they run, one after another is compiled in
    this process; left alone, they start with the first piece and take many seconds."""
    if torch.cuda.is_available() and is_installed("triton"):
        from torch._inductor import config
        from torch._inductor.async_compile import maybe_warm_pool

        if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
            config.compile_threads = min(MOST_COMPILERS, config.compile_threads or 1)
        maybe_warm_pool()


@cache
def await_compiler() -> None:
    """Until they run. Where they do not come, the work is done without them."""
    if torch.cuda.is_available() and is_installed("triton"):
        from torch._inductor.async_compile import AsyncCompile

        with suppress(TimeoutError):
            AsyncCompile.wait_pool_ready(timeout=COMPILER_PATIENCE)


class Precompilation:
    """Compiles the kernels of some modules ahead of their first call, those that can be (`precompile_<function>`). It
    does so in threads: most of that work lets other threads run."""

    def __init__(self, modules: Sequence[nn.Module], *, batch: int, dtype: torch.dtype) -> None:
        parts = [part for root in modules for part in root.modules() if isinstance(part, Accelerated)]
        found = [(part, kernel.precompile()) for part in parts for kernel in part.kernels.values()]
        tasks = [partial(compile_, part, batch=batch, dtype=dtype) for part, compile_ in found if compile_ is not None]
        self._pool = ThreadPoolExecutor(max(1, len(tasks)))
        self._running = [self._pool.submit(task) for task in tasks]

    def wait(self) -> None:
        """Until all are compiled. A kernel that could not be is compiled at its first call."""
        for task in self._running:
            if (error := task.exception()) is not None:
                warnings.warn(f"Kernels were not compiled beforehand: {error!r}", stacklevel=2)
        self._pool.shutdown()


class Branch:
    """A stream of its own: what runs in it is, in a captured graph, a parallel branch.

        branch.fork()  # it begins after what has been asked for up to here
        with branch:
            ...
        branch.join()  # what follows may use its results

    The backward pass of a tensor runs where it was computed. What one side reads of the other has to stay alive until
    the next fork or join, or its memory is given away too early.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._entered = ExitStack()

    def fork(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

    def __enter__(self) -> None:
        self._entered.enter_context(torch.cuda.stream(self._stream))

    def __exit__(self, *_: object) -> None:
        self._entered.close()


class GradientCut:
    """Holds gradients back at some tensors until all of them have come: what follows uses the leaves instead."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self.leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)

    def backward(self) -> None:
        """Let them go on."""
        reached = [(tensor, leaf.grad) for tensor, leaf in zip(self._tensors, self.leaves, strict=True)]
        tensors, grads = zip(*((tensor, grad) for tensor, grad in reached if grad is not None), strict=True)
        torch.autograd.backward(tensors, grads)


class CapturedStep:
    """Runs `function(inputs) -> outputs` as a CUDA graph, captured at the first call.

    The function must have static shapes and never wait for the device. It may change state in place (parameters,
    optimiser moments): `state` lists every such tensor, all of them made beforehand, so that the warm-up calls before
    the capture leave no trace. Inputs may lie on the host. Outputs are overwritten by the next call.

    A graph holds what the modules did when it was captured. `modules` are watched: where one got or lost a hook or a
    layer since, the step is captured anew. A function that cannot be captured, because it copies from the host or waits
    for the device, is called each time, and a warning says why.
    """

    def __init__(
        self,
        function: Callable[[Inputs], Outputs],
        state: Callable[[], Sequence[Tensor]],
        *,
        modules: Sequence[nn.Module],
        precompilation: Precompilation | None = None,
        warmup: int = 2,  # the first one compiles, the second runs as it will be captured
    ):
        self._function, self._state, self._precompilation, self._warmup = function, state, precompilation, warmup
        self._modules, self._watch, self._capturable = modules, Watch([]), True
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Inputs = {}
        self._outputs: Outputs = {}

    def __call__(self, inputs: Mapping[str, Tensor]) -> Outputs:
        if self._capturable and (self._graph is None or self._watch.changed()):
            self._capture(inputs)
        if not self._capturable:
            return self._function({name: tensor.to("cuda", non_blocking=True) for name, tensor in inputs.items()})
        return self._replay(inputs)

    def _replay(self, inputs: Mapping[str, Tensor]) -> Outputs:
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        return self._outputs

    def _capture(self, inputs: Mapping[str, Tensor]) -> None:
        self._watch = Watch(self._modules)
        if self._precompilation is not None:
            self._precompilation.wait()
        self._inputs = {name: tensor.to("cuda", copy=True) for name, tensor in inputs.items()}
        random_state = torch.cuda.get_rng_state()
        before = [tensor.detach().clone() for tensor in self._state()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self._warmup):
                self._function(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._record()
        with torch.no_grad():
            for tensor, saved in zip(self._state(), before, strict=True):
                tensor.copy_(saved)
        torch.cuda.set_rng_state(random_state)

    def _record(self) -> None:
        """The graph and its outputs; without a graph where the function cannot be captured."""
        self._graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:  # other threads may go on using the GPU meanwhile: batches are prefetched
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._outputs = self._function(self._inputs)
        except RuntimeError as error:
            self._graph, self._capturable = None, False
            torch.cuda.set_stream(stream)
            device = torch.cuda.current_device()  # a capture that failed leaves the generator unusable
            torch.cuda.default_generators[device].graphsafe_set_state(torch.Generator(f"cuda:{device}"))
            _step_aside("A training step or a choice of actions is not captured as a CUDA graph", error)


class Watch:
    """Tells when a part of some modules was swapped, or got or lost a hook, a function or a parameter. That parameters
    change their values does not count, nor what a module notes of itself."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # Asked before every replay of a graph, so the parts are listed once and compared by loops in C.
        self._parts = list(dict.fromkeys(part for root in modules for part in root.modules()))
        self._attributes = [vars(part) for part in self._parts]
        self._named = [own[kind] for own in self._attributes for kind in ("_modules", "_parameters")]
        self._hooks = [own[kind] for own in self._attributes for kind in HOOKS]
        self._sizes, self._functions = self._count(), self._list_functions()
        self._empty = [(i, name) for i, own in enumerate(self._attributes) for name in own if own[name] is None]
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether they differ from what they were when this was made."""
        if (sizes := self._count()) != self._sizes:  # an attribute came or went: was it a function?
            if self._list_functions() != self._functions:
                return True
            self._sizes = sizes
        return self._look() != self._seen

    def _count(self) -> list[int]:
        return list(map(len, self._attributes))

    def _list_functions(self) -> list[tuple[int, str]]:
        return [(i, name) for i, own in enumerate(self._attributes) for name, value in own.items() if callable(value)]

    def _look(self) -> tuple[list[Any], ...]:
        return (
            list(map(type, self._parts)),
            list(map(itemgetter("training"), self._attributes)),
            list(map(id, chain.from_iterable(map(methodcaller("values"), self._named)))),
            list(chain.from_iterable(self._hooks)),
            [id(self._attributes[i].get(name)) for i, name in self._functions],
            [callable(self._attributes[i].get(name)) for i, name in self._empty],
        )
