"""The dream: lockstep with reality, forks, hand-overs, recordings, and what a page may ask of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_lab.environments import make_vector_env
from rl_lab.errors import ConfigError, RLLabError
from rl_lab.experiment.imagination import batch_of, play_episodes
from rl_lab.ui.dream.episodes import episode_of, stored_episodes
from rl_lab.ui.dream.hub import BEHIND, Client, Dream, framed
from rl_lab.ui.dream.messages import header_of
from rl_lab.ui.dream.model import DreamModel
from rl_lab.ui.dream.painter import ImagePainter
from rl_lab.ui.dream.player import Player
from rl_lab.ui.dream.session import DreamSession, distance

CONTEXT, STEPS = 3, 7


@pytest.fixture(scope="module")
def model(dreamer_run: Path) -> DreamModel:
    return DreamModel.load(dreamer_run)


@pytest.fixture
def session(model: DreamModel) -> DreamSession:
    model.simulator.temperature = 1.0
    return DreamSession(model, context=CONTEXT)


@pytest.fixture
def player(dreamer_run: Path, tmp_path: Path) -> Player:
    folder = tmp_path / "run"
    shutil.copytree(dreamer_run, folder, symlinks=True)
    return Player(folder)


def play(session: DreamSession, actions: list[int]) -> None:
    for action in actions:
        session.step(np.array([action], np.int32))


def test_the_real_pane_repeats_a_recorded_episode_and_the_dream_is_what_imagine_draws(model: DreamModel) -> None:
    """Fed with the actions of an episode that `rl-lab imagine` plays, from the same seed."""
    envs = make_vector_env(model.loaded.settings.environment, seed=0, num_envs=1, stream="final")
    episode = play_episodes(model.workflow, envs, STEPS)[0]
    envs.close()
    session = DreamSession(model, seed=0, context=CONTEXT)
    start = session.tape.moments[0]
    assert start.belief_random is not None

    for record in episode[: STEPS - 1]:
        session.step(record["action"])
    path = session.current.path()
    for record, moment in zip(episode, path, strict=True):
        assert moment.real is not None
        np.testing.assert_array_equal(moment.real.observation["vector"], record["observation.vector"])
        assert moment.real.reward == record["reward"]

    with torch.no_grad():
        torch.manual_seed(session.stream_seed)
        rollout = model.workflow.imagine(batch_of([episode], STEPS, model.device), context=CONTEXT)
    for time, moment in enumerate(path):
        np.testing.assert_allclose(moment.dreamed["vector"], rollout.imagined["vector"][0, time], atol=1e-5)
        if time >= CONTEXT:
            assert moment.dream_reward == pytest.approx(rollout.imagined_reward[0, time], abs=1e-5)


def test_a_fork_leaves_the_first_branch_as_it_was_and_the_same_actions_repeat_it(session: DreamSession) -> None:
    play(session, [0, 1, 0, 1, 1, 0])
    first = [moment.dreamed["vector"].copy() for moment in session.current.path()]
    last = session.current
    session.go_back(3)
    play(session, [0, 0, 0])
    assert session.current.parent is not None
    other = session.current
    assert not np.allclose(other.dreamed["vector"], first[6])
    for moment, before in zip(last.path(), first, strict=True):
        np.testing.assert_array_equal(moment.dreamed["vector"], before)
    session.go_back(3)
    play(session, [1, 1, 0])
    for moment, before in zip(session.current.path(), first, strict=True):
        np.testing.assert_array_equal(moment.dreamed["vector"], before)
        assert moment.real is not None
    assert len(session.tape.leaves()) == 3


def test_reality_follows_a_fork(session: DreamSession) -> None:
    """After going back, the environment is where it was: both branches of reality come from the same moment."""
    play(session, [0, 1, 0, 1])
    before = session.current.real
    assert before is not None
    session.go_back(2)
    play(session, [1, 1])
    session.go_back(2)
    play(session, [0, 1])
    again = session.current.real
    assert again is not None
    np.testing.assert_array_equal(again.observation["vector"], before.observation["vector"])


def test_hand_over_and_back(session: DreamSession) -> None:
    """In the dream reality rests; back in the game it takes the dreamed actions first."""
    play(session, [0, 1, 0])
    session.choose_world("dream")
    play(session, [1, 0])
    assert session.current.real is None
    session.choose_world("both")
    straight = DreamSession(session.model, context=CONTEXT)
    play(straight, [0, 1, 0, 1, 0])
    assert session.current.real is not None
    assert straight.current.real is not None
    np.testing.assert_array_equal(
        session.current.real.observation["vector"], straight.current.real.observation["vector"]
    )
    assert session.current.error is not None


def test_eyes(session: DreamSession) -> None:
    """Up to the context the model looks; then it is blind, until it is let look, or the horizon says so."""
    play(session, [0, 1, 0, 1])
    assert [moment.since for moment in session.current.path()] == [0, 1, 2, 2, 2]
    looked = session.look_now()
    assert looked.since == looked.time == 4
    session.options.horizon = 2
    play(session, [0, 1, 0])
    assert [moment.since for moment in session.current.path()[-3:]] == [4, 4, 7]
    session.options.world = "game"
    play(session, [1])
    assert session.current.since == session.current.time


def test_temperature_zero_is_the_likeliest_latent(session: DreamSession) -> None:
    session.model.simulator.temperature = 0.0
    play(session, [0, 1, 0, 1, 0])
    first = session.current.dreamed["vector"]
    session.go_back(2)
    stream = session.current.dream_random
    session.current.dream_random = torch.get_rng_state()
    play(session, [0, 1, 0])
    np.testing.assert_array_equal(session.current.dreamed["vector"], first)
    assert not torch.equal(stream, session.tape.moments[2].dream_random)


@pytest.mark.parametrize("driver", ["agent", "planner"])
def test_drivers_act_in_both_worlds(session: DreamSession, driver: str) -> None:
    session.options.driver, session.options.planner = driver, "cem"
    for world in ("both", "dream", "game"):
        session.choose_world(world)  # type: ignore[arg-type]
        action = session.drivers.choose(None)
        assert action is not None
        session.drivers.remember(session.step(action))
        assert session.current.driver == driver


def test_the_agent_acts_as_in_an_evaluation(model: DreamModel) -> None:
    """Its memory follows the episode, whether it drove all the time or takes over."""
    session = DreamSession(model, context=CONTEXT)
    session.options.driver = "agent"
    for _ in range(4):
        action = session.drivers.choose(None)
        assert action is not None
        session.drivers.remember(session.step(action))
    late = DreamSession(model, context=CONTEXT)
    for action in session.current.actions():
        late.step(action)
    late.options.driver = "agent"
    state = late.current
    assert np.array_equal(late.drivers.choose(None), session.drivers.choose(None))
    assert state.agent_state is not None
    assert session.current.agent_state is not None
    torch.testing.assert_close(state.agent_state["action"], session.current.agent_state["action"])


def test_any_planner_can_take_over_from_any_other(player: Player) -> None:
    """Also where one keeps its last plan in another form; a tree search shows its tree, the others their candidates."""
    player.command({"type": "set", "driver": "planner", "plan": True})
    for name in player.model.planners:
        for world in ("both", "dream"):
            player.command({"type": "set", "world": world, "planner": name})
            messages = [header for header, _ in player.advance()]
            assert [header.get("text") for header in messages if header["type"] == "trouble"] == []
            [plan] = [header for header in messages if header["type"] == "plan"]
            assert ("tree" in plan) == (name == "mcts")
            assert {len(path) for path in plan["paths"]["reward so far"]} == {plan["horizon"] + 1}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_decoded_images_are_shown_and_measured_in_their_units(
    model: DreamModel, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Some decoders give bytes, others numbers from 0 to 1."""
    grey = torch.full((1, 8, 8, 3), 51 if dtype == torch.uint8 else 0.2, dtype=dtype)
    monkeypatch.setattr(model, "decode", lambda state: {"image": grey})
    dreamed = model.observation(None)
    shown = ImagePainter("image").paint(dreamed)
    assert shown is not None
    assert shown.dtype == np.uint8
    np.testing.assert_allclose(shown, 51, atol=1)
    assert distance({"image": np.full((8, 8, 3), 51, np.uint8)}, dreamed) == pytest.approx(0.0, abs=2e-3)


