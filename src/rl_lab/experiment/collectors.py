"""Asynchronous collection on Ray: actors play on their own with copies of the policy, never older than so many updates.

Each actor has a share of the environments and takes as many decisions at a stretch as the bound allows. The learner
takes whichever stretch is done first, and hands out its newest weights through the object store. The policy that
collected may be behind the learner, by `environment.staleness` updates; how far it was is logged as
`collect/policy_age`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import torch

from rl_lab import ray_cluster
from rl_lab.environments.group import prepare_worker, register
from rl_lab.environments.process import registered_by_user
from rl_lab.environments.runner import SeedPlan
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.environments.sync import SyncVectorEnv
from rl_lab.errors import EnvironmentFailure
from rl_lab.experiment.model import build_model
from rl_lab.metrics.values import Metrics
from rl_lab.orchestration.randomness import seed_random
from rl_lab.records import CollectResult
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext

LONGEST = 64  # decisions that an actor takes between two exchanges, at most
SEED_DOMAIN = 9  # keeps the actors' draws apart from other streams of the run's seed
MAX_FAILURES = 3  # of one actor without a stretch in between
Weights = Mapping[str, Any]


class Collector:
    """On a node: a copy of the agent in some of the environments."""

    def __init__(self, needs: ray_cluster.Needs, module: str | None, content: bytes) -> None:
        needs.meet()
        prepare_worker(module)
        made = cloudpickle.loads(content)
        register(made["registered"])
        torch.set_num_threads(1)
        config, settings, self._rows = made["config"], made["settings"], np.array(made["rows"])
        seed = int(np.random.SeedSequence(made["seed"]).generate_state(1)[0] >> 1)
        seed_random(seed, SEED_DOMAIN)
        model = build_model(config, torch.device("cpu"))
        self._envs = SyncVectorEnv(settings=settings.resolved(), seeds=SeedPlan(seed, "train", len(self._rows)))
        self._workflow = model.workflow
        self._context = WorkflowContext(
            config=config,
            device=torch.device("cpu"),
            seed=seed,
            observation_spec=model.observation_spec,
            action_spec=model.action_spec,
            components=model.components,
            controllers=model.controllers,
            train_envs=self._envs,
            initial=self._envs.reset(),
        )
        self._workflow.initialize(self._context)

    def collect(
        self, weights: Weights, stretch: int, env_steps: int, phase: PhaseView
    ) -> tuple[list[CollectResult], list[Any]]:
        """So many decisions in every environment by these weights, and what happened to the environments."""
        for name, module in self._context.components.items():
            module.load_state_dict(weights["components"][name])
        self._context.controllers.load_state_dict(weights["controllers"])
        results = [self._decide(env_steps, phase) for _ in range(stretch)]
        return results, self._envs.drain_events()

    def _decide(self, env_steps: int, phase: PhaseView) -> CollectResult:
        result = self._workflow.collect_step(env_steps, phase=phase)
        assert result is not None
        blocks = [
            replace(block, indices=self._rows if block.indices is None else self._rows[block.indices])
            for block in result.blocks
        ]
        return CollectResult(blocks, result.env_steps, result.episodes)


class Collectors:
    """The learner's side: stands where the workflow's own `collect_step` does."""

    def __init__(
        self,
        *,
        config: Mapping[str, Any],
        settings: EnvironmentSettings,
        seed: int,
        context: WorkflowContext,
        updates: Callable[[], int],
        rate: float,  # updates per env step that the workflow asks for
        watch: Callable[[Metrics], object],
    ) -> None:
        self._ray = ray = ray_cluster.connect(settings.ray_address, place="environment.ray_address")
        self._context, self._updates, self._rate, self._watch = context, updates, rate, watch
        assert settings.staleness is not None
        self._staleness, self._settings, self._config, self._seed = settings.staleness, settings, config, seed
        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        count = min(settings.num_envs, cores if settings.workers == "auto" else settings.workers, cores)
        self._groups = [group.tolist() for group in np.array_split(np.arange(settings.num_envs), count)]
        self._needs = ray_cluster.Needs.of_this_process()
        options = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self._actor_class = ray.remote(**options)(Collector)
        self._actors: list[Any] = []
        self._tasks: dict[Any, tuple[int, int]] = {}  # what an actor is at: its number, and the age of its weights
        self._failures = [0] * count
        self._stretch = 1  # decisions; the policy's age is in proportion to it
        self._ages: list[int] = []  # since the stretch changed
        self._weights: tuple[int, Any] | None = None  # updates that they have seen, and where they lie

    def collect_step(self, step: int, *, phase: PhaseView) -> CollectResult:
        """The first stretch that is done, or the one whose weights would become too old."""
        if not self._actors:
            self._actors = [self._launch(slot, step) for slot in range(len(self._groups))]
            for slot in range(len(self._groups)):
                self._order(slot, step, phase)
        while True:
            task = self._next_task()
            slot, version = self._tasks.pop(task)
            try:
                results, events = ray_cluster.result(task)
            except ray_cluster.RayError as error:
                self._replace(slot, step, str(error))
            else:
                self._failures[slot] = 0
                self._context.train_envs.events.extend(events)  # type: ignore[union-attr]
                self._adapt(self._updates() - version)
                self._order(slot, step, phase)
                blocks = [block for result in results for block in result.blocks]
                episodes = [episode for result in results for episode in result.episodes]
                return CollectResult(blocks, sum(result.env_steps for result in results), episodes)
            self._order(slot, step, phase)

    def _adapt(self, age: int) -> None:
        """Log how old the policy was, and take longer stretches where the bound leaves room for them."""
        self._watch({"policy_age": float(age)})
        self._ages.append(age)
        if age > self._staleness and self._stretch > 1:
            self._stretch, self._ages = self._stretch // 2, []
        elif len(self._ages) >= 2 * len(self._groups) and self._may_double():
            self._stretch, self._ages = min(LONGEST, 2 * self._stretch), []

    def _may_double(self) -> bool:
        if self._updates():
            return 0 < 2 * max(self._ages) <= self._staleness
        return 2 * self._stretch * self._settings.num_envs * self._rate <= self._staleness

    def _next_task(self) -> Any:
        oldest = min(self._tasks, key=lambda task: self._tasks[task][1])
        late = self._updates() - self._tasks[oldest][1] >= self._staleness
        ready, _ = self._ray.wait([oldest] if late else list(self._tasks), num_returns=1, timeout=self._patience)
        if not ready:
            raise EnvironmentFailure(
                f"environment.id={self._settings.id}: no Ray actor answered for {self._patience:g} s "
                "(environment.startup_timeout): is there a free core in the cluster? See: ray status."
            )
        return ready[0]

    @property
    def _patience(self) -> float:
        return self._settings.startup_timeout

    def _order(self, slot: int, step: int, phase: PhaseView) -> None:
        if self._weights is None or self._weights[0] < self._updates():
            context = self._context
            state = {
                "components": {name: _on_host(part.state_dict()) for name, part in context.components.items()},
                "controllers": {role: _on_host(state) for role, state in context.controllers.state_dict().items()},
            }
            self._weights = self._updates(), self._ray.put(state)
        version, weights = self._weights
        self._tasks[self._actors[slot].collect.remote(weights, self._stretch, step, phase)] = slot, version

    def _launch(self, slot: int, step: int) -> Any:
        content = {
            "config": self._config,
            "settings": self._settings,
            "registered": registered_by_user(self._settings),
            "rows": self._groups[slot],
            "seed": [self._seed, SEED_DOMAIN, slot, step, self._failures[slot]],
        }
        return self._actor_class.remote(self._needs, self._settings.module, cloudpickle.dumps(content))

    def _replace(self, slot: int, step: int, error: str) -> None:
        """An actor that is gone, with its node or alone: what it had not handed over is collected anew."""
        self._failures[slot] += 1
        message = f"a collector is gone ({error}); another one was started ({self._failures[slot]} in a row)"
        self._context.train_envs.events.append(  # type: ignore[union-attr]
            {"kind": "worker_restart", "message": message}
        )
        if self._failures[slot] >= MAX_FAILURES:
            raise EnvironmentFailure(
                f"environment.id={self._settings.id}: a Ray collector failed {MAX_FAILURES} times: {error}"
            )
        self._ray.kill(self._actors[slot])
        self._actors[slot] = self._launch(slot, step)

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors, self._tasks = [], {}


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.detach().cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def require_replay(workflow: Workflow, context: WorkflowContext) -> None:
    """Refuse sources that need every decision of every environment in turn."""
    from rl_lab.data_sources.base import DataSource
    from rl_lab.errors import ConfigError

    for name, source in context.data_sources.items():
        if type(source).follow is not DataSource.follow:
            raise ConfigError(
                f"environment.staleness: data_sources.{name} of {workflow.name} needs every decision in turn. "
                "Collecting asynchronously is for replay; leave environment.staleness at null."
            )
    if context.overlap:
        raise ConfigError(
            "environment.staleness: asynchronous collectors overlap by themselves; set training.overlap=false."
        )
