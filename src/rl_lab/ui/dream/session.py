"""One dream that is being played: the real world and the model fed with the same actions, on a tape that can fork."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from rl_lab.errors import ConfigError
from rl_lab.metrics.imagination_images import unit_images
from rl_lab.records import Fields, Observation
from rl_lab.ui.dream.drivers import Drivers
from rl_lab.ui.dream.model import DreamModel
from rl_lab.ui.dream.painter import ImagePainter, StatePainter, packed, painter_for
from rl_lab.ui.dream.streams import preserved_random, seed_of, stream_of
from rl_lab.ui.dream.tape import Moment, Tape
from rl_lab.ui.dream.worlds import LiveWorld, RecordedWorld, World, go_to

WorldName = Literal["game", "both", "dream"]
MAX_MOMENTS = 6000  # of one tape; a picture of each is kept


@dataclass
class Options:
    """Settings for the next steps: driver, worlds, sliders."""

    planner: str  # own, or one of controllers/planners
    world: WorldName = "both"
    driver: str = "agent"  # you, agent, planner, recorded
    horizon: int = 0  # dreamed steps after which the model looks again; 0: never
    shows_plan: bool = False


class DreamSession:
    """Plays moments. `game`: the model sees every observation. `both`: reality and dream side by side, the model blind
    since the hand-over. `dream`: the model alone.

    Randomness of the model runs in streams that are kept with the moments: going back and acting as before repeats what
    was, and two branches differ by their actions alone.
    """

    def __init__(self, model: DreamModel, *, seed: int | None = None, episode: int = 0, context: int = 5) -> None:
        self.model, self.options = model, Options(planner=model.planners[0])
        self.settings = model.loaded.settings
        self.seed = self.settings.experiment.seed if seed is None else seed
        self.episode, self.context = episode, context
        self.world: World = LiveWorld(self.settings.environment, seed=self.seed, episode=episode)
        self.record: Fields | None = None
        self.painter: ImagePainter | StatePainter | None = None
        self.drivers = Drivers(self)
        self._begin()

    # Beginning --------------------------------------------------------------------------------------------------------

    def restart(self, *, seed: int | None = None, episode: int = 0, record: Fields | None = None) -> None:
        """A new tape: another held-out episode, or one that was recorded."""
        self.world.close()
        self.record, self.episode = record, episode
        self.seed = self.seed if seed is None else seed
        if record is not None:
            self.world = RecordedWorld(record)
        else:
            self.world = LiveWorld(self.settings.environment, seed=self.seed, episode=episode)
        self._begin()

    def _begin(self) -> None:
        self.tape = Tape()
        first = self.world.reset()
        self._place: Moment | None = None  # where the real world stands
        if self.painter is None:
            spec = dict(self.model.workflow.context.observation_spec)
            self.painter = painter_for(self.settings.environment, spec, first.observation)
        with preserved_random():
            torch.manual_seed(self.stream_seed)
            stream = torch.get_rng_state()
        start = self.tape.add(None, None)
        start.real = first
        start.agent_state = self.model.workflow.initial_state(1)
        self._watch(start, None, stream)
        self._look(start)
        self._finish(start)
        self._place = self.current = start

    def change_model(self, model: DreamModel) -> None:
        """Go on with other weights, at the same time of the same branch: its actions are played again."""
        actions, moment = self.current.actions(), self.current
        glances = {one.time for one in moment.path() if one.since == one.time}
        options, self.model = self.options, model
        self._begin()
        self.options = Options(**vars(options))
        for time, action in enumerate(actions, start=1):
            self.options.world = "game" if time in glances else "both"
            self.step(action)
        self.options = options

    @property
    def stream_seed(self) -> int:
        """Seed of the model's random draws from the first observation on."""
        return seed_of(self.seed, self.episode)

    @property
    def natural_rate(self) -> float:
        """Steps a second at which the environment runs in real time, between 10 and 60."""
        metadata = getattr(getattr(self.world, "runner", None), "environment", None)
        frames = (getattr(metadata, "metadata", None) or {}).get("render_fps") or 30
        repeat = self.settings.environment.resolved().action_repeat
        return float(min(60.0, max(10.0, frames / (repeat if isinstance(repeat, int) else 1))))

    # Playing ----------------------------------------------------------------------------------------------------------

    def step(self, action: np.ndarray) -> Moment:
        """Take an action after the current moment, in the worlds that are chosen."""
        parent = self.current
        if len(self.tape) >= MAX_MOMENTS:
            raise ConfigError(f"The tape is full ({MAX_MOMENTS} moments). Begin a new episode.")
        moment = self.tape.add(parent, np.asarray(action))
        moment.driver = self.options.driver
        if self.options.world != "dream":
            self._step_real(moment)
        blind = self.options.world != "game" and parent.time + 1 >= self.context
        if self.options.horizon and parent.time - parent.since >= self.options.horizon:
            blind = False
        if moment.real is not None and not blind:
            self._look(moment)
        else:
            self._dream(moment)
        self._finish(moment)
        self.current = moment
        return moment

    @property
    def can_go_on(self) -> bool:
        """Whether there is a world in which the next action has a consequence."""
        if self.options.world == "game":
            return self.current.real is not None and not self.current.real.has_ended
        return True

    def look_now(self) -> Moment:
        """Open the model's eyes at the current moment: a new moment with the same reality, seen by the model."""
        current = self.current
        if current.real is None or current.belief is None:
            raise ConfigError("There is no reality here to look at: the game ended, or was not played along.")
        twin = self.tape.add(current.parent, current.action)
        twin.time, twin.driver, twin.real = current.time, current.driver, current.real
        twin.belief, twin.belief_random, twin.surprise = current.belief, current.belief_random, current.surprise
        twin.agent_state = current.agent_state
        self._look(twin)
        self._finish(twin)
        self.current = twin
        if self._place is current:
            self._place = twin
        return twin

    def go_back(self, number: int) -> Moment:
        """Make a moment of the tape the current one; the next action begins a branch there."""
        if not 0 <= number < len(self.tape):
            raise ConfigError(f"There is no moment {number} on this tape.")
        self.current = self.tape.moments[number]
        return self.current

    def choose_world(self, name: WorldName) -> None:
        """Hand over. Back in the game, reality first takes the actions that were taken in the dream alone."""
        if name != "dream":
            for moment in self.current.path():
                if moment.real is None and moment.parent is not None:
                    self._step_real(moment)
                    self._measure(moment)
                    self._paint(moment)
        self.options.world = name

    def _step_real(self, moment: Moment) -> None:
        """The real side of a moment, and what the model believes once it has seen it."""
        parent = moment.parent
        assert parent is not None
        assert moment.action is not None
        if parent.real is None or parent.real.has_ended:
            return
        if self._place is not parent and go_to(self.world, parent.actions()) is None:
            return
        seen = self.world.step(moment.action)
        self._place = moment if seen is not None else None
        if seen is None:
            return
        moment.real = seen
        self._watch(moment, parent, parent.belief_random)

    def _watch(self, moment: Moment, parent: Moment | None, stream: torch.Tensor | None) -> None:
        assert moment.real is not None
        previous = None if parent is None else parent.belief
        with stream_of(stream) as now:
            moment.belief = self.model.watch(moment.real.observation, previous, moment.action)
            moment.belief_random = now()
        with preserved_random():
            moment.surprise = self.model.surprise(moment.belief, moment.real.observation)

    def _look(self, moment: Moment) -> None:
        """The dream stands where the model's belief is."""
        assert moment.belief is not None
        moment.dream, moment.dream_random, moment.since = moment.belief.state, moment.belief_random, moment.time

    def _dream(self, moment: Moment) -> None:
        parent = moment.parent
        assert parent is not None
        assert moment.action is not None
        with stream_of(parent.dream_random) as now:
            step = self.model.dream(parent.dream, moment.action)
            moment.dream_random = now()
        moment.dream, moment.since = step.state, parent.since
        moment.dream_reward, moment.continuation = step.reward, step.continuation

    # What is shown ----------------------------------------------------------------------------------------------------

    def _finish(self, moment: Moment) -> None:
        with preserved_random():
            moment.dreamed = self.model.observation(moment.dream)
            moment.value = self.model.value(moment.dream)
        self._measure(moment)
        self._paint(moment)

    def _measure(self, moment: Moment) -> None:
        """Record the dream's distance from reality, beside that of a forecast that nothing changed since the model last
        saw an observation."""
        if moment.real is None:
            return
        last = moment.at(moment.since).real
        moment.error = distance(moment.real.observation, moment.dreamed)
        moment.baseline = None if last is None else distance(moment.real.observation, last.observation)

    def _paint(self, moment: Moment) -> None:
        painter = self.painter
        if moment.real is not None and "real" not in moment.pictures:
            drawn = painter.paint(moment.real.observation) if painter else self._rendered(moment)
            _keep(moment, "real", drawn)
        if painter is not None and moment.dreamed:
            _keep(moment, "dream", painter.paint(moment.dreamed))

    def _rendered(self, moment: Moment) -> np.ndarray | None:
        """The environment's own picture, where it stands at this moment."""
        return self.world.render() if self._place in (moment, None) else None

    def close(self) -> None:
        self.world.close()


def _keep(moment: Moment, name: str, picture: np.ndarray | None) -> None:
    found = packed(picture)
    if found is not None:
        moment.pictures[name] = found


def distance(real: Observation, other: Observation) -> float | None:
    """Mean absolute error of images from 0 to 1, root mean squared error of vectors, averaged over the keys."""
    errors = []
    for key, value in other.items():
        if key not in real or real[key].shape != value.shape:
            continue
        if value.ndim == 3:
            errors.append(float(np.abs(unit_images(value) - unit_images(real[key])).mean()))
        else:
            errors.append(float(np.sqrt(np.square(value.astype(np.float64) - real[key]).mean())))
    return float(np.mean(errors)) if errors else None
