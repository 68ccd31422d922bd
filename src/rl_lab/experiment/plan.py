"""What a run is about to do: phases, wiring, parameters, memory. Refuses what cannot fit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch

from rl_lab import ranks
from rl_lab.data_sources.base import DataSource
from rl_lab.environments import EnvironmentFacts
from rl_lab.errors import ConfigError
from rl_lab.experiment.model import Model
from rl_lab.experiment.validation import Settings
from rl_lab.kernels.registry import Decision
from rl_lab.orchestration.expectation import expected_updates
from rl_lab.orchestration.phase_records import Phase

MIB = 2**20
OPTIMIZER_COPIES = 4  # gradient, momentum, second moment and scratch, beside the parameters themselves
HEADROOM = 0.9  # the system and the environments need some of what is free


def describe(
    *,
    settings: Settings,
    facts: EnvironmentFacts,
    model: Model,
    phases: Sequence[Phase],
    sources: Mapping[str, DataSource],
    device: torch.device,
    folder: Path,
    backend: str,
    paths: Sequence[str],
) -> str:
    """The plan as text."""
    needs = memory_needs(model, sources, device)
    lines = [f"Run       {folder}", f"Device    {_device_text(settings, device)}"]
    lines += _environment_lines(settings, facts, backend)
    lines += [
        "Phases",
        *(f"  {text}" for text in phase_lines(phases, settings)),
        *update_lines(phases, settings, sources),
    ]
    lines += _data_lines(sources)
    lines += _wiring_lines(model)
    lines += ["Paths", *(f"  {text}" for text in paths)]
    lines += _parameter_lines(model.parameters)
    lines += [
        "Memory    " + ", ".join(f"{kind} {_size(needs[kind])}" for kind in ("RAM", "GPU", "disk") if needs[kind])
    ]
    return "\n".join(lines) + "\n"


def _device_text(settings: Settings, device: torch.device) -> str:
    together = f", {ranks.count()} ranks that share all out" if ranks.count() > 1 else ""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)}){together}"
    return f"{device}, {torch.get_num_threads()} thread(s) for the updates{together}"


def _environment_lines(settings: Settings, facts: EnvironmentFacts, backend: str) -> list[str]:
    environment = settings.environment
    action = facts.action_spec
    if action.kind == "discrete":
        text = "discrete " + "×".join(map(str, action.classes))
    else:
        text = f"continuous {action.encoded_size}, from -1 to 1"
    limit = f", at most {facts.max_episode_steps} decisions an episode" if facts.max_episode_steps else ""
    repeat = f", each for {facts.action_repeat} frames" if facts.action_repeat != 1 else ""
    lines = [
        f"Task      {environment.id}, {environment.num_envs * ranks.count()} at once ({backend}), "
        f"{facts.step_cost_us:.0f} µs a step",
        f"Actions   {text}{repeat}{limit}",
    ]
    notes = list(facts.notes)
    if facts.max_episode_steps is None:
        notes.append(
            "its episodes have no time limit. Where an agent can play one for ever, so would an evaluation:"
            " environment.time_limit=N ends it after N frames"
        )
    return lines + [f"Note      {note}" for note in notes]


def phase_lines(phases: Sequence[Phase], settings: Settings) -> list[str]:
    """One line a phase: name, type, budget, hooks, data."""
    total = f"{settings.training.total_timesteps:,}".replace(",", "_")
    lines = []
    for phase in phases:
        budget = str(phase.duration) if phase.duration is not None else f"until {total} env steps"
        if phase.repeat > 1:
            budget += f", {phase.repeat} times"
        if phase.until is not None:
            limits = {"≥": phase.until.at_least, "≤": phase.until.at_most}
            condition = " and ".join(f"{sign} {value:g}" for sign, value in limits.items() if value is not None)
            again = f" {phase.until.times} times in a row" if phase.until.times > 1 else ""
            budget += f", or until {phase.until.metric} {condition}{again}"
        parts = [f"{phase.name} ({phase.type}): {budget}", " → ".join(map(str, phase.hooks))]
        if phase.data_source is not None:
            parts.append(f"data: {phase.data_source}")
        if phase.controller_role is not None:
            parts.append(f"controller: {phase.controller_role}")
        lines.append("; ".join(parts))
    return [*lines, f"in all at most {total} env steps"]


def update_lines(phases: Sequence[Phase], settings: Settings, sources: Mapping[str, DataSource]) -> list[str]:
    """About how many updates the run will make; why, where it is none."""
    total = settings.training.total_timesteps
    count = ranks.count()  # the settings and the sources are those of a share
    waits = {name: source.wait() for name, source in sources.items()}
    waits = {name: wait._replace(records=wait.records * count) for name, wait in waits.items()}
    envs = settings.environment.num_envs * count
    counts = expected_updates(phases, total_timesteps=total, num_envs=envs, waits=waits)
    if counts is None or not any(phase.updates for phase in phases):
        return []
    made = sum(counts.values())
    if made:
        parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
        return [f"Updates   about {made:,}" + (f": {parts}" if len(phases) > 1 else "")]
    longest = max((wait.records for wait in waits.values()), default=0)
    why = f" Updates wait for {longest:,} records." if longest > total else ""
    return [
        f"Updates   NONE: {total:,} env steps end before the first update, so the agent stays untrained.{why} Raise"
        " training.total_timesteps."
    ]


def _data_lines(sources: Mapping[str, DataSource]) -> list[str]:
    lines = [f"  {name}: {text}" for name, source in sources.items() for text in source.describe()]
    return ["Data", *lines] if lines else []


def _wiring_lines(model: Model) -> list[str]:
    lines = []
    for name, part in [*model.components.items(), *model.controllers.items()]:
        wiring = getattr(part, "wiring", None)
        if wiring is not None:
            lines += [f"  {name}: {key} → {text}" for key, text in wiring().items()]
    return ["Wiring", *lines] if lines else []


def path_lines(decisions: Sequence[Decision], *, compiling: bool, kernels: str) -> list[str]:
    """Which parts of an update run as plain PyTorch, and which on a fast path; and why not on a fast one."""
    lines = ["update: " + ("compiled pieces in a captured CUDA graph" if compiling else "plain PyTorch")]
    if kernels == "off":
        return [*lines, "kernels: none, because training.kernels=off"]
    if not decisions:
        return [*lines, "kernels: none, because no part has one on this device"]
    grouped: dict[str, list[str]] = {}
    for decision in decisions:
        text = str(decision)
        part, _, rest = text.partition(": ")
        grouped.setdefault(rest, []).append(part)
    return lines + [f"{', '.join(parts)}: {rest}" for rest, parts in grouped.items()]


def _parameter_lines(counts: Mapping[str, int]) -> list[str]:
    if not counts:
        return ["Parameters  none to train"]
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return [f"Parameters  {sum(counts.values()):,} trainable: {parts}"]


# Memory ---------------------------------------------------------------------------------------------------------------


def memory_needs(model: Model, sources: Mapping[str, DataSource], device: torch.device) -> dict[str, int]:
    """Bytes by kind: parameters with their optimiser state, and the data sources when full."""
    held = sum(value.numel() * value.element_size() for part in model.modules.values() for value in _tensors(part))
    trained = 4 * sum(model.parameters.values()) * OPTIMIZER_COPIES
    needs = {"RAM": 0, "GPU": 0, "disk": 0}
    needs["GPU" if device.type == "cuda" else "RAM"] += held + trained
    for source in sources.values():
        memory = source.memory()
        for kind in needs:
            needs[kind] += int(memory.get(kind.lower(), 0))
    return needs


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def require_room(needs: Mapping[str, int], device: torch.device, folder: Path) -> None:
    """Refuse at once what cannot fit. A data source checks its own share when it is prepared."""
    free: dict[str, int] = {"RAM": psutil.virtual_memory().available, "disk": shutil.disk_usage(folder).free}
    if device.type == "cuda":
        free["GPU"] = torch.cuda.mem_get_info(device)[0]
    for kind, available in free.items():
        if needs[kind] > HEADROOM * available:
            raise ConfigError(
                f"The run needs {_size(needs[kind])} of {kind}, and {_size(available)} is free. Choose a smaller size, "
                "or lower data_sources.replay.capacity, or keep the replay elsewhere (data_sources.replay.storage)."
            )


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(count / MIB, 0.1):.1f} MiB"
