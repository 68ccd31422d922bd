"""Gymnasium's Box2D games: a world of its own for every episode, and CarRacing's pictures without waste."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from jaxtyping import Float

MARGIN = 3.0  # pixels: what is rounded or smoothed beyond a polygon's own corners


class Polygons:
    """Bounding circles of the playfield's polygons, with which those in view are found in one vectorised test."""

    def __init__(self, corners: Float[np.ndarray, "polygon corner 2"]) -> None:
        centre = corners.mean(1)
        self._x, self._y = centre.T
        self._radius = np.linalg.norm(corners - centre[:, None], axis=-1).max(1)

    def in_view(
        self, zoom: float, translation: tuple[float, float], angle: float, window: tuple[int, int]
    ) -> list[int]:
        """Indices of all polygons of which a window of that many pixels may show a part, in their order."""
        cosine, sine, radius = math.cos(angle), math.sin(angle), self._radius * zoom + MARGIN
        x = (cosine * self._x - sine * self._y) * zoom + translation[0]
        y = (sine * self._x + cosine * self._y) * zoom + translation[1]
        seen = (x >= -radius) & (x <= window[0] + radius) & (y >= -radius) & (y <= window[1] + radius)
        return np.flatnonzero(seen).tolist()


class FreshBox2DWorld(gymnasium.Wrapper):
    """Gives every episode a Box2D world of its own.

    The solver keeps contacts and warm starts in the world, so an episode in a used world differs from the same
    episode in a new one: it could not be brought back by its seed and actions.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        import Box2D

        game: Any = self.env.unwrapped
        game._destroy()
        gravity = game.world.gravity
        game.world = Box2D.b2World(gravity=(float(gravity[0]), float(gravity[1])))
        return self.env.reset(seed=seed, options=options)


class CarRacingPictures(FreshBox2DWorld):
    """CarRacing draws a picture in every step, which costs most of it, and most of that are polygons nobody sees.

    With `skips_picture` a step leaves the picture out, unless the episode ends with it; the observation is then the
    picture before. A picture that is drawn is Gymnasium's own to the last pixel, but the polygons that lie outside it
    are left out in one go: a dozen or two of eight hundred remain.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        from gymnasium.envs.box2d import car_racing

        super().__init__(env)
        self.skips_picture = False
        game: Any = env.unwrapped
        self._game, self._draw = game, game._render
        game._render, game._render_road = self._render, self._render_road
        self._window = (car_racing.WINDOW_W, car_racing.WINDOW_H)
        edge, size = car_racing.PLAYFIELD, car_racing.GRASS_DIM
        self._field = [(edge, edge), (edge, -edge), (-edge, -edge), (-edge, edge)]
        at = [size * step for step in range(-20, 20, 2)]
        self._grass = [[(x + size, y), (x, y), (x, y + size), (x + size, y + size)] for x in at for y in at]
        self._grass_places = Polygons(np.array(self._grass, np.float64))
        self._road: Any = None  # the game's list of polygons with their colours, a new one for every track
        self._road_places = self._grass_places

    def _render(self, mode: str) -> Any:
        return self._game.state if mode == "state_pixels" and self.skips_picture else self._draw(mode)

    def _render_road(self, zoom: float, translation: tuple[float, float], angle: float) -> None:
        game = self._game
        if self._road is not game.road_poly:
            self._road = game.road_poly
            self._road_places = Polygons(np.array([polygon for polygon, _ in self._road], np.float64))
        view = (zoom, translation, angle)
        game._draw_colored_polygon(game.surf, self._field, game.bg_color, *view, clip=False)
        for index in self._grass_places.in_view(*view, self._window):
            game._draw_colored_polygon(game.surf, self._grass[index], game.grass_color, *view)
        for index in self._road_places.in_view(*view, self._window):
            polygon, color = self._road[index]
            game._draw_colored_polygon(game.surf, polygon, [int(part) for part in color], *view)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self.skips_picture and (terminated or truncated):
            observation = self._game.state = self._draw("state_pixels")
        return observation, reward, terminated, truncated, info


def refresh_box2d_world(env: gymnasium.Env) -> gymnasium.Env:
    """Wrap the Box2D games of Gymnasium that keep their world across episodes."""
    module = type(env.unwrapped).__module__
    if module == "gymnasium.envs.box2d.car_racing":
        return CarRacingPictures(env)
    return FreshBox2DWorld(env) if module == "gymnasium.envs.box2d.bipedal_walker" else env
