"""MinAtar: five small games on a grid of cells, with a channel for every kind of object. Importing this registers them."""

from __future__ import annotations

from typing import Any

import gymnasium
from minatar.gym import register_envs


class FreshMinAtarGame(gymnasium.Wrapper):
    """Begins every episode as if no action had been taken before.

    The games repeat the last action now and then (sticky actions) and remember it beyond the end of an episode. The first
    steps of an episode would depend on the one before, and it could not be brought back by its seed and actions.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        game: Any = self.env.unwrapped
        game.game.last_action = 0
        return self.env.reset(seed=seed, options=options)


register_envs()
