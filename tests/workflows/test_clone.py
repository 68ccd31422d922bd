"""The hook `clone`: the agent's own policy learns from a dataset, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.overrides import QUIET

from rl_lab.experiment.agent import load_run
from rl_lab.experiment.train import run_training

DEMOS = [
    "+data_sources.demos={_target_: rl_lab.data_sources.offline.OfflineSource, expert: {name: pendulum, episodes: 2}}",
    "environment.id=Pendulum-v1", "evaluation.episodes=1", "evaluation.final_episodes=1",
    "evaluation.imagination=false", "logging.every=10",
]  # fmt: skip
PHASES = (
    "training.phases=[{name: clone, type: offline, duration_updates: 40, data_source: demos, workflow_hooks: [clone]}]"
)
AGENTS = {
    "ppo": ["+experiment=ppo", "~data_sources.stream"],
    "dreamer_v3": ["+experiment=dreamer_v3", "size=tiny", "workflow.batch_size=4", "workflow.sequence_length=8"],
    "tdmpc2": ["+experiment=tdmpc2", "size=tiny", "workflow.batch_size=16", "components.model.episodic=false"],
}


@pytest.mark.parametrize("agent", sorted(AGENTS))
def test_only_the_policy_learns(agent: str, tmp_path: Path) -> None:
    """Its loss falls; the other parts are those of a run that made no update."""
    overrides = [*AGENTS[agent], *DEMOS, *QUIET]
    cloned = run_training([*overrides, PHASES, f"run_root={tmp_path}/a"]).folder
    rows = [json.loads(line) for line in (cloned / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss/clone"] for row in rows if "train/loss/clone" in row]
    assert losses[-1] < losses[0]
    once = PHASES.replace("updates: 40", "updates: 1")
    start = run_training([*overrides, once, f"run_root={tmp_path}/b"]).folder
    before, after = (load_run(folder).workflow.context for folder in (start, cloned))
    parts = {**before.components, **dict(before.controllers.items())}
    others = {**after.components, **dict(after.controllers.items())}
    for name, part in parts.items():
        pairs = zip(part.parameters(), others[name].parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs) == (name != "policy"), name
