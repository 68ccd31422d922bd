"""Atari games with the preprocessing of the literature, straight on the emulator."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import EnvironmentFailure

_NOOP, _FIRE = 0, 1  # positions in every game's action set, where the game has FIRE


class AtariGame(gymnasium.Env):
    """One game: no-ops, action repeat with the maximum of the last two frames, life loss and reward clipping as set.

    `action_repeat` frames pass in every step. When a lost life ended the episode and the game is not over, the next
    reset goes on with the game (`carries_over`).
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self, game: Any, settings: EnvironmentSettings) -> None:
        if not hasattr(game, "ale") or not isinstance(game.action_space, spaces.Discrete):
            raise EnvironmentFailure(
                f"environment.id={settings.id}: the Atari presets need discrete actions on the plain emulator. "
                "Set environment.atari.preset=none to use the environment as it is registered."
            )
        assert settings.action_repeat != "auto"
        self._game, self._ale, self._atari = game, game.ale, settings.atari
        self.action_repeat = settings.action_repeat
        self._actions = list(game._action_set)
        self.action_space = game.action_space
        height, width = self._ale.getScreenDims()
        self.observation_space = spaces.Box(0, 255, (height, width, 3), np.uint8)
        self._screens = np.zeros((2, height, width, 3), np.uint8)
        self._lives = 0
        self.carries_over = False
        self._fires = bool(self._atari.fire_on_reset) and "FIRE" in game.get_action_meanings()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.carries_over:
            self.carries_over = False
            self._ale.act(self._actions[_NOOP])
        else:
            super().reset(seed=seed)
            self._game.reset(seed=seed)  # reseeds the emulator's sticky actions and loads the game anew
            self._skip_noops()
        if self._fires:
            self._ale.act(self._actions[_FIRE])
        if self._ale.game_over():
            self._ale.reset_game()
        self._lives = self._ale.lives()
        return self._ale.getScreenRGB(), {}

    def _skip_noops(self) -> None:
        if not self._atari.noop_max:
            return
        for _ in range(int(self.np_random.integers(1, self._atari.noop_max + 1))):
            self._ale.act(self._actions[_NOOP])
            if self._ale.game_over():
                self._ale.reset_game()

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        ale, chosen, reward = self._ale, self._actions[action], 0.0
        life_lost = False
        for frame in range(self.action_repeat):
            reward += ale.act(chosen)
            life_lost = bool(self._atari.terminal_on_life_loss) and ale.lives() < self._lives
            over = ale.game_over(with_truncation=False)
            if frame >= self.action_repeat - 2 or over or life_lost:
                ale.getScreenRGB(self._screens[frame % 2])
            if over or life_lost:
                break
        self._lives = ale.lives()
        self.carries_over = life_lost and not over
        if self._atari.clip_reward:
            reward = float(np.sign(reward))
        truncated = not over and ale.game_truncated()
        return self._picture(frame), reward, over or life_lost, truncated, {"lives": self._lives}

    def _picture(self, frame: int) -> np.ndarray:
        if self._atari.max_pool and frame == self.action_repeat - 1 and frame > 0:
            return np.maximum(self._screens[0], self._screens[1])
        return self._screens[frame % 2].copy()

    def render(self) -> np.ndarray:
        return self._ale.getScreenRGB()
