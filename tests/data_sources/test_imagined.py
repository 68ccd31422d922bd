"""Imagined batches: they follow the model and the policy, end where it ends, and go on exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_offline import context, dataset
from tests.overrides import QUIET
from tests.runs import assert_goes_on_exactly

from rl_lab.data_sources.imagined import ImaginedSource
from rl_lab.data_sources.offline import OfflineSource
from rl_lab.errors import ConfigError, DataError
from rl_lab.records import BatchSpec
from rl_lab.simulation.simulator import SimulatedStep, Simulator
from rl_lab.workflows.dqn import DQN

SPEC = BatchSpec(32, 3)
SETTINGS: dict[str, Any] = {"horizon": 4, "rollouts": 8, "every": 10, "keep": 4, "policy": "agent"}


class Counter(Simulator):
    """The second entry of the observation counts the steps; the reward is the action; an episode ends at `end`."""

    has_observation = True

    def __init__(self, end: float = 1e9) -> None:
        self.end = end

    def observe(self, observation: Any, **_: Any) -> torch.Tensor:
        return observation["vector"]

    def observation(self, state: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"vector": state}

    def step(self, state: torch.Tensor, action: torch.Tensor) -> SimulatedStep:
        following = state + torch.tensor([0.0, 1.0])
        return SimulatedStep(following, action[:, 0], (following[:, 1] < self.end).float())


class Agent:
    """Acts with a tenth of what it sees."""

    def initial_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {}

    def reset_state(self, state: dict[str, torch.Tensor], is_first: np.ndarray) -> dict[str, torch.Tensor]:
        return state

    def act(self, observation: Any, state: Any, *, mode: str = "eval") -> tuple[np.ndarray, Any]:
        return observation["vector"][:, 1:] / 100.0, state


def imagined(path: Path, **settings: Any) -> ImaginedSource:
    if not (path / "data.npz").exists():
        dataset(path)
    demos = OfflineSource(path=str(path / "data.npz"))
    source = ImaginedSource(source="demos", **{**SETTINGS, "simulator": Counter(), **settings})
    own = replace(context(path / "run"), sources={"demos": demos, "imagined": source}, agent=Agent())
    for part in (demos, source):
        part.prepare(own)
    return source


def test_rollouts_follow_the_model_and_the_agent(tmp_path: Path) -> None:
    """Record t + 1 is the model's successor of record t, and its reward that of the action taken there."""
    source = imagined(tmp_path)
    source.check(SPEC)
    assert source.ready(SPEC)
    batch = source.sample(SPEC)
    vector = batch.observation["vector"]
    torch.testing.assert_close(vector[:, 1:], vector[:, :-1] + torch.tensor([0.0, 1.0]))
    acted = ~batch.is_last[:, :-1]
    torch.testing.assert_close(batch.action[:, :-1, 0][acted], vector[:, :-1, 1][acted] / 100.0)
    torch.testing.assert_close(batch.reward[:, 1:][acted], batch.action[:, :-1, 0][acted])
    assert not batch.is_terminal.any()
    assert not batch.is_last[:, :-1].any()  # only the horizon ends these


def test_the_model_ends_episodes(tmp_path: Path) -> None:
    """No window goes beyond a terminal record."""
    source = imagined(tmp_path, simulator=Counter(end=5.0))
    ended = False
    for _ in range(10):
        batch = source.sample(BatchSpec(32, 2))
        assert not batch.is_last[:, 0].any()
        assert (batch.observation["vector"][..., 1][batch.is_terminal] >= 5.0).all()
        ended |= bool(batch.is_terminal.any())
    assert ended


def test_an_imagined_source_goes_on_exactly(tmp_path: Path) -> None:
    """Also in the middle of the batches that share their rollouts."""
    whole, half = imagined(tmp_path, every=3), imagined(tmp_path, every=3)
    for source in (whole, half):
        torch.manual_seed(0)
        for _ in range(4):
            source.sample(SPEC)
    noise = torch.get_rng_state()
    (tmp_path / "saved").mkdir()
    (tmp_path / "demos").mkdir()
    state, starts = half.state_dict(tmp_path / "saved"), half._source.state_dict(tmp_path / "demos")
    resumed = imagined(tmp_path, every=3)
    resumed.load_state_dict(state, tmp_path / "saved")
    resumed._source.load_state_dict(starts, tmp_path / "demos")
    expected = [whole.sample(SPEC) for _ in range(4)]
    torch.set_rng_state(noise)
    for batch in expected:
        torch.testing.assert_close(resumed.sample(SPEC).observation, batch.observation)


def test_what_cannot_be_imagined_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a rollout has 5. Set horizon to at least 7"):
        imagined(tmp_path).check(BatchSpec(4, 8))
    source = ImaginedSource(source="replay", simulator=None, **SETTINGS)
    with pytest.raises(ConfigError, match="source=replay: there is no such data source"):
        source.prepare(replace(context(tmp_path), sources={"imagined": source}))
    with pytest.raises(DataError, match=r"Counter has no policy. Use policy=agent"):
        imagined(tmp_path, policy="model").check(SPEC)
    with pytest.raises(ConfigError, match="horizon=0: expected at least 1"):
        ImaginedSource(source="replay", simulator=None, **{**SETTINGS, "horizon": 0})


def test_a_run_on_a_mixture_that_died_goes_on_exactly(tmp_path: Path) -> None:
    """DQN on its replay, rollouts of the known equations and demonstrations: the resumed run has the metrics of the one
    that never stopped."""
    base = ["+experiment=dqn_cartpole_imagined", "training.total_timesteps=400", "data_sources.replay.start_after=100"]
    base += ["+data_sources.demos={_target_: rl_lab.data_sources.offline.OfflineSource, path: null}"]
    base += ["data_sources.demos.expert={name: cartpole, episodes: 2}", "data_sources.mixture.parts.demos=0.2"]
    base += ["evaluation.episodes=1", "evaluation.final_episodes=1", "evaluation.select=last", "checkpoint.best=null"]
    base += ["checkpoint.every=150", "logging.every=40", *QUIET]
    assert_goes_on_exactly(base, DQN, "update", killed_at=60, root=tmp_path)