@pytest.mark.parametrize("world", ["game", "dream"])
def test_a_branch_is_an_episode_in_the_layout_of_records(session: DreamSession, world: str) -> None:
    play(session, [0, 1, 0, 1, 1])
    context = session.model.workflow.context
    fields = episode_of(session.current, world, dict(context.observation_spec), context.action_spec)
    assert {len(value) for value in fields.values()} == {6}
    assert fields["action"][:, 0].tolist() == [0, 1, 0, 1, 1, 0]
    assert fields["is_first"].tolist() == [True, *[False] * 5]
    assert fields["is_last"].tolist() == [*[False] * 5, True]
    assert fields["observation.vector"].dtype == np.float32
    assert fields["reward"][0] == 0.0
    path = session.current.path()
    assert path[5].real is not None
    expected = path[5].dreamed if world == "dream" else path[5].real.observation
    np.testing.assert_array_equal(fields["observation.vector"][5], expected["vector"])


def test_a_recorded_dream_trains_behaviour_cloning_by_one_command(
    player: Player, rl_lab: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    for _ in range(2):
        player.command({"type": "start", "episode": 1})
        for action in (0, 1, 0, 1, 1, 0, 1, 0):
            player.command({"type": "step", "action": [action]})
        [(recorded, _)] = player.command({"type": "record", "world": "dream"})
    assert recorded["records"] == 9
    command = recorded["command"].split()[1:]
    small = ["training.phases.0.duration_updates=5", "evaluation.episodes=1", "evaluation.final_episodes=1",
             "logging.console=off", "logging.tensorboard=false", "evaluation.video=false",
             f"run_root={tmp_path}"]  # fmt: skip
    code, _, err = rl_lab(*command, *small)
    assert code == 0, err


def test_replayed_episodes_are_whole_and_drive_the_dream(player: Player) -> None:
    [(listed, _)] = player.command({"type": "episodes"})
    assert listed["labels"]
    stored = player.stored[0]
    record = stored.read(["vector"])
    assert record["is_first"].tolist() == [True, *[False] * (len(record["is_first"]) - 1)]
    assert record["is_last"].sum() == 1
    player.command({"type": "start", "stored": 0})
    player.command({"type": "play", "on": True})
    for _ in range(len(record["action"])):
        player.advance()
    assert player.session.current.time == len(record["action"]) - 1
    real = player.session.current.real
    assert real is not None
    np.testing.assert_array_equal(real.observation["vector"], record["observation.vector"][-1])


def test_after_a_record_the_agent_drives_again(player: Player) -> None:
    """A held-out episode has no recorded actions."""
    player.command({"type": "episodes"})
    player.command({"type": "start", "stored": 0})
    assert player.session.options.driver == "recorded"
    player.command({"type": "start", "episode": 2})
    player.command({"type": "play", "on": True})
    assert [header["type"] for header, _ in player.advance()] == ["moment"]
    assert player.session.current.driver == "agent"


def test_a_run_that_is_deleted_while_it_is_dreamed_is_one_line(player: Player) -> None:
    """The dream can be played on, and nothing is written where the run was."""
    player.command({"type": "step", "action": [1]})
    shutil.rmtree(player.folder)
    news = [header for header, _ in player.news()]
    assert "deleted or renamed" in news[0]["text"]
    assert player.news() == []
    for command in ({"type": "record", "world": "dream"}, {"type": "checkpoint", "name": "step-1"}):
        header, _ = player.command(command)[0]
        assert header["type"] == "trouble"
        assert "\n" not in header["text"]
    assert not player.folder.exists()
    moments = [
        header["id"] for header, _ in player.command({"type": "step", "action": [0]}) if header["type"] == "moment"
    ]
    assert moments == [2]


def test_a_file_that_is_gone_is_one_line(player: Player) -> None:
    """A training prunes its checkpoints, and the replays in them, while their episodes are offered."""
    player.command({"type": "episodes"})
    shutil.rmtree(player.stored[0].folder)
    header, _ = player.command({"type": "start", "stored": 0})[0]
    assert header["type"] == "trouble"
    assert "No such file" in header["text"]


def test_a_hostile_run_executes_nothing(dreamer_run: Path, tmp_path: Path) -> None:
    """Neither a pickle in place of the weights nor a class of the configuration is run."""
    marker = tmp_path / "owned"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(marker),)

    for name in ("pickle", "config"):
        folder = tmp_path / name
        shutil.copytree(dreamer_run, folder, symlinks=True)
        if name == "pickle":
            for path in folder.glob("checkpoints/*/agent.pt"):
                torch.save(Payload(), path)
        else:
            text = (folder / "config.yaml").read_text().replace("rl_lab.workflows.dreamer_v3.DreamerV3", "os.mkdir")
            (folder / "config.yaml").write_text(text.replace("batch_size:", f"path: {marker}\n  batch_size:", 1))
        with pytest.raises(RLLabError):
            DreamModel.load(folder)
    assert not marker.exists()


