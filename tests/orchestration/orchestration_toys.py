"""Small stand-ins: an environment that counts, a source that remembers, a workflow that writes down its calls."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from rl_lab.components.controller_manager import ControllerManager
from rl_lab.data_sources.base import DataSource, SourceContext
from rl_lab.environments.base import VectorEnv
from rl_lab.metrics.console import RunConsole
from rl_lab.metrics.logger import MetricsLogger
from rl_lab.orchestration.checkpoint import CheckpointManager
from rl_lab.orchestration.orchestrator import LoopSettings, Orchestrator
from rl_lab.orchestration.phases import PhaseNames, parse_phases
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.records import BatchSpec, EpisodeEnd, RecordBlock, SequenceBatch, VectorStep
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import WorkflowContext


class CountingEnvs(VectorEnv):
    """Environment i has episodes of `lengths[i]` steps; every step gives a reward of 1, the last one of 1 + i."""

    def __init__(self, lengths: tuple[int, ...] = (3, 5)) -> None:
        self.lengths, self.num_envs = lengths, len(lengths)
        self.observation_spec = {"vector": ObservationSpec("vector", (1,), "float32")}
        self.action_spec = ActionSpec("discrete", (1,), (4,))
        self.action_repeat = 1
        self.events: list[dict[str, str]] = []
        self.actions: list[list[int]] = []
        self.closed = False

    def reset(self) -> VectorStep:
        self._at = [0] * self.num_envs
        return self._step(np.zeros(self.num_envs, np.float32), np.ones(self.num_envs, bool))

    def step(self, action: np.ndarray) -> VectorStep:
        self.actions.append(action[:, 0].tolist())
        reward, first = np.ones(self.num_envs, np.float32), np.zeros(self.num_envs, bool)
        ended = []
        for index in range(self.num_envs):
            self._at[index] += 1
            if self._at[index] == self.lengths[index]:
                ended.append(index)
                self._at[index], reward[index], first[index] = 0, 0.0, True
        step = self._step(reward, first)
        if ended:
            last = np.array([[self.lengths[index]] for index in ended], np.float32)
            bonus = np.array([1.0 + index for index in ended], np.float32)
            flags = np.array([index % 2 == 0 for index in ended])
            step.ended = EpisodeEnd(np.array(ended), {"vector": last}, bonus, flags, [{} for _ in ended])
        return step

    def _step(self, reward: np.ndarray, first: np.ndarray) -> VectorStep:
        return VectorStep({"vector": np.array(self._at, np.float32)[:, None]}, reward, first)

    def state_dict(self) -> dict[str, Any]:
        return {"at": list(self._at)}

    def load_state_dict(self, state: dict[str, Any]) -> VectorStep:
        self._at = list(state["at"])
        return self._step(np.zeros(self.num_envs, np.float32), np.array([at == 0 for at in self._at]))

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), self._at[0], np.uint8)

    def close(self) -> None:
        self.closed = True


class ListSource(DataSource):
    """Remembers rewards; ready from `start` records on; batch k holds the newest records and its number."""

    def __init__(self, start: int = 0) -> None:
        self.start, self.records, self.drawn, self.commits = start, 0, 0, 0

    def prepare(self, context: SourceContext) -> None:
        pass

    def add(self, block: RecordBlock) -> None:
        self.records += len(block.fields["reward"])

    def ready(self, spec: BatchSpec) -> bool:
        return self.records >= self.start

    def sample(self, spec: BatchSpec) -> SequenceBatch:
        self.drawn += 1
        zeros = torch.zeros(1, 1)
        flags = torch.zeros(1, 1, dtype=torch.bool)
        return SequenceBatch({"vector": zeros[..., None]}, zeros, zeros + self.drawn, flags, flags, flags)

    def __len__(self) -> int:
        return self.records

    def memory(self) -> dict[str, int]:
        return {"ram": 0, "gpu": 0, "disk": 0}

    def state_dict(self, folder: Path) -> dict[str, Any]:
        (folder / "rows.bin").write_bytes(bytes(self.records % 256 for _ in range(64)))
        return {"records": self.records, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        assert (folder / "rows.bin").is_file()
        self.records, self.drawn = state["records"], state["drawn"]

    def committed(self) -> None:
        self.commits += 1


class ToyWorkflow(Workflow):
    """One weight, moved by both updates; acts with torch's random stream; writes down what it was asked to do."""

    name: ClassVar[str] = "toy"
    other_hooks: ClassVar[tuple[str, ...]] = ("distill",)

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.bad_updates: set[int] = set()
        self.jump_at: dict[int, str] = {}

    def _bind_context(self, context: WorkflowContext) -> None:
        self.layer = context.component("layer", nn.Linear)

    def act(self, observation, state, *, mode="eval"):
        count = len(observation["vector"])
        return torch.randint(4, (count, 1), dtype=torch.int32).numpy(), state

    def collect_step(self, step, *, phase):
        self.calls.append("collect")
        return super().collect_step(step, phase=phase)

    def batch_spec(self) -> BatchSpec:
        return BatchSpec(1, 1)

    def update_world_model(self, batch, *, phase):
        return self._learn("world_model", batch)

    def update_controller(self, batch, *, phase):
        return self._learn("controller", batch)

    def _learn(self, name: str, batch: SequenceBatch) -> dict[str, float]:
        drawn = int(batch.reward[0, 0])
        self.calls.append((name, drawn))
        with torch.no_grad():
            self.layer.weight.add_(0.01 * torch.randn(1, 1) + 0.001 * drawn)
        return {"weight": float("nan") if drawn in self.bad_updates else self.layer.weight.item()}

    def batch_losses(self, batch):
        output = self.layer(batch.reward / 0.0 if int(batch.reward[0, 0]) in self.bad_updates else batch.reward)
        return {"prediction": output.mean()}

    def distill(self, *, phase):
        self.calls.append("distill")
        return {"distilled": 1.0}

    def plan_phase(self, step: int) -> str | None:
        return self.jump_at.get(step)


