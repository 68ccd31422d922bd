"""PPO on CartPole-v1: env steps/s of RL Lab against Stable-Baselines3, same network, batch, epochs and environments.

Both take turns in one process, on one thread, so that other load meets both alike; wall and CPU time are measured and
the medians compared. SB3 must be installed beside RL Lab. Run it: python benchmarks/ppo.py [env steps a turn]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch

from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.orchestration.run_directory import RunDirectory

NUM_ENVS, LENGTH, BATCH, TURNS = 8, 32, 256, 3
EPOCHS = (4, 20)
QUIET = [
    "logging.console=off", "logging.tensorboard=false", "experiment.device=cpu", "evaluation.every=100_000_000",
    "checkpoint.every=100_000_000",
]  # fmt: skip


def rl_lab(steps: int, epochs: int) -> Callable[[], object]:
    """The whole loop as `rl-lab train` runs it, metrics included; without evaluation and checkpoints."""
    root = tempfile.mkdtemp()
    overrides = ["+experiment=ppo_cartpole", *QUIET, f"training.total_timesteps={steps}", f"run_root={root}"]
    overrides += [f"environment.num_envs={NUM_ENVS}", f"data_sources.stream.length={LENGTH}"]
    overrides += [f"data_sources.stream.epochs={epochs}", f"workflow.batch_size={BATCH}"]
    return build(prepare(overrides), RunDirectory.create(root, "speed", 0)).orchestrator._loop


def sb3(steps: int, epochs: int) -> Callable[[], object]:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", NUM_ENVS, seed=0), n_steps=LENGTH, batch_size=BATCH, n_epochs=epochs,
        learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, device="cpu", seed=0,
    )  # fmt: skip
    return lambda: model.learn(steps)


def rates(make: Callable[[int, int], Callable[[], object]], steps: int, epochs: int) -> tuple[float, float]:
    """Env steps per second of wall and of CPU time."""
    run = make(steps, epochs)
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return steps / (time.perf_counter() - wall), steps / (time.process_time() - cpu)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    torch.set_num_threads(1)
    for make in (sb3, rl_lab):
        rates(make, 1024, 4)
    for epochs in EPOCHS:
        turns = [(rates(sb3, steps, epochs), rates(rl_lab, steps, epochs)) for _ in range(TURNS)]
        print(f"{NUM_ENVS} environments × {LENGTH} decisions, batches of {BATCH}, {epochs} epochs")
        for index, clock in enumerate(("wall", "CPU")):
            theirs, ours = (median(turn[who][index] for turn in turns) for who in (0, 1))
            ratio = median(turn[1][index] / turn[0][index] for turn in turns)
            print(f"  {clock:4} time: SB3 {theirs:8.0f}   RL Lab {ours:8.0f} env steps/s   ×{ratio:.2f}")


if __name__ == "__main__":
    main()
