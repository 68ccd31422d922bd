"""The model of scale: throughput for many collectors and learners, from costs that benchmarks/scaling.py measured."""

from __future__ import annotations

import json
from math import ceil, log2
from pathlib import Path
from typing import Any

COLLECTORS, LEARNERS = (1, 2, 8, 32, 128, 512), (1, 4, 16, 64)


def step_us(costs: dict[str, Any], collectors: int) -> float:
    """Time of one decision in each of `envs` environments: inference, the slowest collector, and the messages."""
    envs = costs["envs"]
    inference = costs["act_fixed_us"] + envs * costs["act_per_env_us"]
    stepping = ceil(envs / min(collectors, envs)) * costs["env_step_us"]
    return inference + stepping + costs["message_fixed_us"] + collectors * costs["message_per_actor_us"]


def update_us(costs: dict[str, Any], learners: int) -> float:
    """Time of one update: what does not divide, the share of the batch, and the all-reduce of the gradient."""
    share = costs["batch"] / learners
    if learners == 1:
        return costs["update_fixed_us"] + share * costs["update_per_row_us"] + costs["sample_us"]
    ring = 2.0 * (learners - 1) / learners * costs["gradient_mb"] * costs["all_reduce_us_per_mb"]
    latency = costs["all_reduce_fixed_us"] * log2(learners)
    return costs["update_fixed_us"] + share * costs["update_per_row_us"] + costs["sample_us"] + ring + latency


def throughput(costs: dict[str, Any], collectors: int, learners: int) -> tuple[float, str]:
    """Env steps a second where collecting and updating overlap, and what limits them."""
    collecting = step_us(costs, collectors) / costs["envs"]
    learning = update_us(costs, learners) * costs["updates_per_env_step"]
    slower = max(collecting, learning)
    return 1e6 / slower, "collection" if collecting >= learning else "updates"


def scaling_table(path: Path) -> str:
    """Env steps/s by collectors and learners; bold where collection is what limits."""
    if not path.exists():
        return "No costs are recorded yet."
    costs = json.loads(path.read_text())["costs"]
    head = "| Collectors | " + " | ".join(f"{learners} learner{'s' * (learners > 1)}" for learners in LEARNERS) + " |"
    lines = [head, "| ---: |" + " ---: |" * len(LEARNERS)]
    for collectors in COLLECTORS:
        cells = []
        for learners in LEARNERS:
            value, limit = throughput(costs, collectors, learners)
            cells.append(f"**{value:,.0f}**" if limit == "collection" else f"{value:,.0f}")
        lines.append(f"| {collectors} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


COSTS = {
    "env_step_us": "a step of one environment",
    "act_fixed_us": "inference of the policy, whatever the number of environments",
    "act_per_env_us": "the same, for each environment",
    "message_fixed_us": "an order to Ray actors and its answer, with the records",
    "message_per_actor_us": "the same, for each actor",
    "update_fixed_us": "an update, whatever the size of the batch",
    "update_per_row_us": "the same, for each sequence of the batch",
    "sample_us": "a batch out of the replay",
    "all_reduce_fixed_us": "an all-reduce between two ranks (gloo, one machine)",
    "all_reduce_us_per_mb": "the same, for each megabyte",
    "broadcast_us_per_mb": "weights through Ray's object store, for each megabyte",
}


def costs_table(path: Path) -> str:
    """What was measured."""
    if not path.exists():
        return "No costs are recorded yet."
    record = json.loads(path.read_text())
    costs = record["costs"]
    lines = [
        f"{record['experiment']}, {costs['envs']} environments of {record['environment']}, batch of {costs['batch']} "
        f"sequences, {costs['gradient_mb']:.1f} MB of parameters; {record['device']}.",
        "",
        "| Cost | µs |",
        "| --- | ---: |",
    ]
    return "\n".join(lines + [f"| {text} | {costs[key]:,.1f} |" for key, text in COSTS.items()])
