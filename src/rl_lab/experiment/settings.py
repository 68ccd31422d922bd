"""The plain sections of the configuration: every key, what it means, which values it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def _number(default: Any, *, minimum: float) -> Any:
    return field(default=default, metadata={"minimum": minimum})


@dataclass(frozen=True)
class ExperimentSettings:
    """`experiment`: what the run is called and where it computes."""

    name: str | None = None
    """Folder of the run under `run_root`; null: the experiment file's name."""
    seed: int = _number(0, minimum=0)
    """Seeds every random stream of the run."""
    device: str = "auto"
    """`auto` (the GPU where there is one), `cpu`, `cuda` or `cuda:N`."""


@dataclass(frozen=True)
class TrainingSettings:
    """`training`: budget, curriculum and how the updates run."""

    total_timesteps: int = _number(100_000, minimum=1)
    """Cap on env steps (agent decisions, summed over environments) over all phases."""
    phases: list[Any] | None = None
    """The curriculum; null: one online phase on the replay source."""
    compile: Literal["auto", "off"] = "auto"
    """`auto`: compile the update where it pays (on a GPU)."""
    kernels: Literal["auto", "off"] = "auto"
    """`auto`: kernels stand in for plain PyTorch where they hold; the plan says where. `off`: nowhere."""
    overlap: bool = False
    """Step the environments while updates run; the ends of episodes then reach the replay one collection later."""
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """Compute type of the updates; `auto`: bfloat16 on a GPU, float32 on the CPU. `tf32`: float32 with products of
    reduced precision on a GPU. Parameters stay float32."""
    resume_path: str | None = None
    """A run or one of its checkpoints to go on with."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What happens when a loss is NaN or infinite."""
    devices: int = _number(1, minimum=1)
    """Processes on each machine that train one agent together, on a GPU each or on the CPU. They share out
    `environment.num_envs`, the batch and the replay (docs/scaling.md)."""
    nodes: int = _number(1, minimum=1)
    """Machines with so many devices each; `torchrun` starts the processes there."""
    threads: int | Literal["auto"] = _number("auto", minimum=1)
    """CPU threads of torch; `auto`: 1 on the CPU, torch's own choice beside a GPU."""


@dataclass(frozen=True)
class EvaluationSettings:
    """`evaluation`: held-out episodes, while training and at the end."""

    episodes: int = _number(10, minimum=1)
    """Episodes of one evaluation."""
    every: int = _number(10_000, minimum=1)
    """Env steps between evaluations while training."""
    num_envs: int = _number(4, minimum=1)
    """Environments that play the episodes side by side."""
    final_episodes: int | None = _number(None, minimum=1)
    """Episodes of the final evaluation, with seeds that no other evaluation uses; null: as many as `episodes`."""
    select: Literal["last", "best"] = "last"
    """Which agent plays the final episodes; `best` is the one that checkpoint.best kept."""
    controller: str | None = None
    """The role of the controller that plays the evaluations (`distill_target`, say); null: the agent itself."""
    video: bool = True
    """Record one evaluation episode at the end of training."""
    environment_kwargs: dict[str, Any] | None = None
    """Arguments of the environment in evaluations, over environment.kwargs: {opponent: minimax}, say."""
    imagination: bool = True
    """Write the real-beside-imagined picture at the end of training, where the workflow has a model."""


@dataclass(frozen=True)
class CheckpointSettings:
    """`checkpoint`: how often the whole run is saved."""

    every: int = _number(10_000, minimum=1)
    """Env steps between checkpoints; one more is written at the end and on interruption."""
    keep: int = _number(2, minimum=1)
    """The newest so many are kept."""
    best: str | None = None
    """A metric of the evaluations (eval/return_mean): the agent with the highest is kept as `best`; null: none is."""


@dataclass(frozen=True)
class LoggingSettings:
    """`logging`: what is written while the run goes on."""

    every: int = _number(500, minimum=1)
    """Env steps between lines of metrics.jsonl."""
    console: Literal["auto", "live", "plain", "off"] = "auto"
    """`auto`: a live line on a terminal, plain lines elsewhere."""
    tensorboard: bool = True
    wandb: dict[str, Any] | bool = False
    """true, or the arguments of wandb.init: {project: …, entity: …}."""
    mlflow: dict[str, Any] | bool = False
    """true, or {tracking_uri: …, experiment: …}."""


SECTIONS: dict[str, type] = {
    "experiment": ExperimentSettings,
    "training": TrainingSettings,
    "evaluation": EvaluationSettings,
    "checkpoint": CheckpointSettings,
    "logging": LoggingSettings,
}
