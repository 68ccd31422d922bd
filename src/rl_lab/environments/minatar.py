"""MinAtar: five small games on a grid of cells, with a channel for every kind of object. An import registers them."""

from __future__ import annotations

from typing import Any

import gymnasium
from minatar.gym import BaseEnv

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
MINIMAL_ACTIONS = {0: False, 1: True}  # by the version of the id


class MinAtarGame(BaseEnv):
    """A game that begins every episode as if no action had been taken before.

    It repeats the last action now and then (sticky actions) and would remember it beyond the end of an episode. The
    first steps of an episode would depend on the one before, and it could not be brought back by its seed and actions.
    """

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.game.last_action = 0
        return super().reset(seed=seed, options=options)


for _game in GAMES:
    for _version, _minimal in MINIMAL_ACTIONS.items():
        gymnasium.register(
            id=f"MinAtar/{_game.title().replace('_', '')}-v{_version}",
            entry_point=f"{__name__}:MinAtarGame",
            kwargs={"game": _game, "use_minimal_action_set": _minimal},
        )
