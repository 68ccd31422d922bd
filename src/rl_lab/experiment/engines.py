"""Where the jobs of `rl-lab reproduce` run: joblib's processes, submitit's executors (Slurm), or a Ray cluster.

Each engine starts a job and can be asked how it ended. Folders are shared between the machines: logs and runs lie where
they would lie without an engine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_lab.errors import ConfigError, RLLabError, nearest
from rl_lab.experiment.jobs import POLL_S, Job, Start, Work, run_here

_EXTRAS = {"joblib": "sweep", "submitit": "slurm", "ray": "ray"}


def engine(name: str, options: Mapping[str, Any], *, folder: Path) -> Start:
    """The function that starts a job on the engine of this name. `folder`: where submitit keeps its own files."""
    if name not in _EXTRAS:
        raise ConfigError(f"--launcher {name}: there is no such launcher.{nearest(name, _EXTRAS)}")
    if find_spec(name) is None:
        raise ConfigError(f"--launcher {name} is not installed: pip install 'rl-lab[{_EXTRAS[name]}]'")
    makers: dict[str, Callable[..., Start]] = {"joblib": _joblib, "submitit": _submitit, "ray": _ray}
    try:
        return makers[name](folder=folder, **options)
    except TypeError as error:
        raise ConfigError(f"--launcher {name}: {error}. Its options are in docs/scaling.md.") from error


def _joblib(*, folder: Path, workers: int | None = None) -> Start:
    from joblib.externals.loky import get_reusable_executor

    executor = get_reusable_executor(max_workers=workers or os.cpu_count())
    return lambda job: Future(executor.submit(run_here, job))


def _submitit(*, folder: Path, cluster: str | None = None, **parameters: Any) -> Start:
    """`cluster`: slurm, local or debug; None: Slurm where it is. The others are submitit's: slurm_partition, …"""
    import submitit

    try:
        executor = submitit.AutoExecutor(folder=folder / "submitit", cluster=cluster)
        executor.update_parameters(**{"name": "rl-lab", "timeout_min": 24 * 60, **parameters})
    except (ValueError, RuntimeError, NameError) as error:
        raise ConfigError(f"--launcher submitit: {str(error).splitlines()[0]}") from error
    needs = _needs()
    return lambda job: SubmititJob(executor.submit(_meet_and_run, needs, job))


def _ray(*, folder: Path, address: str | None = None, num_cpus: float = 1, num_gpus: float = 0) -> Start:
    from rl_lab import ray_cluster

    ray = ray_cluster.connect(address, place="--option address")
    task = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=0)(_meet_and_run)
    needs = _needs()
    return lambda job: RayTask(task.remote(needs, job))


def _needs() -> Any:
    from rl_lab.ray_cluster import Needs

    return Needs.of_this_process(os.getcwd())


def _meet_and_run(needs: Any, job: Job) -> int:
    needs.meet()
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    return run_here(job)


class Future:
    """A job in one of joblib's processes."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def poll(self) -> int | None:
        return self._future.result() if self._future.done() else None

    def stop(self, deadline: float) -> None:
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor().shutdown(wait=False, kill_workers=False)
        _wait(self, deadline)


class SubmititJob:
    """A job in the queue of a cluster, or of submitit's local executor."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def poll(self) -> int | None:
        if not self._job.done():
            return None
        try:
            return int(self._job.result())
        except Exception as error:
            if isinstance(error, RLLabError):
                raise
            raise RLLabError(f"--launcher submitit: the job {self._job.job_id} failed: {_last(error)}") from error

    def stop(self, deadline: float) -> None:
        self._job.cancel()


class RayTask:
    """A job as a task on a cluster."""

    def __init__(self, task: Any) -> None:
        self._task = task

    def poll(self) -> int | None:
        import ray

        from rl_lab import ray_cluster

        done, _ = ray.wait([self._task], timeout=0)
        return ray_cluster.result(self._task) if done else None

    def stop(self, deadline: float) -> None:
        import ray

        ray.cancel(self._task)


def _wait(work: Work, deadline: float) -> None:
    while work.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _last(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("-")]
    return lines[-1][:300] if lines else type(error).__name__
