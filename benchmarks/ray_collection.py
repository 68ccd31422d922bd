"""Env steps a second of asynchronous collection on one Ray node and on two, of one core each, in an environment whose
steps sleep: two nodes' worth of cores on a machine of any size. DQN learns meanwhile, one update for four env steps.

Run it: python benchmarks/ray_collection.py [--write ray_collection]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from measuring import add_writing, write_record

from rl_lab.experiment.train import run_training

STEP_S, ENVS, STALENESS = 0.01, 4, 16
WORDS = [
    *("+experiment=dqn", "environment.id=Sleeping-v0", f"environment.num_envs={ENVS}", "experiment.device=cpu"),
    *("workflow.train_every=4", "workflow.batch_size=32", "data_sources.replay.start_after=100", "logging.every=50"),
    *("environment.backend=ray", f"environment.staleness={STALENESS}", "logging.tensorboard=false"),
    *("evaluation.every=1_000_000", "evaluation.episodes=1", "evaluation.video=false", "logging.console=off"),
]


class Sleeping(CartPoleEnv):
    """CartPole whose steps take their time and no core."""

    def step(self, action: Any) -> Any:
        time.sleep(STEP_S)
        return super().step(action)


def measure(nodes: int, env_steps: int) -> dict[str, float]:
    """Env steps a second between the first quarter of a run and its end: over all, and of the median row."""
    import ray
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**options)
        with TemporaryDirectory() as folder:
            where = [f"environment.ray_address={cluster.address}", f"run_root={folder}"]
            done = run_training([*WORDS, *where, f"training.total_timesteps={env_steps}"])
            lines = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    finally:
        ray.shutdown()
        cluster.shutdown()
    rows = [row for row in lines if "collect/policy_age" in row]
    rows = rows[len(rows) // 4 :]
    steps, seconds = rows[-1]["env_steps"] - rows[0]["env_steps"], rows[-1]["wall_s"] - rows[0]["wall_s"]
    return {
        "env_steps_per_s": steps / seconds,
        "median_row": statistics.median(row["time/env_steps_per_s"] for row in rows[1:]),
        "policy_age": statistics.fmean(row["collect/policy_age"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_writing(parser)
    parser.add_argument("--env-steps", type=int, default=3000)
    options = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    gymnasium.register("Sleeping-v0", Sleeping, max_episode_steps=200)
    figures = {nodes: measure(nodes, options.env_steps * nodes) for nodes in (1, 2)}
    for nodes, values in figures.items():
        print(f"{nodes} node(s): " + ", ".join(f"{name} {value:.1f}" for name, value in values.items()))
    ratios = {name: figures[2][name] / figures[1][name] for name in ("env_steps_per_s", "median_row")}
    print("two nodes over one: " + ", ".join(f"{name} {value:.2f} ×" for name, value in ratios.items()))
    if options.write:
        record = {
            "step_ms": STEP_S * 1e3, "envs": ENVS, "staleness": STALENESS, "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0], "nodes": figures, "ratio": ratios,
        }  # fmt: skip
        write_record(options.write, record, options.note)


if __name__ == "__main__":
    main()
