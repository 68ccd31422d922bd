"""Behaviour cloning: losses against hand-computed values, whole runs, and exact resume."""

from __future__ import annotations

import json
from math import log, pi
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.overrides import QUIET
from tests.runs import assert_goes_on_exactly

from rl_lab.components.actors.bc import BCPolicy
from rl_lab.components.actors.bc_heads import CategoricalHead, DeterministicHead, GaussianHead, MixtureHead
from rl_lab.errors import ConfigError
from rl_lab.experiment.agent import load
from rl_lab.experiment.train import run_training
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.bc import BehaviourCloning

CONTINUOUS = ActionSpec("continuous", (2,))
VECTOR = {"vector": ObservationSpec("vector", (3,), "float32")}
IMAGE = {"image": ObservationSpec("image", (64, 64, 3), "uint8")}
SMALL = ["+experiment=bc_cartpole", "data_sources.demos.expert.episodes=5", "evaluation.num_envs=5", *QUIET]


def batch_of(observation: dict[str, torch.Tensor], action: torch.Tensor, is_last: torch.Tensor) -> SequenceBatch:
    lead = action.shape[:2]
    no = torch.zeros(lead, dtype=torch.bool)
    return SequenceBatch(observation, action, torch.zeros(lead), no, is_last, no)


def test_squared_error_of_the_deterministic_head() -> None:
    params, action = torch.tensor([[0.3, -0.2]]), torch.tensor([[0.5, 0.1]])
    expected = ((np.tanh(0.3) - 0.5) ** 2 + (np.tanh(-0.2) - 0.1) ** 2) / 2
    assert DeterministicHead(CONTINUOUS).loss(params, action).item() == pytest.approx(expected, rel=1e-5)


def test_likelihood_of_the_gaussian_head() -> None:
    head = GaussianHead(CONTINUOUS, min_std=0.01, init_std=0.1)
    params = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    expected = 2 * (0.5 * (0.2 / 0.1) ** 2 + log(0.1) + 0.5 * log(2 * pi))
    assert head.loss(params, torch.tensor([[0.2, -0.2]])).item() == pytest.approx(expected, rel=1e-4)


def test_likelihood_of_the_mixture_head() -> None:
    """Two modes with weights ¼ and ¾; the density is their sum, not that of the nearest alone."""
    head = MixtureHead(ActionSpec("continuous", (1,)), modes=2, init_std=0.1)
    params = torch.tensor([[0.0, log(3.0), np.arctanh(-0.5), np.arctanh(0.5), 0.0, 0.0]])
    density = [
        weight * np.exp(-0.5 * ((0.4 - mean) / 0.1) ** 2) / (0.1 * np.sqrt(2 * pi))
        for weight, mean in ((0.25, -0.5), (0.75, 0.5))
    ]
    loss = head.loss(params.float(), torch.tensor([[0.4]])).item()
    assert loss == pytest.approx(-log(sum(density)), rel=1e-4)
    torch.manual_seed(0)
    chosen = head.choose(params.float().expand(400, -1), "eval")
    share = (chosen > 0).float().mean().item()
    assert 0.68 < share < 0.82
    assert set(np.round(chosen.unique().tolist(), 3)) == {-0.5, 0.5}  # a mode's mean, without noise


def test_cross_entropy_of_the_categorical_head() -> None:
    head = CategoricalHead(ActionSpec("discrete", (2,), (3, 2)))
    params = torch.tensor([[[0.0, 1.0, 2.0, 0.5, -0.5]]])
    expected = -torch.log_softmax(params[0, 0, :3], 0)[1] - torch.log_softmax(params[0, 0, 3:], 0)[0]
    torch.testing.assert_close(head.loss(params, torch.tensor([[[1, 0]]])), expected.reshape(1, 1))
    assert head.choose(params[0], "eval").tolist() == [[2, 0]]


def test_a_head_refuses_the_other_kind_of_action() -> None:
    with pytest.raises(ConfigError, match="GaussianHead is for continuous actions"):
        BCPolicy(observation=VECTOR, action=ActionSpec("discrete", (1,), (2,)), head="gaussian")
    with pytest.raises(ConfigError, match=r"head='gausian' does not exist. Did you mean 'gaussian'"):
        BCPolicy(observation=VECTOR, action=CONTINUOUS, head="gausian")


