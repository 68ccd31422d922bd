"""The families of environments that RL Lab knows: what each needs, and what of it is missing here."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass

from rl_lab.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """Environments that come from one library."""

    name: str
    pattern: str  # regular expression over ids
    example: str
    extra: str | None  # the extra of rl-lab that installs it; None: always there
    modules: tuple[str, ...] = ()  # what must be importable
    registers: str | None = None  # the module whose import registers the ids with Gymnasium

    def matches(self, environment_id: str) -> bool:
        return re.search(self.pattern, environment_id) is not None

    def missing(self) -> tuple[str, ...]:
        """The modules that are not installed. Looks, does not import."""
        return tuple(name for name in self.modules if importlib.util.find_spec(name) is None)

    @property
    def installed(self) -> bool:
        return not self.missing()

    @property
    def install_command(self) -> str | None:
        return f"pip install 'rl-lab[{self.extra}]'" if self.extra else None

    def require(self, environment_id: str) -> None:
        """Import what the family needs, or say how to get it."""
        missing = self.missing()
        if missing:
            raise ConfigError(
                f"environment.id={environment_id}: {self.name} is not installed (missing: {', '.join(missing)}). "
                f"Install the extra '{self.extra}': {self.install_command}"
            )
        if self.registers is not None:
            import gymnasium

            gymnasium.register_envs(importlib.import_module(self.registers))


_CLASSIC = r"^(CartPole|Acrobot|Pendulum|MountainCar|MountainCarContinuous|FrozenLake|Taxi|CliffWalking|Blackjack)"
_BOX2D = r"^(LunarLander|LunarLanderContinuous|BipedalWalker|BipedalWalkerHardcore|CarRacing)-"
_MUJOCO = (
    r"^(Ant|HalfCheetah|Hopper|Humanoid|HumanoidStandup|InvertedDoublePendulum|InvertedPendulum|Pusher|Reacher|Swimmer"
    r"|Walker2d)-v[45]"
)

FAMILIES: tuple[Family, ...] = (
    Family("Gymnasium classic control and toy text", _CLASSIC, "CartPole-v1", None, ("gymnasium",)),
    Family("Atari", r"(^|:)ALE/", "ALE/Pong-v5", "atari", ("ale_py",), "ale_py"),
    Family("Box2D", _BOX2D, "CarRacing-v3", "box2d", ("Box2D", "pygame")),
    Family("DeepMind Control", r"^dm_control/", "dm_control/walker-walk-v0", "dmc", ("dm_control", "mujoco")),
    Family("Gymnasium MuJoCo", _MUJOCO, "HalfCheetah-v5", "dmc", ("mujoco",)),
    Family("PointMaze", r"^PointMaze_", "PointMaze_UMaze-v3", "maze", ("gymnasium_robotics",), "gymnasium_robotics"),
    Family("RL Lab", r"^rl_lab/Detour", "rl_lab/Detour-v0", None, (), "rl_lab.environments.detour"),
    Family(
        "Push-T", r"^rl_lab/PushT", "rl_lab/PushT-v0", "pusht", ("gym_pusht", "pymunk"), "rl_lab.environments.push_t"
    ),
    Family("Board games", r"^rl_lab/", "rl_lab/Connect4-v0", None, (), "rl_lab.environments.board_games"),
    Family("MinAtar", r"^MinAtar/", "MinAtar/Breakout-v1", "minatar", ("minatar",), "rl_lab.environments.minatar"),
    Family("MiniGrid", r"^(MiniGrid|BabyAI)-", "MiniGrid-Empty-5x5-v0", "minigrid", ("minigrid",), "minigrid"),
)


def family_of(environment_id: str) -> Family | None:
    """The known family of an id; None for environments of the user's own."""
    return next((family for family in FAMILIES if family.matches(environment_id)), None)
