"""Runs of a sweep as Ray tasks."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict


class RayLauncher(Launcher):
    """One Ray task for each run. The nodes of a cluster must share the folder that the sweep was started in."""

    def __init__(self, *, address: str | None, num_cpus: float, num_gpus: float) -> None:
        self.address, self.resources = address, {"num_cpus": num_cpus, "num_gpus": num_gpus}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run every list of overrides; what the task returned, in their order."""
        from rl_lab import ray_cluster

        setup_globals()
        ray = ray_cluster.connect(self.address, place="hydra.launcher.address")
        needs = ray_cluster.Needs.of_this_process(os.getcwd())
        remote = ray.remote(**self.resources, max_retries=0)(_run)
        state = Singleton.get_state()
        waiting = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id, config.hydra.job.num = f"{config.hydra.job.name}_{number}", number
            waiting.append(remote.remote(needs, self.hydra_context, self.task_function, config, state))
        return [ray_cluster.result(task) for task in waiting]


def _run(needs, context, task, config, state) -> JobReturn:  # type: ignore[no-untyped-def]
    needs.meet()
    setup_globals()
    Singleton.set_state(state)
    return run_job(
        hydra_context=context,
        task_function=task,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
