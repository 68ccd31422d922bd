"""A run's model as a dream needs it: watching, dreaming, decoding, values, and whoever chooses actions in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from rl_lab.components.actions import ActionCodec
from rl_lab.components.decoders import ObservationModel
from rl_lab.components.frame_stack import FrameStack
from rl_lab.components.planners.base import Plan, Planner
from rl_lab.errors import ConfigError
from rl_lab.experiment.agent import PLANNERS, LoadedRun, load_run
from rl_lab.experiment.config import compose_option, resolve
from rl_lab.experiment.device import set_threads
from rl_lab.experiment.parts import PartBuilder
from rl_lab.records import Observation
from rl_lab.simulation.simulator import ModelState, Simulator

SAMPLED_ACTIONS = 8  # edges of a node of a tree search where actions are not one discrete choice

PlanMemory = tuple[str, Mapping[str, Tensor]]  # the planner's name, and what it keeps from one decision to the next
Decode = Callable[[ModelState], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Dreamed:
    """A step of the model: its state, and what it says of it."""

    state: ModelState
    reward: float
    continuation: float


class Belief(NamedTuple):
    """The model's state with every observation seen, and the frames that it sees together, where it stacks some."""

    state: ModelState
    frames: Mapping[str, Tensor]


class DreamModel:
    """The simulator of a loaded run, one environment wide. Whatever it draws comes from torch's global stream."""

    def __init__(self, loaded: LoadedRun, *, trust: bool = False) -> None:
        self.trust = trust
        self.loaded, self.workflow = loaded, loaded.workflow
        self.simulator = simulator_of(loaded)
        self.codec = ActionCodec(self.workflow.context.action_spec)
        self.device = self.workflow.context.device
        self.decode = decoder_of(loaded, self.simulator)
        stack = self.workflow.context.components.get("frame_stack")
        self.frames = stack if isinstance(stack, FrameStack) and stack.depth > 1 else None
        self._planners: dict[str, Planner] = {}

    @classmethod
    def load(cls, path: Path, *, trust: bool = False) -> DreamModel:
        """The model of a run directory or of one of its checkpoints, from its own configuration. It dreams on the CPU:
        a training that runs beside it keeps its GPU, and one stream of random numbers repeats a branch."""
        loaded = load_run(path, device="cpu", trust=trust)
        set_threads(loaded.settings.training.threads, loaded.workflow.context.device)
        return cls(loaded, trust=trust)

    @property
    def checkpoint(self) -> str:
        return self.loaded.checkpoint.path.name

    # The model --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def watch(self, observation: Observation, previous: Belief | None, action: np.ndarray | None) -> Belief:
        """The model's belief after an observation; `action` led to it from `previous`."""
        encoded = None if action is None else self.encode(action)
        is_first = torch.tensor([previous is None], device=self.device)
        seen, frames = self._stacked(observation, None if previous is None else previous.frames)
        before = None if previous is None else previous.state
        state = self.simulator.observe(seen, previous=before, action=encoded, is_first=is_first)
        return Belief(state, frames)

    def _stacked(
        self, observation: Observation, frames: Mapping[str, Tensor] | None
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """The observation as the model's networks take it: with the frames before it, where they see several."""
        batch = self._batch(observation)
        if self.frames is None:
            return batch, {}
        return self.frames.push(batch, dict(frames or self.frames.initial(1, self.device)))

    @torch.no_grad()
    def dream(self, state: ModelState, action: np.ndarray) -> Dreamed:
        """One step without looking."""
        step = self.simulator.step(state, self.encode(action))
        return Dreamed(step.state, float(step.reward[0]), float(step.continuation[0]))

    @torch.no_grad()
    def observation(self, state: ModelState) -> Observation:
        """The decoded observation of a state, by key: images uint8, or floats from 0 to 1; empty without a decoder."""
        if self.decode is None:
            return {}
        decoded = {key: value[0] for key, value in self.decode(state).items()}
        return {key: (value if value.dtype == torch.uint8 else value.float()).cpu().numpy()
                for key, value in decoded.items()}  # fmt: skip

    @torch.no_grad()
    def value(self, state: ModelState) -> float | None:
        return float(self.simulator.value(state)[0]) if self.simulator.has_value else None

    @torch.no_grad()
    def surprise(self, belief: Belief, observation: Observation) -> float | None:
        if not self.simulator.has_surprise or self.frames is not None:
            return None
        return float(self.simulator.surprise(belief.state, self._batch(observation))[0])

    def encode(self, action: np.ndarray) -> Tensor:
        """[1, encoded] of one stored action."""
        return self.codec.encode(torch.as_tensor(action, device=self.device)[None])

    def decode_action(self, encoded: Tensor) -> np.ndarray:
        stored: np.ndarray = self.codec.decode(encoded)[0].cpu().numpy()
        return stored

    def _batch(self, observation: Observation) -> dict[str, Tensor]:
        return {key: torch.as_tensor(value, device=self.device)[None] for key, value in observation.items()}

    # Who acts ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def policy_action(self, state: ModelState) -> np.ndarray | None:
        """An action of the model's own policy in a dreamed state, where it has one."""
        return self.decode_action(self.simulator.policy(state)) if self.simulator.has_policy else None

    @torch.no_grad()
    def plan(self, state: ModelState, memory: PlanMemory | None, name: str) -> tuple[Plan, Planner]:
        """Plan from a state with the run's own planner (`own`) or with one of controllers/planners, which begins with
        the plan before where that was its own."""
        planner = self.planner(name)
        known = memory is not None and memory[0] == name
        return planner.plan(state, dict(memory[1]) if memory and known else planner.initial_memory(1)), planner

    def planner(self, name: str) -> Planner:
        if name not in self._planners:
            own = getattr(self.workflow, "planner", None)
            if name == "own":
                if not isinstance(own, Planner):
                    raise ConfigError("This run has no planner of its own: choose one of the list.")
                self._planners[name] = own
            else:
                self._planners[name] = build_planner(self.loaded, name, self.simulator)
                self._planners[name].attach(self.simulator)
        return self._planners[name]

    @property
    def planners(self) -> list[str]:
        """Names of the planners that suit the model and its actions."""
        is_continuous = self.workflow.context.action_spec.kind == "continuous"
        names = [*(["own"] if self.has_planner else []), "cem", "icem", "mppi", "random_shooting", "mcts"]
        return names + (["gradient"] if is_continuous else [])

    @property
    def has_planner(self) -> bool:
        return isinstance(getattr(self.workflow, "planner", None), Planner)

    def facts(self) -> dict[str, Any]:
        """Facts about the model that the page needs."""
        simulator = self.simulator
        return {
            "workflow": self.workflow.name,
            "checkpoint": self.checkpoint,
            "decodes": self.decode is not None,
            "has_value": simulator.has_value,
            "has_policy": simulator.has_policy,
            "has_planner": self.has_planner,
            "has_temperature": simulator.has_temperature,
            "has_surprise": simulator.has_surprise,
            "members": simulator.members,
        }


def simulator_of(loaded: LoadedRun) -> Simulator:
    """The model that the workflow attached for planners."""
    try:
        return loaded.workflow.context.simulator.simulator
    except ConfigError:
        raise ConfigError(
            f"{loaded.run.path}: the workflow '{loaded.workflow.name}' has no world model, so there is nothing to "
            "dream in. MBMPC, PlaNet, the Dreamers, TD-MPC and their like have one."
        ) from None


def decoder_of(loaded: LoadedRun, simulator: Simulator) -> Decode | None:
    """A function from states to observations: the simulator's own, else the run's decoder, else the probe decoder of a
    decoder-free model."""
    if simulator.has_observation:
        return simulator.observation
    decoder = loaded.workflow.context.components.get("decoder")
    return decoder.reconstruct if isinstance(decoder, ObservationModel) else None


def build_planner(loaded: LoadedRun, name: str, simulator: Simulator) -> Planner:
    """A planner of controllers/planners for the actions of a run. It learns nothing, so any suits any model; a tree
    search takes the model's policy and value where there are such, else the same prior for all and random actions."""
    option = compose_option(PLANNERS, name)
    if name == "mcts":
        is_choice = len(loaded.workflow.context.action_spec.classes) == 1
        option.prior = "model" if (simulator.has_logits if is_choice else simulator.has_policy) else "uniform"
        option.leaf_value = "model" if simulator.has_value else "rollout"
        option.sampled_actions = None if is_choice else SAMPLED_ACTIONS
    config = OmegaConf.create(dict(loaded.config))
    config.setdefault("controllers", {})
    config.controllers["planner"] = option
    resolved = resolve(config)
    planner = PartBuilder(resolved).make("controllers.planner", resolved["controllers"]["planner"])
    assert isinstance(planner, Planner)
    return planner