NAMES = PhaseNames(
    update_hooks=("update_world_model", "update_controller"),
    other_hooks=("distill",),
    data_sources=("replay", "other"),
    roles=("random", "policy", "planner"),
)


def build(
    folder: Path,
    phases: list[dict[str, Any]],
    *,
    total: int = 40,
    start: int = 0,
    run: RunDirectory | None = None,
    overlap: bool = False,
    sources: tuple[str, ...] = ("replay",),
    **settings: Any,
) -> Orchestrator:
    """A whole run of the toys."""
    envs = CountingEnvs()
    run = run or RunDirectory.create(folder, "toy", 0)
    torch.manual_seed(7)
    context = WorkflowContext(
        config={},
        device=torch.device("cpu"),
        seed=0,
        observation_spec=envs.observation_spec,
        action_spec=envs.action_spec,
        components={"layer": nn.Linear(1, 1)},
        controllers=ControllerManager({}),
        data_sources={name: ListSource(start) for name in sources},
        train_envs=envs,
        initial=envs.reset(),
        overlap=overlap,
    )
    workflow = ToyWorkflow()
    workflow.initialize(context)
    loop = {"log_every": 8, "checkpoint_every": 12, "episodes": 2, **settings}
    return Orchestrator(
        workflow=workflow,
        context=context,
        phases=parse_phases(phases, NAMES),
        settings=LoopSettings(total_timesteps=total, **loop),
        run=run,
        logger=MetricsLogger(run.metrics_jsonl),
        console=RunConsole("off", stream=io.StringIO()),
        checkpoints=CheckpointManager(run.checkpoints, workflow=workflow.name),
        eval_envs=lambda stream, *, render: CountingEnvs(),
    )
