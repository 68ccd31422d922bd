"""World Models: the order of its phases, what each of them does, and exact resume."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from world_models_runs import TINY

from rl_lab.errors import ConfigError
from rl_lab.experiment.agent import load
from rl_lab.experiment.build import build
from rl_lab.experiment.model import build_model
from rl_lab.experiment.prepare import prepare
from rl_lab.experiment.results import phase_ends
from rl_lab.experiment.train import run_training
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.records import BatchSpec
from rl_lab.workflows.context import PhaseSteps, PhaseView
from rl_lab.workflows.world_models import WorldModels
from rl_lab.workflows.world_models_codes import LOG_VARIANCE, MEAN


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outcome = run_training([*TINY, "checkpoint.every=1000", f"run_root={tmp_path_factory.mktemp('wm')}"])
    assert outcome.code == 0
    return outcome.folder


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_all_phases_leave_their_traces(run: Path) -> None:
    """V, M, the quality of M and every generation are logged; env steps of evolution count, those of a dream do not."""
    logged = rows(run)
    assert {"train/loss/v_reconstruction", "train/loss/m_latent", "train/loss/m_terminal"} <= {
        k for row in logged for k in row
    }
    assert next(row for row in logged if "workflow/m_share_better" in row)["phase"] == "assess"
    generations = [row for row in logged if "workflow/fitness_mean" in row]
    assert [(row["phase"], row["workflow/generation"]) for row in generations] == [
        ("dream", 1),
        ("dream", 2),
        ("C", 1),
        ("C", 2),
    ]
    assert generations[1]["env_steps"] == 120  # the dream took none
    assert generations[3]["env_steps"] > generations[2]["env_steps"] > 120 + 4 * 2 * 8
    assert any("eval/return_mean" in row for row in logged)
    ends = phase_ends(logged)
    assert 1 <= ends["dream"]["workflow/dream_return_mean"] <= 10  # its horizon; each step pays about 1
    assert {"train/loss/v_kl", "train/loss/v_reconstruction"} <= ends["V"].keys()
    names = ("picture.png", "reconstructions.png", "samples.png", "traversals.png", "dream.png", "dream.mp4")
    assert all((run / "imagination" / name).is_file() for name in names)
    report = (run / "report.html").read_text()
    assert all(f"<h2>{title}</h2>" in report for title in ("V and M", "Evolution", "What the model sees"))
    assert all(text in report for text in ("V: squared error of an image", "Share of entries", "return in its dream"))


def test_the_agent_of_a_run_acts(run: Path) -> None:
    """With its mean solution, and with memory."""
    agent = load(run)
    assert agent.workflow.policy.vector.any()
    state = agent.initial_state()
    frame = np.zeros(agent.observation_space.shape if agent.observation_space.shape else (), np.uint8)
    observation = {"image": np.zeros((400, 600, 3), np.uint8)} if not frame.shape else frame
    action, state = agent.act(observation, state)
    assert agent.action_space.contains(action)
    assert state.state["hidden"].any()


class Death(BaseException):
    """As sudden as a kill: nothing is saved."""


QUICK = (*TINY, "evaluation.imagination=false", "checkpoint.every=3")


def comparable(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "wall_s" and not k.startswith("time/")} for row in rows(run)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_lab.metrics.report.write_report", lambda folder: folder / "report.html")
        return comparable(run_training([*QUICK, f"run_root={tmp_path_factory.mktemp('whole')}"]).folder)


LONG = pytest.mark.learning


@pytest.mark.parametrize(
    ("method", "call"),
    [
        pytest.param("collect_step", 40, id="collect", marks=LONG),
        pytest.param("update_world_model", 4, id="V", marks=LONG),
        pytest.param("encode", 2, id="encode"),
        pytest.param("update_world_model", 10, id="M", marks=LONG),
        pytest.param("evolve", 2, id="dream", marks=LONG),
        pytest.param("evolve", 5, id="within a generation"),
    ],
)
def test_a_run_that_died_in_any_phase_goes_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: list[dict[str, Any]], method: str, call: int
) -> None:
    """Same rows as the run that lived, also when it died between two waves of a generation."""
    monkeypatch.setattr("rl_lab.metrics.report.write_report", lambda folder: folder / "report.html")
    original, calls = getattr(WorldModels, method), []

    def dies(self: WorldModels, *arguments: Any, **options: Any) -> Any:
        calls.append(self)
        if len(calls) == call:
            raise Death
        return original(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(WorldModels, method, dies)
        with pytest.raises(Death):
            run_training([*QUICK, f"run_root={tmp_path}"])
    dead = next(tmp_path.glob("*/*/run.json")).parent
    assert run_training([f"training.resume_path={dead}", "logging.console=off"]).code == 0
    assert comparable(dead) == uninterrupted


KILLED = """
import os, signal, sys
from rl_lab.experiment.train import run_training
from rl_lab.workflows.world_models import WorldModels