def test_last_records_teach_nothing() -> None:
    """An episode's last record has no action: its zero must not be imitated."""
    policy = BCPolicy(observation=VECTOR, action=CONTINUOUS, head="deterministic", units=8, normalize=False)
    observation = {"vector": torch.randn(4, 2, 3)}
    action, is_last = torch.randn(4, 2, 2), torch.tensor([[False, True]] * 4)
    loss, _ = policy.loss(batch_of(observation, action, is_last))
    action[:, 1] += 100.0
    other, _ = policy.loss(batch_of(observation, action, is_last))
    torch.testing.assert_close(loss, other)


@pytest.mark.parametrize("observation", [VECTOR, IMAGE], ids=["vector", "image"])
def test_a_recurrent_policy_acts_as_it_was_trained(observation: dict[str, ObservationSpec]) -> None:
    """Step by step it does what a whole sequence gives, and begins anew after `sequence_length` decisions."""
    torch.manual_seed(0)
    policy = BCPolicy(
        observation=observation,
        action=CONTINUOUS,
        head="deterministic",
        units=8,
        memory=6,
        sequence_length=3,
        depth=2,
        normalize=False,
    )
    ((key, spec),) = observation.items()
    values = torch.randn(2, 6, 3) if spec.kind == "vector" else torch.randint(0, 256, (2, 6, 64, 64, 3)).byte()
    state, chosen = policy.initial_state(2), []
    for time in range(6):
        action, state = policy.act({key: values[:, time].numpy()}, state)
        chosen.append(torch.from_numpy(action))
    for start in (0, 3):
        part = {key: values[:, start : start + 3]}
        no = torch.zeros(2, 3, dtype=torch.bool)
        loss, _ = policy.loss(batch_of(part, torch.stack(chosen[start : start + 3], 1), no))
        assert loss.item() < 1e-10


def test_a_run_clones_the_expert(tmp_path: Path) -> None:
    """From the expert's episodes to an agent that balances; its statistics are the dataset's and come with it."""
    overrides = [*SMALL, "training.phases.0.duration_updates=400", "evaluation.episodes=5", f"run_root={tmp_path}"]
    outcome = run_training([*overrides, "evaluation.final_episodes=5"])
    assert outcome.code == 0
    assert json.loads((outcome.folder / "summary.json").read_text())["eval/return_mean"] > 400
    agent = load(outcome.folder)
    with np.load(outcome.folder / "data" / "demos" / "demonstrations.npz") as file:
        mean = file["observation.vector"].astype(np.float64).mean(0)
    policy = agent.workflow.policy
    np.testing.assert_allclose(policy.normalizer.statistics[0].mean.numpy(), mean, atol=1e-5)


def test_a_run_that_died_goes_on_exactly(tmp_path: Path) -> None:
    """The metrics of the resumed run are those of the run that never stopped."""
    base = [*SMALL, "training.phases.0.duration_updates=60", "logging.every=10", "checkpoint.every=25"]
    base += ["evaluation.episodes=1", "evaluation.final_episodes=1"]
    assert_goes_on_exactly(base, BehaviourCloning, "update", killed_at=42, root=tmp_path)


def test_an_offline_source_cannot_be_collected_into(tmp_path: Path) -> None:
    phases = (
        "training.phases=[{type: online, duration_steps: 10, data_source: demos, workflow_hooks: [collect, update]}]"
    )
    with pytest.raises(ConfigError, match="collects into 'demos', which takes no records"):
        run_training([*SMALL, phases, f"run_root={tmp_path}"])


def test_data_that_are_not_there_leave_no_run_behind(tmp_path: Path) -> None:
    """The message names the source and the file; no folder of a run is left."""
    overrides = ["data_sources.demos.expert=null", f"data_sources.demos.path={tmp_path}/missing.npz"]
    with pytest.raises(ConfigError, match=r"data_sources.demos: .*missing.npz: no such file"):
        run_training([*SMALL, *overrides, f"run_root={tmp_path}/runs"])
    assert not list((tmp_path / "runs").glob("*/*"))