def test_a_checkpoint_without_replay_offers_no_episodes(tmp_path: Path) -> None:
    assert stored_episodes(tmp_path) == []
    (tmp_path / "training.pt").write_bytes(b"broken")
    assert stored_episodes(tmp_path) == []


def test_commands_that_make_no_sense_are_one_line(player: Player) -> None:
    for command in ({"type": "__init__"}, {"type": None}, {}, {"type": "goto", "moment": 99},
                    {"type": "set", "driver": "x"},
                    {"type": "step", "action": [float("nan")]}, {"type": "step", "action": ["a"]},
                    {"type": "checkpoint", "name": "../../etc"}, {"type": "start", "stored": 5},
                    {"type": "record"}):  # fmt: skip
        header, _ = player.command(command)[0]
        assert header["type"] == "trouble", command
        assert "\n" not in header["text"]


def test_checkpoints_show_the_same_moments_with_other_weights(player: Player) -> None:
    place = player.folder / "checkpoints"
    shutil.copytree(place / player.model.checkpoint, place / "step-7")
    [(state, _)] = player.news()
    assert state["checkpoints"][0] == "step-7"
    for action in (0, 1, 0, 1):
        player.command({"type": "step", "action": [action]})
    other = "step-7"
    player.command({"type": "set", "temperature": 0.5})
    messages = player.command({"type": "checkpoint", "name": other})
    assert messages[0][0]["type"] == "cleared"
    assert player.model.checkpoint == other
    assert player.model.simulator.temperature == 0.5
    assert player.session.current.time == 4
    assert [int(action[0]) for action in player.session.current.actions()] == [0, 1, 0, 1]


