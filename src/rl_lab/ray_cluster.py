"""Connecting to Ray, and what a node of a cluster must have before work is done on it."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from rl_lab.errors import ConfigError, RLLabError

PACKAGES = ("rl-lab", "torch", "numpy", "gymnasium")  # a node with another of these would give another run

_HOW_TO_START = (
    "Start one with `ray start --head` and give its address as host:port, or leave it at null for one on this machine."
)


class RayError(RLLabError):
    """The cluster cannot be reached, or could not do what it was asked for."""


def connect(address: str | None, *, place: str) -> Any:
    """The module `ray`, connected: to the cluster at `address`, or to one that it starts on this machine. `place`: the
    setting that the address came from."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(f"{place}: Ray is not installed: pip install 'rl-lab[ray]'") from error
    if ray.is_initialized():
        return ray
    _require_listening(address, place)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(address or "local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = address or "local"
        raise RayError(
            f"{place}={where}: the Ray cluster cannot be reached ({_first_line(error)}). {_HOW_TO_START}"
        ) from error
    return ray


def _require_listening(address: str | None, place: str) -> None:
    """Ray itself would try for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError as error:
        raise RayError(f"{place}={address}: the Ray cluster cannot be reached ({error}). {_HOW_TO_START}") from error


def result(task: Any) -> Any:
    """Wait for a task and return its value. RL Lab's own errors are raised as they are, others as one line."""
    import ray

    try:
        return ray.get(task)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        if isinstance(cause, RLLabError):
            raise cause from error
        raise RayError(f"a Ray task failed: {type(cause).__name__}: {_first_line(cause)}") from error
    except ray.exceptions.ObjectStoreFullError as error:
        raise RayError(full_store(error)) from error
    except ray.exceptions.RayError as error:
        raise RayError(f"Ray: {type(error).__name__}: {_first_line(error)}") from error


def full_store(error: Exception) -> str:
    """The message for an object store without room."""
    return (
        f"Ray's object store is full ({_first_line(error)}). Start the nodes with more (`ray start "
        "--object-store-memory BYTES`), or send less at once: fewer environments, or smaller images."
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


@dataclass(frozen=True)
class Needs:
    """The conditions that a node of the cluster must meet: it has the folder that the command was given in, and the
    same versions of the packages."""

    folder: str | None
    path: tuple[str, ...]
    versions: dict[str, str]

    @classmethod
    def of_this_process(cls, folder: str | None = None) -> Needs:
        return cls(folder, tuple(entry for entry in sys.path if entry), versions())

    def meet(self) -> None:
        """On the node: go there, find the same modules, and refuse other versions."""
        here = versions()
        other = [
            f"{name} {here.get(name, 'missing')} instead of {wanted}"
            for name, wanted in self.versions.items()
            if here.get(name) != wanted
        ]
        if other:
            raise ConfigError(
                f"the Ray node {platform.node()} has {', '.join(other)}. Install the versions of constraints.txt on "
                "every node."
            )
        if self.folder is not None:
            try:
                os.chdir(self.folder)
            except OSError as error:
                raise ConfigError(
                    f"the Ray node {platform.node()} does not see the folder {self.folder} ({error.strerror}). Runs are"
                    " written there: start the command in a folder that all nodes share."
                ) from error
        sys.path.extend(entry for entry in self.path if entry not in sys.path)


def versions() -> dict[str, str]:
    """Python and the packages that a run depends on, as they are here."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found
