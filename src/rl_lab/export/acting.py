"""The acting policy of a run with its memory, as one file for ONNX or TorchScript, checked against the agent itself."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_lab.environments import make_vector_env
from rl_lab.errors import ConfigError, RLLabError
from rl_lab.experiment.agent import LoadedRun, load_run
from rl_lab.export.capture import Captured, Tensors, arrays_stay_tensors, capture, recorded_noise
from rl_lab.kernels import registry
from rl_lab.records import OBSERVATION_PREFIX
from rl_lab.workflows.base import AgentState

Format = Literal["onnx", "torchscript"]
STATE_PREFIX = "state."
CHECKED_STEPS = 50
TOLERANCE = 1e-3
SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt"}

HOW_TO_USE = (
    "Begin with a state of zeros. Call it with an observation, the state and fresh noise, in this order; do the action "
    "and keep the state for the next call. Observations are those of RL Lab's environments: one array for each key, "
    "images as bytes. Continuous actions lie in [-1, 1] and stand for the bounds of the environment's space."
)

Run = Callable[[Tensors, Sequence[Tensor]], Tensors]


class ExportError(RLLabError):
    """The exported file does not do what the agent does."""


@dataclass(frozen=True)
class Exported:
    """The files that were written, and how far the export was from the agent."""

    model: Path
    description: Path
    steps: int
    difference: float


def load_plain(run: str | Path, *, run_root: str | Path = "experiments", trust: bool = False) -> LoadedRun:
    """A run on the CPU without kernels: everything that it computes is plain PyTorch, which can be traced."""
    loaded = load_run(run, run_root=run_root, device="cpu", trust=trust)
    context = loaded.workflow.context
    modules = {**context.components, **{name: part for name, part in context.controllers.items()}}
    plain = {name: part for name, part in modules.items() if isinstance(part, torch.nn.Module)}
    registry.enable(plain, device=torch.device("cpu"), dtype=torch.float32, mode="off")
    return loaded


def export_policy(
    run: str | Path, kind: Format, out: Path, *, run_root: str | Path = "experiments", trust: bool = False
) -> Exported:
    """Write the policy of a run, one environment wide, and a JSON file that describes its inputs and outputs.

    The exported function takes the observation, the state and the noise that the agent draws, and returns the action
    and the next state. It is read back and must choose the agent's actions for an episode's first steps.
    """
    loaded = load_plain(run, run_root=run_root, trust=trust)
    captured = capture_policy(loaded)
    out.parent.mkdir(parents=True, exist_ok=True)
    _write_onnx(captured, out) if kind == "onnx" else _write_torchscript(captured, out)
    description = out.with_suffix(".json")
    description.write_text(json.dumps(_describe(loaded, captured, kind), indent=1) + "\n")
    steps, difference = check(loaded, captured, read(out, kind, captured))
    return Exported(out, description, steps, difference)


def capture_policy(loaded: LoadedRun) -> Captured:
    workflow = loaded.workflow
    spec = workflow.context.observation_spec
    examples: Tensors = {
        OBSERVATION_PREFIX + key: torch.zeros(1, *own.shape, dtype=getattr(torch, own.dtype))
        for key, own in spec.items()
    }
    examples |= {STATE_PREFIX + name: value for name, value in workflow.initial_state(1).items()}

    def act(inputs: Tensors) -> Tensors:
        observation = {key: inputs[OBSERVATION_PREFIX + key] for key in spec}
        state = {
            name.removeprefix(STATE_PREFIX): value for name, value in inputs.items() if name.startswith(STATE_PREFIX)
        }
        with arrays_stay_tensors():
            action, after = workflow.act(observation, state, mode="eval")  # type: ignore[arg-type]
        return {"action": torch.as_tensor(action), **{STATE_PREFIX + name: value for name, value in after.items()}}

    return capture(act, examples)


# Writing --------------------------------------------------------------------------------------------------------------


def _write_torchscript(captured: Captured, path: Path) -> None:
    inputs = (*captured.examples.values(), *_zeros(captured))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(captured.graph.eval(), inputs, check_trace=False), str(path))


def _write_onnx(captured: Captured, path: Path) -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ConfigError("--onnx needs further packages: pip install 'rl-lab[export]'.") from None
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    inputs = (*captured.examples.values(), *_zeros(captured))
    names = [*captured.inputs, *captured.noise_names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            captured.graph.eval(), inputs, str(path), input_names=names, dynamo=True, external_data=False,
            verbose=False, output_names=[f"{name}.next" if name in names else name for name in captured.outputs],
        )  # fmt: skip


def _zeros(captured: Captured) -> list[Tensor]:
    return [torch.full(noise.shape, 0.5) for noise in captured.noise]


def _describe(loaded: LoadedRun, captured: Captured, kind: Format) -> dict[str, Any]:
    spec = loaded.workflow.context.action_spec

    def tensor(name: str, value: Tensor) -> dict[str, Any]:
        return {"name": name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}

    return {
        "run": loaded.run.path.name,
        "workflow": loaded.workflow.name,
        "checkpoint": loaded.checkpoint.path.name,
        "environment": loaded.settings.environment.id,
        "format": kind,
        "inputs": [tensor(name, captured.examples[name]) for name in captured.inputs],
        "noise": [{"name": name, "kind": noise.kind, "shape": list(noise.shape)}
                  for name, noise in zip(captured.noise_names, captured.noise, strict=True)],
        "outputs": captured.outputs,
        "action": {"kind": spec.kind, "shape": list(spec.shape), "classes": list(spec.classes)},
        "how": HOW_TO_USE,
    }  # fmt: skip


# Reading and checking -------------------------------------------------------------------------------------------------


def read(path: Path, kind: Format, captured: Captured) -> Run | None:
    """The exported file as a function; None where what reads it is not installed."""
    if kind == "torchscript":
        module = torch.jit.load(str(path))

        def run_script(inputs: Tensors, noise: Sequence[Tensor]) -> Tensors:
            values = module(*(inputs[name] for name in captured.inputs), *noise)
            return dict(zip(captured.outputs, values, strict=True))

        return run_script
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wanted = {entry.name for entry in session.get_inputs()}

    def run_onnx(inputs: Tensors, noise: Sequence[Tensor]) -> Tensors:
        feed = {name: inputs[name].numpy() for name in captured.inputs}
        feed |= {name: value.numpy() for name, value in zip(captured.noise_names, noise, strict=True)}
        values = session.run(None, {name: value for name, value in feed.items() if name in wanted})
        return {name: torch.as_tensor(np.asarray(value)) for name, value in zip(captured.outputs, values, strict=True)}

    return run_onnx


def check(loaded: LoadedRun, captured: Captured, run: Run | None) -> tuple[int, float]:
    """Play an episode's first steps with the agent, and let the export decide beside it with the same noise."""
    if run is None:
        return 0, float("nan")
    workflow, settings = loaded.workflow, loaded.settings
    envs = make_vector_env(settings.environment, seed=settings.experiment.seed, num_envs=1, stream="final")
    worst, steps, state = 0.0, 0, workflow.initial_state(1)
    other: AgentState = dict(state)
    try:
        current = envs.reset()
        while steps < CHECKED_STEPS:
            steps += 1
            with recorded_noise() as drawn:
                action, state = workflow.act(current.observation, state, mode="eval")
            inputs = {OBSERVATION_PREFIX + key: torch.as_tensor(value) for key, value in current.observation.items()}
            inputs |= {STATE_PREFIX + name: value for name, value in other.items()}
            found = run(inputs, drawn.values)
            other = {name: found[STATE_PREFIX + name] for name in state}
            worst = max(worst, _difference(found["action"], torch.as_tensor(action)))
            worst = max([worst, *(_difference(other[name], value) for name, value in state.items())])
            current = envs.step(action)
            if current.ended is not None:
                break
    finally:
        envs.close()
    if not worst <= TOLERANCE:
        raise ExportError(f"The export differs from the agent by {worst:.2g} within {steps} steps: it is not usable.")
    return steps, worst


def _difference(left: Tensor, right: Tensor) -> float:
    return float((left.detach().double() - right.detach().double()).abs().max()) if left.numel() else 0.0
