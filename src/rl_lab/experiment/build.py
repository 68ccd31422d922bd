"""The wiring: from a checked configuration to a run that is ready to start."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rl_lab import ranks
from rl_lab.data_sources.base import DataSource, SourceContext
from rl_lab.environments import make_vector_env
from rl_lab.environments.base import SeedStream, VectorEnv
from rl_lab.errors import ConfigError, RLLabError
from rl_lab.experiment import plan
from rl_lab.experiment.collectors import Collectors, require_replay
from rl_lab.experiment.device import keep_freed_memory, resolve_device, resolve_precision, set_threads
from rl_lab.experiment.imagination import can_illustrate, write_run_imagination
from rl_lab.experiment.model import Model, build_model
from rl_lab.experiment.parts import build_optimizers
from rl_lab.experiment.planning import can_plan, write_run_planning
from rl_lab.experiment.prepare import Prepared
from rl_lab.experiment.shares import share_seed
from rl_lab.experiment.validation import Settings
from rl_lab.kernels import graphs, registry
from rl_lab.metrics.console import RunConsole
from rl_lab.metrics.logger import MetricsLogger, NoRows
from rl_lab.metrics.sinks import MlflowSink, Sink, TensorBoardSink, WandbSink
from rl_lab.orchestration.checkpoint import CheckpointManager
from rl_lab.orchestration.orchestrator import LoopSettings, Orchestrator
from rl_lab.orchestration.phase_records import Phase
from rl_lab.orchestration.randomness import forked_random, seed_random
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.records import OBSERVATION_PREFIX, FieldSpec
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import WorkflowContext

SEED_DOMAIN = 7  # keeps the global streams apart from those that parts derive from the run's seed


@dataclass(frozen=True)
class Experiment:
    """A run that is ready to start."""

    orchestrator: Orchestrator
    plan: str
    device: torch.device
    parameters: dict[str, int]


def build(prepared: Prepared, run: RunDirectory) -> Experiment:
    """Build everything that the configuration names. What was opened is closed again where a part does not fit."""
    opened: list[Any] = []
    try:
        return _build(prepared, run, opened)
    except BaseException:
        for part in reversed(opened):
            part.close()
        raise


def _build(prepared: Prepared, run: RunDirectory, opened: list[Any]) -> Experiment:
    config, settings = prepared.config, prepared.settings
    device = resolve_device(settings.experiment.device)
    set_threads(settings.training.threads, device)
    keep_freed_memory(device)
    seed_random(settings.experiment.seed, SEED_DOMAIN)  # every rank builds the same parameters
    model = build_model(config, device)
    sources = build_sources(model, config)
    overlap = settings.training.overlap
    envs = make_vector_env(settings.environment, seed=settings.experiment.seed, overlap=overlap)
    opened.append(envs)
    checkpoints = CheckpointManager(run.checkpoints, workflow=model.workflow.name, keep=settings.checkpoint.keep)
    console = RunConsole(settings.logging.console) if ranks.is_first() else RunConsole("off", stream=io.StringIO())
    opened.append(console)
    logger = MetricsLogger(run.metrics_jsonl, build_sinks(settings, config, run)) if ranks.is_first() else NoRows()
    opened.append(logger)
    # A captured update cannot wait for the gradients of other ranks.
    compiling = settings.training.compile == "auto" and device.type == "cuda" and ranks.count() == 1
    graphs.configure(compiling=compiling)
    autocast_dtype = resolve_precision(settings.training.precision, device)
    decisions = registry.enable(
        model.modules, device=device, dtype=autocast_dtype or torch.float32, mode=settings.training.kernels
    )
    context = WorkflowContext(
        config=config,
        device=device,
        seed=share_seed(settings.experiment.seed),
        observation_spec=model.observation_spec,
        action_spec=model.action_spec,
        components=model.components,
        controllers=model.controllers,
        optimizers=build_optimizers(config, model.builder, model.modules),
        data_sources=sources,
        train_envs=envs,
        initial=envs.reset(),
        make_envs=partial(make_vector_env, settings.environment, seed=settings.experiment.seed, stream="evolution"),
        checkpoints=checkpoints,
        metrics=logger,
        compile=compiling,
        overlap=overlap,
        autocast_dtype=autocast_dtype,
    )
    model.controllers.attach_optimizers(context.optimizers)
    model.workflow.initialize(context)
    check_fit(model.workflow, context)
    opened.extend(sources.values())
    prepare_sources(prepared, model, context, run)
    plan.require_room(plan.memory_needs(model, sources, device), device, run.path)
    text = plan.describe(
        settings=settings,
        facts=prepared.facts,
        model=model,
        phases=prepared.phases,
        sources=sources,
        device=device,
        folder=run.path,
        backend=envs.backend if settings.environment.staleness is None else "ray, asynchronous",
        paths=plan.path_lines(decisions, compiling=compiling, kernels=settings.training.kernels),
    )
    orchestrator = Orchestrator(
        workflow=model.workflow,
        context=context,
        phases=prepared.phases,
        settings=loop_settings(settings),
        run=run,
        logger=logger,
        console=console,
        checkpoints=checkpoints,
        eval_envs=partial(make_eval_envs, settings),
        on_complete=_final_pictures(model.workflow, settings, run),
    )
    check_batches(prepared.phases, orchestrator)
    if settings.environment.staleness is not None:
        _collect_asynchronously(prepared, context, orchestrator)
    ranks.take_first_(value for module in model.modules.values() for value in module.state_dict().values())
    if ranks.rank():  # from here on each rank draws for itself
        seed_random(settings.experiment.seed, SEED_DOMAIN, ranks.rank())
    return Experiment(orchestrator, text, device, model.parameters)


def _collect_asynchronously(prepared: Prepared, context: WorkflowContext, orchestrator: Orchestrator) -> None:
    """Let collectors in processes of their own fill the replay."""
    require_replay(orchestrator.workflow, context)
    orchestrator.collects = Collectors(
        config=prepared.config,
        settings=prepared.settings.environment,
        seed=context.seed,
        context=context,
        updates=lambda: orchestrator.scheduler.updates,
        rate=getattr(orchestrator.workflow, "updates_per_env_step", 1.0),
        watch=lambda metrics: orchestrator.recorder.accumulator.add("collect", metrics),
    )


def build_sources(model: Model, config: dict[str, Any]) -> dict[str, DataSource]:
    sources = {}
    for name, node in (config.get("data_sources") or {}).items():
        source = model.builder.make(f"data_sources.{name}", node)
        if not isinstance(source, DataSource):
            raise ConfigError(f"data_sources.{name}._target_={node['_target_']} is not a DataSource.")
        sources[name] = source
    return sources


def record_fields(
    observation: dict[str, ObservationSpec], action: ActionSpec, workflow: Workflow
) -> dict[str, FieldSpec]:
    """Everything that a record carries."""
    fields = {OBSERVATION_PREFIX + key: FieldSpec(spec.shape, spec.dtype) for key, spec in observation.items()}
    fields["action"] = FieldSpec(action.shape, action.dtype)
    fields["reward"] = FieldSpec((), "float32")
    fields.update(dict.fromkeys(("is_first", "is_last", "is_terminal"), FieldSpec((), "bool")))
    return fields | workflow.record_specs()


def prepare_sources(prepared: Prepared, model: Model, context: WorkflowContext, run: RunDirectory) -> None:
    fields = record_fields(model.observation_spec, model.action_spec, model.workflow)
    assert context.train_envs is not None
    for name, source in context.data_sources.items():
        try:
            source.prepare(
                SourceContext(
                    fields=fields,
                    num_envs=context.train_envs.num_envs,
                    device=str(context.device),
                    seed=context.seed,
                    folder=run.path / "data" / (name if ranks.is_first() else f"{name}-{ranks.rank()}"),
                    actions=prepared.facts.actions,
                    environment=prepared.settings.environment,
                    sources=context.data_sources,
                    simulator=context.simulator,
                    agent=model.workflow,
                )
            )
        except RLLabError as error:
            raise ConfigError(f"data_sources.{name}: {error}") from error


def check_batches(phases: Sequence[Phase], orchestrator: Orchestrator) -> None:
    """Refuse data from which the batches of some phase can never be drawn, and a controller that cannot learn."""
    for phase in phases:
        if any(hook.name == "distill" for hook in phase.hooks):
            for role in orchestrator.context.controllers.distilled:
                orchestrator.context.controllers.learner(role)
        spec, name = orchestrator.batch_specs[phase.name], phase.data_source
        if phase.updates and spec is not None and name is not None:
            try:
                orchestrator.context.data_sources[name].check(spec)
            except RLLabError as error:
                raise ConfigError(f"data_sources.{name}: {error}") from error


def check_fit(workflow: Workflow, context: WorkflowContext) -> None:
    """Act once on the first observation: sizes that do not fit each other or the environment show here."""
    assert context.train_envs is not None
    assert context.initial is not None
    with forked_random(context.seed):
        try:
            workflow.act(context.initial.observation, workflow.initial_state(context.train_envs.num_envs), mode="eval")
        except (RuntimeError, ValueError) as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            shapes = ", ".join(f"{key} {list(spec.shape)}" for key, spec in context.observation_spec.items())
            raise ConfigError(
                f"The parts do not fit the environment or each other: {str(error).splitlines()[0]}. The observation is "
                f"{shapes}, the encoded action has {context.action_spec.encoded_size} entries. Sizes that are left to "
                "the configuration (${_dims…}, @components…) always fit."
            ) from error


def build_sinks(settings: Settings, config: dict[str, Any], run: RunDirectory) -> list[Sink]:
    logging, sinks = settings.logging, list[Sink]()
    if logging.tensorboard:
        sinks.append(TensorBoardSink(folder=run.path / "tensorboard"))
    if logging.wandb:
        sinks.append(WandbSink(folder=run.path, config=config, **_arguments(logging.wandb)))
    if logging.mlflow:
        sinks.append(MlflowSink(folder=run.path, config=config, **_arguments(logging.mlflow)))
    return sinks


def _arguments(value: dict[str, Any] | bool) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def loop_settings(settings: Settings) -> LoopSettings:
    evaluation, training = settings.evaluation, settings.training
    return LoopSettings(
        total_timesteps=training.total_timesteps,
        log_every=settings.logging.every,
        checkpoint_every=settings.checkpoint.every,
        episodes=evaluation.episodes,
        final_episodes=evaluation.final_episodes,
        video=evaluation.video,
        on_nonfinite=training.on_nonfinite,
        best_metric=settings.checkpoint.best,
        select=evaluation.select,
        controller=evaluation.controller,
    )


def make_eval_envs(
    settings: Settings, stream: SeedStream, *, render: bool, seed: int | None = None, episodes: int | None = None
) -> VectorEnv:
    """Environments for held-out episodes; never more than there are episodes to play."""
    evaluation = settings.evaluation
    if episodes is None:
        final = evaluation.final_episodes if stream == "final" else None
        episodes = final or evaluation.episodes
    kwargs = {**settings.environment.kwargs, **(evaluation.environment_kwargs or {})}
    return make_vector_env(
        replace(settings.environment, kwargs=kwargs),
        seed=settings.experiment.seed if seed is None else seed,
        num_envs=min(evaluation.num_envs, episodes),
        stream=stream,
        render=render,
    )


def _final_pictures(workflow: Workflow, settings: Settings, run: RunDirectory) -> Sequence[Callable[[], object]]:
    """Draw pictures of the model's imagination and the planner's candidates when the run is complete."""
    if not settings.evaluation.imagination:
        return ()
    pictures: list[Callable[[], object]] = []
    if can_illustrate(workflow):
        pictures.append(partial(write_run_imagination, workflow, settings, run.path))
    if can_plan(workflow):
        pictures.append(partial(write_run_planning, workflow, settings, run.path))
    return pictures
