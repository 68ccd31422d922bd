"""Training on several ranks: starting them, and the share that each has of environments, batches and replay."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch

from rl_lab import ranks
from rl_lab.errors import MESSAGE_PREFIX, ConfigError, RLLabError
from rl_lab.experiment.prepare import Prepared
from rl_lab.experiment.resume import Resumption
from rl_lab.experiment.validation import load_target
from rl_lab.orchestration.checkpoint import CheckpointManager, ranks_of
from rl_lab.orchestration.run_directory import RunDirectory

SEED_DOMAIN = 8  # keeps what a rank draws apart from other streams of the run's seed
PER_RUN = ("capacity", "start_after", "beta_records")  # settings of data sources that count records of all ranks
POLL_S = 0.1
COMMAND = "from rl_lab.cli.rank import main; main()"
GRACE_S = 300.0  # for the ranks to write a checkpoint


def wanted(prepared: Prepared) -> int:
    """The number of ranks that the configuration asks for: devices of a node times nodes."""
    return prepared.settings.training.devices * prepared.settings.training.nodes


def check(prepared: Prepared) -> None:
    """Refuse what cannot be shared out, in one line."""
    count, training = wanted(prepared), prepared.settings.training
    if ranks.is_launched() and (there := int(os.environ["WORLD_SIZE"])) != count:
        raise ConfigError(
            f"training.devices={training.devices} and training.nodes={training.nodes} make {count} ranks, and {there} "
            "were started. Start as many as the settings say."
        )
    if count == 1:
        return
    workflow = load_target("workflow", prepared.config["workflow"])
    if not getattr(workflow, "data_parallel", False):
        raise ConfigError(
            f"training.devices={training.devices}: {workflow.__name__} trains in one process. DreamerV3, TD-MPC2, PPO, "
            "DQN and MuZero share their updates out."
        )
    _check_gpus(prepared)
    batch = prepared.config["workflow"].get("batch_size")
    for name, value in (
        ("environment.num_envs", prepared.settings.environment.num_envs),
        ("workflow.batch_size", batch),
    ):
        if not isinstance(value, int) or value % count:
            raise ConfigError(f"{name}={value} does not divide into {count} equal shares: take a multiple of {count}.")
    if training.nodes > 1 and not ranks.is_launched():
        raise ConfigError(
            f"training.nodes={training.nodes}: start the ranks on every machine with torchrun "
            f"--nnodes={training.nodes} --nproc-per-node={training.devices} --rdzv-backend=c10d "
            "--rdzv-endpoint=HOST:29500 -m rl_lab train …"
        )


def check_resumption(resumption: Resumption) -> None:
    """Refuse to deal a replay on disk out to other ranks, before it is opened: its files have the size of a share."""
    count = wanted(resumption.prepared)
    checkpoint = resumption.checkpoint or CheckpointManager(resumption.run.checkpoints, workflow="").latest()
    saved = count if checkpoint is None else ranks_of(checkpoint)
    for name, node in (resumption.prepared.config.get("data_sources") or {}).items():
        if saved != count and node.get("storage") == "disk":
            raise ConfigError(
                f"data_sources.{name}.storage=disk: the records of {saved} ranks stay where they are and cannot be "
                f"dealt out to {count}. Resume with training.devices={saved}."
            )


def _check_gpus(prepared: Prepared) -> None:
    device, devices = prepared.settings.experiment.device, prepared.settings.training.devices
    there = torch.cuda.device_count()
    if device.startswith("cuda:"):
        raise ConfigError(f"experiment.device={device} is one GPU; with training.devices={devices} write cuda.")
    if device == "cuda" and devices > there:
        raise ConfigError(
            f"training.devices={devices}: this machine has {there} GPUs. Take as many, or experiment.device=cpu."
        )
    if device == "auto" and 0 < there < devices:
        raise ConfigError(f"training.devices={devices}: this machine has {there} GPUs. Take at most as many.")


def share(prepared: Prepared) -> Prepared:
    """The configuration of one rank, with its share of the environments and of the replay. The orchestrator divides the
    batches."""
    count = ranks.count()
    if count == 1:
        return prepared
    environment = prepared.settings.environment
    own = replace(environment, num_envs=environment.num_envs // count)
    nodes = prepared.config.get("data_sources") or {}
    sources = {name: _share_of(node, environment.num_envs, count) for name, node in nodes.items()}
    config = {**prepared.config, "data_sources": sources}
    return replace(prepared, config=config, settings=replace(prepared.settings, environment=own))


def _share_of(node: dict[str, Any], num_envs: int, count: int) -> dict[str, Any]:
    """Settings that count the records of all environments, for one rank: each environment keeps what it had."""
    own = {key: -(-value // count) for key, value in node.items() if key in PER_RUN and isinstance(value, int)}
    if "capacity" in own:
        own["capacity"] = node["capacity"] // num_envs * (num_envs // count)
    return node | own


def share_seed(seed: int) -> int:
    """The seed of what a rank draws by itself: batches, exploration. The first rank has the run's own."""
    if ranks.is_first():
        return seed
    return int(np.random.SeedSequence([seed, SEED_DOMAIN, ranks.rank()]).generate_state(1)[0] >> 1)


