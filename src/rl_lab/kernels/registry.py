"""Which kernel stands in for which plain method, and why it sometimes must not.

Plain PyTorch defines what a module computes. A kernel may stand in for one method of one exact class: a subclass, an
instance whose method was replaced, a hook, a parametrisation, a swapped layer, or a plain method that was edited since
the kernel was written make it step aside, and the reason is printed in a run's plan. A subclass that leaves the
computation as it is may say so: `kernels_hold = True` in its body.

A module that may have kernels derives from `Accelerated` and asks for one at the top of the plain method:

    if self.kernels and (kernel := self.kernel("observe")) is not None:
        return kernel(self, embed, prev_action)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from rl_lab.kernels.catalogue import KERNELS, PACKAGES, Backend, Kernel
from rl_lab.kernels.sources import changed_source

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Accelerated(nn.Module):
    """A module whose methods may have kernels. Without any (`kernels` is empty) its plain methods run."""

    kernels_hold: ClassVar[bool] = False  # of a subclass: it computes what its parent does, so kernels still hold
    kernels: Mapping[str, Kernel] = MappingProxyType({})  # by method; `enable` fills it
    compute_dtype: torch.dtype = torch.float32  # of matrix products in an update

    def kernel(self, method: str) -> Callable[..., Any] | None:
        """The kernel for a method; None where there is none, where the module was changed, and while compiling."""
        if torch.compiler.is_compiling() or method not in self.kernels:
            return None
        kernel = self.kernels[method]
        return None if reason_against(kernel, self) or kernel.supports(self) else kernel.load()


class Decision(NamedTuple):
    """Which path a part takes."""

    part: str  # such as `rssm.observe`
    kernel: Kernel
    reason: str | None  # None: the kernel runs; else why the plain method does

    def __str__(self) -> str:
        path = f"{self.kernel.backend} kernel" if self.reason is None else f"plain, because {self.reason}"
        return f"{self.part}: {path}"


def enable(
    modules: Mapping[str, nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    mode: Literal["auto", "off"] = "auto",
) -> list[Decision]:
    """Choose kernels for the parts of a model on their device, whose products are computed in `dtype`. With `off`
    nothing is chosen, and nothing imported."""
    decisions = []
    for part, module in _accelerated(modules):
        chosen: dict[str, Kernel] = {}
        module.compute_dtype = dtype
        for kernel in _candidates(module, device):
            reason = "training.kernels=off" if mode == "off" else _reason_to_begin(kernel, module)
            if reason is None:
                chosen[kernel.method] = kernel
            decisions.append(Decision(f"{part}.{kernel.method}", kernel, reason))
        module.kernels = chosen
    return decisions


def chosen_kernels(module: nn.Module) -> list[str]:
    """The names of the kernels that a module and its parts use, such as `MLP.forward`."""
    parts = (part for part in module.modules() if isinstance(part, Accelerated))
    return [kernel.name for part in parts for kernel in part.kernels.values()]


def _accelerated(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Accelerated]]:
    seen: set[int] = set()
    for name, root in modules.items():
        for path, module in root.named_modules():
            if isinstance(module, Accelerated) and id(module) not in seen:
                seen.add(id(module))
                yield f"{name}.{path}" if path else name, module


def _candidates(module: nn.Module, device: torch.device) -> Iterable[Kernel]:
    """The kernels of this device that were written for a class of the module."""
    backend: Backend = "triton" if device.type == "cuda" else "cpu"
    names = {full_name(kind) for kind in type(module).__mro__}
    return [kernel for kernel in KERNELS if kernel.backend == backend and kernel.target in names]


def _reason_to_begin(kernel: Kernel, module: nn.Module) -> str | None:
    package = PACKAGES[kernel.backend]
    if not is_installed(package):
        return f"{package} is not installed"
    return reason_against(kernel, module) or kernel.supports(module)


def reason_against(kernel: Kernel, module: nn.Module) -> str | None:
    """Why a kernel must not stand in for the module's plain method any more; None where it may."""
    kind = _meant_class(type(module))
    if full_name(kind) != kernel.target:
        return _subclass_reason(kernel, kind)
    if torch_module._has_any_global_hook():
        return "a global module hook is registered"
    for path, part in module.named_modules():
        where = path or type(module).__name__
        if part is not module and full_name(_meant_class(type(part))) not in kernel.parts:
            return f"{where} is a {type(part).__name__}"
        if any(getattr(part, hooks) for hooks in HOOKS):
            return f"{where} has a hook"
        own_class: Any = type(part)
        if not _method_names(own_class).isdisjoint(part.__dict__):
            return f"{where}.{min(_method_names(own_class) & part.__dict__.keys())} was replaced"
    return changed_source(kernel.mirrors)


@cache
def _method_names(kind: type) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def _meant_class(kind: type) -> type:
    """The class whose computation this one has: a parent, where a subclass says that kernels hold for it."""
    while kind.__dict__.get("kernels_hold", False):
        kind = kind.__bases__[0]
    return kind


def _subclass_reason(kernel: Kernel, kind: type) -> str:
    methods = [name.rpartition(".")[2] for name in kernel.mirrors if name.startswith(kernel.target + ".")]
    derived = list(takewhile(lambda base: full_name(base) != kernel.target, kind.__mro__))
    own = [name for name in methods if any(name in base.__dict__ for base in derived)]
    return f"{kind.__name__} overrides {', '.join(own)}" if own else f"{kind.__name__} is a class of its own"


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@cache
def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a Triton kernel; with tensors that have no memory (`meta`) it is compiled only."""
    if arguments[0].is_meta:
        kernel.warmup(*arguments, grid=grid, **constants)
    else:
        kernel[grid](*arguments, **constants)