method, left, original = sys.argv[1], [int(sys.argv[2])], getattr(WorldModels, sys.argv[1])

def killed(self, *arguments, **options):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, *arguments, **options)

setattr(WorldModels, method, killed)
run_training(sys.argv[3:])
"""


@LONG
def test_one_run_killed_in_every_phase_goes_on_exactly(tmp_path: Path, uninterrupted: list[dict[str, Any]]) -> None:
    """By SIGKILL: while it collects, trains V, encodes, trains M, dreams, and twice between waves of a generation."""
    overrides = [*QUICK, f"run_root={tmp_path}"]
    moments = [
        ("collect_step", 40), ("update_world_model", 4), ("encode", 2), ("update_world_model", 4), ("evolve", 2),
        ("evolve", 4), ("evolve", 2),
    ]  # fmt: skip
    for method, call in moments:
        command = [sys.executable, "-c", KILLED, method, str(call), *overrides]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
        dead = next(tmp_path.glob("*/*/run.json")).parent
        overrides = [f"training.resume_path={dead}", "logging.console=off"]
    assert run_training(overrides).code == 0
    assert comparable(dead) == uninterrupted


@pytest.fixture
def workflow(tmp_path: Path) -> Any:
    """Bound to a run that has done nothing yet."""
    experiment = build(prepare([*TINY, f"run_root={tmp_path}"]), RunDirectory.create(tmp_path, "tiny", 0))
    yield experiment.orchestrator.workflow
    experiment.orchestrator.close()


def view(**options: Any) -> PhaseView:
    return PhaseView("phase", "offline", "replay", None, options)


def fill(workflow: WorldModels, decisions: int = 60) -> Any:
    source = workflow.context.data_sources["replay"]
    for step in range(decisions):
        result = workflow.collect_step(step, phase=PhaseView("collect", "warmup", "replay", "explorer"))
        for block in result.blocks:
            source.add(block)
    return source


def test_encode_writes_the_code_of_every_frame_once(workflow: WorldModels) -> None:
    """In parts; the stored codes are those of V, and the first frames of the episodes are kept for dreams."""
    source = fill(workflow)
    calls = 0
    while not workflow.encode(phase=view()).finished:
        calls += 1
    assert calls == len(source) // 50
    stored = source.scan(start=0, count=1000, fields=["observation.image", MEAN, LOG_VARIANCE, "is_first"]).fields
    with torch.no_grad():
        expected = workflow.representation.encode({"image": torch.from_numpy(stored["observation.image"])})
    np.testing.assert_allclose(stored[MEAN].astype(np.float32), expected.mean, atol=2e-3)
    np.testing.assert_allclose(stored[LOG_VARIANCE].astype(np.float32), expected.log_variance, atol=2e-3)
    assert len(workflow.codes.starts.mean) == stored["is_first"].sum()


def test_the_loss_of_m_looks_one_step_ahead_and_not_across_episodes(workflow: WorldModels) -> None:
    """Against a loop over single steps; a successor in another episode does not count."""
    source = fill(workflow)
    while not workflow.encode(phase=view()).finished:
        pass
    batch = source.sample(BatchSpec(3, 30, fields=(MEAN, LOG_VARIANCE)))
    assert batch.is_last.any()
    torch.manual_seed(0)
    losses = workflow.memory_losses(batch)
    torch.manual_seed(0)
    latent, action = workflow.codes.of(batch).sample(), workflow.codec.encode(batch.action)
    total, reward_error, count = 0.0, 0.0, 0
    for b in range(3):
        memory = workflow.dynamics.initial(1)
        for t in range(29):
            if batch.is_first[b, t]:
                memory = workflow.dynamics.initial(1)
            memory = workflow.dynamics.step(latent[b : b + 1, t], action[b : b + 1, t], memory)
            if not batch.is_last[b, t]:
                prediction = workflow.dynamics.predict(memory.hidden)
                total -= prediction.latent.log_prob(latent[b : b + 1, t + 1]).mean()
                reward_error += 0.5 * (prediction.reward - batch.reward[b, t + 1]) ** 2
                count += 1
    torch.testing.assert_close(losses["latent"], total / count)
    torch.testing.assert_close(losses["reward"], (reward_error / count).squeeze())


def test_a_batched_generation_is_what_its_members_play_one_by_one(workflow: WorldModels) -> None:
    """All members of a generation meet the same episodes; batching changes nothing but the time it takes."""
    vectors = torch.randn(4, workflow.policy.size)
    play = partial(workflow.game.play, vectors, generation=0)
    together = [play(np.array([m]), np.array([0])).returns[0] for m in range(4)]
    parts = [play(np.arange(start, min(start + 3, 4)), np.zeros(min(3, 4 - start), int)) for start in (0, 3)]
    np.testing.assert_array_equal(together, np.concatenate([part.returns for part in parts]))


def test_car_racing_has_the_published_sizes() -> None:
    """V, M with PyTorch's second bias, and C, as the experiment builds them."""
    pytest.importorskip("Box2D")
    model = build_model(prepare(["+experiment=og_wm_carracing"]).config, torch.device("cpu"))
    assert model.parameters == {"representation": 4_348_547, "dynamics": 422_368 + 1_024, "policy": 867}


