"""A session behind commands: what a browser may ask of a dream, and what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.errors import ConfigError, RLLabError
from rl_lab.ui.dream import episodes
from rl_lab.ui.dream.checks import action_of, number, one_of, whole
from rl_lab.ui.dream.legend import action_legend, observation_names
from rl_lab.ui.dream.messages import header_of, shown, state_of
from rl_lab.ui.dream.model import DreamModel
from rl_lab.ui.dream.plans import plan_message
from rl_lab.ui.dream.session import DreamSession
from rl_lab.ui.dream.tape import Moment
from rl_lab.ui.dream.worker import Message
from rl_lab.ui.run_detail import checkpoints

DRIVERS = ("you", "agent", "planner", "recorded")
WORLDS = ("game", "both", "dream")
GONE = "This run was deleted or renamed."
CHUNK = 400  # moments in a message that brings a newcomer up to date


class Player:
    """Keeps the models of the checkpoints that were looked at, so that the slider stays quick and a run's early worlds
    can be returned to after their checkpoints were pruned."""

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        self.folder, self.trust = folder, trust
        model = DreamModel.load(folder, trust=trust)
        self.models: dict[str, DreamModel] = {model.checkpoint: model}
        self.session = DreamSession(model)
        self.playing, self.fps = False, self.session.natural_rate
        self.idle = "stop"  # what happens while no key is pressed: stop, repeat, agent
        self.held: np.ndarray | None = None
        self.last_held: np.ndarray | None = None
        self.input_id: int | None = None
        self.follows = False
        self.stored: list[episodes.StoredEpisode] = []
        self.known_checkpoints = checkpoints(folder)
        self.spec = model.workflow.context.action_spec
        self.legend = action_legend(self.spec, self.session.world)
        if self.legend["idle"] is not None:
            self.idle = "idle"

    @property
    def model(self) -> DreamModel:
        return self.session.model

    @property
    def is_moving(self) -> bool:
        """Whether time passes by itself now."""
        if not self.playing or not self.session.can_go_on:
            return False
        return self.session.options.driver != "you" or self.held is not None or self.idle != "stop"

    # Talking ----------------------------------------------------------------------------------------------------------

    def greeting(self) -> Iterator[Message]:
        """Everything that a newcomer needs: what can be played, the tape so far, and the present picture."""
        session = self.session
        observation = dict(self.model.workflow.context.observation_spec)
        yield (
            {
                "type": "hello",
                "environment": session.settings.environment.id,
                "legend": self.legend,
                "names": observation_names(observation, session.settings.environment.id),
                "draws": session.painter is not None and self.model.decode is not None,
                "planners": self.model.planners,
                "model": self.model.facts(),
            },
            [],
        )
        yield state_of(self), []
        moments = session.tape.moments
        for start in range(0, len(moments), CHUNK):
            chunk = [header_of(moment) for moment in moments[start : start + CHUNK]]
            yield {"type": "tape", "first": start, "moments": chunk, "last": start + CHUNK >= len(moments)}, []
        yield self._with_pictures(session.current, "frame")

    def command(self, command: dict[str, Any]) -> list[Message]:
        """Carry out one command; what is wrong with it is one line for the page."""
        kind = command.get("type")
        handler = getattr(self, f"_do_{kind}", None) if isinstance(kind, str) else None
        if handler is None:
            return [({"type": "trouble", "text": f"There is no command '{kind}'."}, [])]
        return self._answered(handler(command))

    def advance(self) -> list[Message]:
        """One step of the present driver, if it has something to do."""
        return self._answered(self._advance())

    def _answered(self, messages: Iterator[Message]) -> list[Message]:
        """The messages, or one line on what went wrong: the tape stays, and the dream can be played on."""
        try:
            return list(messages)
        except RLLabError as error:
            text = str(error)
        except OSError as error:  # a run may be deleted, or a disk be full, at any time
            text = f"A file of the run cannot be used: {error.filename or self.folder}: {error.strerror or error}."
        self.playing = False
        return [({"type": "trouble", "text": text}, []), (state_of(self), [])]

    def _advance(self) -> Iterator[Message]:
        session = self.session
        action = session.drivers.choose(self._own_action())
        if action is None:
            self.playing = False
            yield state_of(self), []
            return
        moment = session.step(action)
        session.drivers.remember(moment)
        if session.options.shows_plan:
            yield from self._plan(moment)
        yield self._with_pictures(moment, "moment")
        if moment.real is not None and moment.real.has_ended and session.options.world != "dream":
            self.playing = False
            yield state_of(self), []

    def _own_action(self) -> np.ndarray | None:
        if self.session.options.driver != "you" or self.held is not None:
            return self.held
        if self.idle == "agent":
            return self.session.drivers.agent_action()
        if self.idle == "repeat":
            return self.last_held
        return np.asarray(self.legend["idle"], self.spec.dtype) if self.idle == "idle" else None

    def news(self) -> list[Message]:
        """New checkpoints of a run that is still training; the newest is taken where the dream follows it."""
        found = checkpoints(self.folder)
        if found == self.known_checkpoints:
            return []
        self.known_checkpoints = found
        steps = [name for name in found if name.startswith("step-")]
        messages: list[Message] = []
        if not self.folder.is_dir():
            text = f"{GONE} The dream goes on with the model that it has loaded."
            messages = [({"type": "trouble", "text": text}, []), (state_of(self), [])]
        elif self.follows and steps and steps[-1] != self.model.checkpoint:
            messages = self.command({"type": "checkpoint", "name": steps[-1], "follow": True})
        return messages or [(state_of(self), [])]

    # Commands ---------------------------------------------------------------------------------------------------------

    def _do_hello(self, command: dict[str, Any]) -> Iterator[Message]:
        """Greet one client alone."""
        for header, pictures in self.greeting():
            yield {**header, "client": command.get("client")}, pictures

    def _do_start(self, command: dict[str, Any]) -> Iterator[Message]:
        """A new episode: held-out number `episode` of `seed`, or one of the replay."""
        index = command.get("stored")
        self.playing = False
        self.session.context = whole(command.get("context"), self.session.context, 1, 1000)
        if index is None:
            seed = whole(command.get("seed"), self.session.seed, 0, 2**31)
            self.session.restart(seed=seed, episode=whole(command.get("episode"), 0, 0, 10**6))
            if self.session.options.driver == "recorded":
                self.session.options.driver = "agent"
        else:
            if not isinstance(index, int) or not 0 <= index < len(self.stored):
                raise ConfigError("There is no such replayed episode.")
            keys = list(self.model.workflow.context.observation_spec)
            self.session.restart(record=self.stored[index].read(keys))
            self.session.options.driver = "recorded"
        yield {"type": "cleared"}, []
        if self.session.options.shows_plan:
            yield from self._plan(self.session.current)
        yield self._with_pictures(self.session.current, "moment")
        yield state_of(self), []

    def _do_play(self, command: dict[str, Any]) -> Iterator[Message]:
        self.playing = bool(command.get("on"))
        yield state_of(self), []

    def _do_step(self, command: dict[str, Any]) -> Iterator[Message]:
        """One step now: of the driver, or with an action of the command's own."""
        self.playing = False
        given = action_of(command.get("action"), self.spec)
        if given is not None:
            moment = self.session.step(given)
            if self.session.options.shows_plan:
                yield from self._plan(moment)
            yield self._with_pictures(moment, "moment")
        else:
            yield from self._advance()
        yield state_of(self), []

    def _do_input(self, command: dict[str, Any]) -> Iterator[Message]:
        """The keys that are held now, as an action, or none. Whoever presses one takes over, and time goes on."""
        self.held = action_of(command.get("action"), self.spec)
        if self.held is None:
            return
        self.last_held, self.input_id = self.held, whole(command.get("id"), 0, 0, 2**53)
        if not self.playing or self.session.options.driver != "you":
            self.playing, self.session.options.driver = True, "you"
            yield state_of(self), []

    def _do_goto(self, command: dict[str, Any]) -> Iterator[Message]:
        self.playing = False
        moment = self.session.go_back(whole(command.get("moment"), -1, -1, 10**9))
        yield state_of(self), []
        if self.session.options.shows_plan:
            yield from self._plan(moment)
        yield self._with_pictures(moment, "frame")

    def _do_look(self, command: dict[str, Any]) -> Iterator[Message]:
        """Open the model's eyes."""
        yield self._with_pictures(self.session.look_now(), "moment")
        yield state_of(self), []

    def _do_set(self, command: dict[str, Any]) -> Iterator[Message]:
        """Any of world, driver, planner, horizon, temperature, member, fps, idle, plan."""
        options, simulator = self.session.options, self.model.simulator
        options.driver = one_of(command.get("driver", options.driver), DRIVERS, "driver")
        options.planner = one_of(command.get("planner", options.planner), self.model.planners, "planner")
        options.horizon = whole(command.get("horizon"), options.horizon, 0, 10**6)
        self.idle = one_of(command.get("idle", self.idle), ("stop", "repeat", "agent", "idle"), "idle")
        self.fps = float(number(command.get("fps"), self.fps, 1.0, 120.0))
        simulator.temperature = number(command.get("temperature"), simulator.temperature, 0.0, 5.0)
        if "member" in command:
            member = command["member"]
            simulator.member = None if member is None else whole(member, 0, 0, max(0, simulator.members - 1))
        if "world" in command:
            self.session.choose_world(one_of(command["world"], WORLDS, "world"))  # type: ignore[arg-type]
            yield self._with_pictures(self.session.current, "update")
        if "plan" in command:
            options.shows_plan = bool(command["plan"])
        if options.shows_plan and ("plan" in command or "planner" in command):
            yield from self._plan(self.session.current)
        yield state_of(self), []

    def _do_checkpoint(self, command: dict[str, Any]) -> Iterator[Message]:
        """Dream with the weights of another checkpoint: the current moment's past is seen anew with them."""
        self.follows = bool(command.get("follow", False))
        name = str(command.get("name") or self.model.checkpoint)
        if name != self.model.checkpoint:
            if name not in self.models:
                if name not in checkpoints(self.folder):
                    raise ConfigError(f"There is no checkpoint '{name}' any more.")
                self.models[name] = DreamModel.load(self.folder / "checkpoints" / name, trust=self.trust)
            simulator, other = self.model.simulator, self.models[name].simulator
            other.temperature, other.member = simulator.temperature, simulator.member
            self.session.change_model(self.models[name])
            yield {"type": "cleared"}, []
            yield from self.greeting()
        yield state_of(self), []

    def _do_episodes(self, command: dict[str, Any]) -> Iterator[Message]:
        """The replayed episodes to begin from."""
        place = self.folder / "checkpoints"
        steps = [name for name in checkpoints(self.folder) if name.startswith("step-")]
        own = self.model.checkpoint
        self.stored = episodes.stored_episodes(place / (own if own in steps else steps[-1])) if steps else []
        yield {"type": "episodes", "labels": [episode.label for episode in self.stored]}, []

    def _do_record(self, command: dict[str, Any]) -> Iterator[Message]:
        """Write the branch that ends at the current moment as an episode of a dataset."""
        if not self.folder.is_dir():
            raise ConfigError(f"{GONE} There is no place for a recording.")
        yield (
            episodes.record(
                self.folder,
                self.session.current,
                self.model,
                world="dream" if command.get("world") == "dream" else "game",
                seed=self.session.seed,
            ),
            [],
        )

    # Messages ---------------------------------------------------------------------------------------------------------

    def _plan(self, moment: Moment) -> Iterator[Message]:
        with self.session.drivers.acting_random():
            state = self.session.drivers.state_to_plan_from(moment)
            yield plan_message(self.model, state, moment, self.session.options.planner, self.session.painter)

    def _with_pictures(self, moment: Moment, kind: str) -> Message:
        """A moment with its pictures; the newest key press that it answers goes with it."""
        header, pictures = shown(moment, kind)
        if self.input_id is not None:
            header["input"], self.input_id = self.input_id, None
        return header, pictures