class Follower(RunDirectory):
    """A run directory as the ranks beside the first one see it: they read it, and write only their share of checkpoints
    and of a replay on disk."""

    def write_text(self, name: str, text: str) -> None: ...

    def write_config(self, text: str, *, mark: bool) -> None: ...

    def start(self, **record: Any) -> None: ...

    def finish(self, *record: Any, **extra: Any) -> None: ...

    def set_damaged_aside(self) -> str | None: ...

    def heartbeat(self, values: Mapping[str, Any]) -> None: ...

    def event(self, kind: str, message: str, env_steps: int) -> None: ...

    def truncate_events(self, position: int) -> None: ...

    def lock(self) -> AbstractContextManager[None]:
        return nullcontext()


# Starting the ranks of this machine -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assignment:
    """The task of every rank: the run directory, which exists already, and how to go on with it."""

    path: Path
    overrides: list[str]
    trust: bool
    fresh: bool
    stop_rule: Any


def run_ranks(assignment: Assignment, count: int) -> int:
    """Start the ranks, pass signals on to them, and wait; the exit code of the first. Where one fails, all end."""
    with tempfile.TemporaryDirectory(prefix="rl-lab-ranks-") as folder:
        (Path(folder) / "assignment").write_bytes(cloudpickle.dumps(assignment))
        with socket.socket() as found:  # a free port
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        logs = [Path(folder) / f"rank-{rank}.err" for rank in range(count)]
        processes = [_start(rank, count, port, Path(folder) / "assignment", log) for rank, log in enumerate(logs)]
        told: list[int] = []
        before = {
            number: signal.signal(number, lambda number, frame: _pass_on(processes, told, number))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            codes = _wait(processes, told)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return _judge(codes, logs)


def _start(rank: int, count: int, port: int, assignment: Path, log: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    with open(log, "wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", COMMAND, assignment],
            env=environment,
            stderr=errors,
            start_new_session=True,  # a terminal's Ctrl-C goes to this process alone, which passes it on once
        )


def _pass_on(processes: list[subprocess.Popen[bytes]], told: list[int], number: int) -> None:
    told.append(number)
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _wait(processes: list[subprocess.Popen[bytes]], told: list[int]) -> list[int | None]:
    """Until all have ended, or one has failed and the others have had time to notice: the exit codes, None of those
    that go on."""
    deadline = None
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() not in (None, 0) for process in processes)
        if deadline is None and failed:
            deadline = time.monotonic() + (GRACE_S if told else 10.0)
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return [process.poll() for process in processes]


def _judge(codes: list[int | None], logs: list[Path]) -> int:
    """The exit code; the message of the rank that failed by itself becomes the error."""
    messages = [log.read_text(errors="replace").strip().splitlines() for log in logs]
    for code, lines in zip(codes, messages, strict=True):
        own = [line.removeprefix(MESSAGE_PREFIX) for line in lines if line.startswith(MESSAGE_PREFIX)]
        if code and own and " lost another rank" not in own[-1]:
            raise RLLabError(own[-1])
    if codes[0] in (0, 129, 130, 143):
        sys.stderr.write("".join(f"{line}\n" for line in messages[0]))
        return int(codes[0])
    # One that was killed says nothing, and those that lost it end by themselves.
    code, rank = min((code, rank) for rank, code in enumerate(codes) if code)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    raise RLLabError(f"rank {rank} {how}. Go on from the last checkpoint with training.resume_path.")


def read_assignment(path: str) -> Assignment:
    """The assignment in a file that the process which started the ranks wrote."""
    assignment: Assignment = pickle.loads(Path(path).read_bytes())
    return assignment