def test_a_newcomer_is_told_everything(player: Player) -> None:
    for action in (0, 1):
        player.command({"type": "step", "action": [action]})
    messages = player.command({"type": "hello", "client": 7})
    assert all(header["client"] == 7 for header, _ in messages)
    assert [header["type"] for header, _ in messages] == ["hello", "state", "tape", "frame"]
    header, pictures = messages[-1]
    assert set(header["pictures"]) == {"real", "dream"}
    assert framed(header, pictures)[4:5] == b"{"


def test_a_model_that_is_not_finite_can_be_sent(session: DreamSession) -> None:
    """A browser reads no NaN in JSON: such a number is left out, and the rest is shown."""
    play(session, [0])
    moment = session.current
    assert moment.real is not None
    moment.dream_reward = moment.continuation = moment.value = float("nan")
    moment.real = replace(moment.real, reward=float("inf"))
    sent = json.loads(json.dumps(header_of(moment), allow_nan=False))
    assert sent["dream_reward"] is sent["continuation"] is sent["real"]["reward"] is None


def test_a_slow_browser_is_sent_numbers_and_the_others_their_pictures() -> None:
    dream = object.__new__(Dream)
    slow, quick = Client(1), Client(2)
    dream.clients = {1: slow, 2: quick}
    for _ in range(BEHIND + 1):
        slow.queue.put_nowait(({"type": "moment"}, []))
    dream._deliver(({"type": "moment", "id": 3, "pictures": {"real": {"kind": "jpeg"}}}, [b"picture"]))
    last = [slow.queue.get_nowait() for _ in range(slow.queue.qsize())][-1]
    assert last == ({"type": "moment", "id": 3}, [])
    received = quick.queue.get_nowait()
    assert received is not None
    assert framed(*received).endswith(b"picture")


def test_a_run_without_a_model_says_so(random_run: Path) -> None:
    with pytest.raises(ConfigError, match="no world model"):
        DreamModel.load(random_run)
