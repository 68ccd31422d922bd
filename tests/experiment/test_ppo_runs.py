"""Whole PPO runs: they learn, they resume exactly from anywhere, and any kind of environment trains."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from tests.overrides import QUIET

from rl_lab.experiment.agent import load
from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.experiment.train import run_training
from rl_lab.orchestration.run_directory import RunDirectory

SMALL = [
    *QUIET, "environment.num_envs=2", "data_sources.stream.length=16", "workflow.batch_size=8",
    "evaluation.episodes=2", "evaluation.num_envs=2", "evaluation.every=60", "logging.every=10", "checkpoint.every=50",
    "training.total_timesteps=160", "experiment.device=cpu",
]  # fmt: skip
PPO = "+experiment=ppo"
NORMALIZED = [
    PPO,
    "+components/normalizers@components.observation_normalizer=observations",
    "+components/normalizers@components.reward_normalizer=rewards",
]
RECURRENT = [
    "+experiment=ppo_recurrent",
    "components.memory.units=8",
    "workflow.sequence_length=8",
    "workflow.batch_size=1",
    "optimizer@optimizers.main=torch",  # its state is saved, too
]


def metrics(run: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "wall_s" and not k.startswith("time/")} for row in rows]


def interrupted_at(overrides: list[str], root: Path, *, updates: int) -> Path:
    """A run that is asked to stop during so many updates, in the middle of a rollout's epochs."""
    prepared = prepare([*overrides, f"run_root={root}"])
    run = RunDirectory.create(root, "part", 0)
    orchestrator = build(prepared, run).orchestrator
    update = orchestrator.workflow.update

    def stop_there(batch, *, phase):
        if orchestrator.scheduler.updates == updates:
            signal.raise_signal(signal.SIGTERM)
        return update(batch, phase=phase)

    orchestrator._hooks["update"] = stop_there
    run.write_text("config.yaml", prepared.to_yaml())
    run.start(device="cpu", parameters={}, argv=[], overrides=[])
    assert orchestrator.run() == 143
    orchestrator.close()
    return run.path


@pytest.mark.parametrize(
    ("environment", "further"),
    [("Pendulum-v1", NORMALIZED), ("CartPole-v1", RECURRENT)],
    ids=["normalized", "recurrent"],
)
def test_an_interrupted_run_goes_on_exactly(tmp_path, environment, further):
    """Stopped between two minibatches of a rollout: normalisers, advantages and order go on as they were."""
    overrides = [*SMALL, *further, f"environment.id={environment}", "environment.time_limit=12"]
    whole = run_training([*overrides, f"run_root={tmp_path}/whole"]).folder
    part = interrupted_at(overrides, tmp_path / "part", updates=22)
    assert run_training([f"training.resume_path={part}", "logging.console=off"]).code == 0
    assert any("train/loss/policy" in row for row in metrics(whole))
    assert metrics(part) == metrics(whole)


def test_statistics_are_part_of_the_agent(tmp_path):
    """A loaded agent sees observations as the trained one did."""
    run = run_training([*SMALL, *NORMALIZED, "environment.id=CartPole-v1", f"run_root={tmp_path}"]).folder
    agent = load(run)
    statistics = agent.workflow.observation_normalizer.statistics[0]
    assert float(statistics.count) == 160.0
    assert float(agent.workflow.reward_normalizer.statistics.count) == 160.0
    assert not torch.equal(statistics.variance, torch.ones(4))


def test_learns_cartpole(tmp_path):
    """The tuned experiment leaves chance (22) far behind within 8k env steps."""
    overrides = ["+experiment=ppo_cartpole", *QUIET, "training.total_timesteps=8192", "evaluation.final_episodes=10"]
    run = run_training([*overrides, f"run_root={tmp_path}"]).folder
    summary = json.loads((run / "summary.json").read_text())
    assert summary["updates"] == 32 * 20
    assert summary["eval/return_mean"] > 80.0


def test_images_and_frame_stacks(tmp_path):
    """Rendered pixels through the image network, two frames at once."""
    overrides = [
        PPO,
        *SMALL,
        "environment.id=CartPole-v1",
        "environment.observation=pixels",
        "environment.frame_stack=2",
    ]
    overrides += ["environment.image_size=36", "components.encoder.depth=4", "training.total_timesteps=32"]
    overrides += ["evaluation.episodes=1", "evaluation.every=1000"]
    assert run_training([*overrides, f"run_root={tmp_path}"]).code == 0


@pytest.mark.parametrize(
    "name", ["ppo_cartpole", "ppo_pendulum", "ppo_lunar_lander", "ppo_half_cheetah", "ppo_acrobot"]
)
def test_a_rollout_has_as_many_updates_as_minibatches(name):
    """`times` follows from the sizes, so that each rollout is used up before collection goes on."""
    prepared = prepare([f"+experiment={name}"])
    config = prepared.config
    decisions = config["environment"]["num_envs"] * config["data_sources"]["stream"]["length"]
    update = next(hook for hook in prepared.phases[0].hooks if hook.kind == "update")
    assert update.times == config["data_sources"]["stream"]["epochs"] * -(
        -decisions // config["workflow"]["batch_size"]
    )