@pytest.mark.learning
def test_a_population_in_one_batch_is_at_least_five_times_as_fast(tmp_path: Path) -> None:
    """32 members × 4 episodes of CartPole, in CPU time of this process, against one episode after the other."""
    members, episodes = np.divmod(np.arange(128), 4)
    seconds = {}
    for count in (128, 1):
        overrides = ["+experiment=world_models_state", f"workflow.evolution_envs={count}", "logging.console=off"]
        folder = tmp_path / str(count)
        experiment = build(prepare([*overrides, f"run_root={folder}"]), RunDirectory.create(folder, "tiny", 0))
        workflow: Any = experiment.orchestrator.workflow
        vectors = torch.randn(32, workflow.policy.size, generator=torch.Generator().manual_seed(0))
        assert workflow.game.envs
        began, returns = time.process_time(), []
        for start in range(0, 128, count):
            part = slice(start, start + count)
            returns.append(workflow.game.play(vectors, members[part], episodes[part], generation=0).returns)
        seconds[count] = time.process_time() - began
        experiment.orchestrator.close()
    assert seconds[1] >= 5.0 * seconds[128], seconds


def steps(*phases: tuple[str, dict[str, Any]]) -> list[PhaseSteps]:
    return [PhaseSteps(f"training.phases[{i}]", f"p{i}", (hook,), options) for i, (hook, options) in enumerate(phases)]


COLLECT, V, ENCODE = ("collect", {}), ("update_world_model", {"model": "V"}), ("encode", {})
M, EVOLVE = ("update_world_model", {"model": "M"}), ("evolve", {})


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([COLLECT, V, ENCODE, EVOLVE], "no phase before it has trained it"),
        ([COLLECT, V, M, EVOLVE], "no phase has encoded"),
        ([COLLECT, V, ENCODE, COLLECT, M], "no phase has encoded"),
        ([COLLECT, ("update_world_model", {})], "options.model is None"),
        ([COLLECT, V, ENCODE, ("evolve", {"dream": True})], "plays inside M"),
        ([COLLECT, V, ENCODE, ("evaluate_dream", {})], "plays inside M"),
        ([COLLECT, ("evolve", {"dreams": True})], "Did you mean 'dream'"),
        ([COLLECT, V, ENCODE, M, ("evolve", {"dream": 1})], "dream must be true or false, got 1"),
        ([COLLECT, V, ENCODE, M, ("evolve", {"temperature": "hot"})], "at least 0, got 'hot'"),
        ([COLLECT, V, ENCODE, M, ("evolve", {"episodes": 0.5})], "at least 1, got 0.5"),
    ],
)  # fmt: skip
def test_an_order_that_cannot_work_is_refused(phases: list[tuple[str, dict[str, Any]]], message: str) -> None:
    """Before anything is built; the control with a random memory has to be asked for."""
    with pytest.raises(ConfigError, match=message):
        WorldModels().check_phases(steps(*phases))


def test_orders_that_work() -> None:
    """The paper's, the iterated one, and the control with an untrained memory."""
    WorldModels().check_phases(steps(COLLECT, V, ENCODE, M, EVOLVE, COLLECT, ENCODE, M, EVOLVE))
    WorldModels().check_phases(steps(COLLECT, V, ("evolve", {"untrained": True})))


def test_bad_input_is_one_clear_line(rl_lab: Any) -> None:
    """Vectors for a VAE, a population of one, a disk that cannot hold the collection."""
    for overrides, words in (
        (["environment.observation=state"], "representation=identity"),
        (["environment.image_size=84"], "environment.image_size=64"),
        (["controllers.evolution.population=1"], "at least 2"),
        (["components.dynamics.reward=false", "components.dynamics.terminal=false"], "all controllers look alike"),
        (["data_sources.replay.capacity=1_000_000_000"], "are free. Lower data_sources.replay.capacity"),
    ):
        code, _, error = rl_lab("train", *TINY, *overrides)
        assert code != 0
        assert words in error
        assert "Traceback" not in error
