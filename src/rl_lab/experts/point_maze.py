"""An expert for PointMaze: waypoints by search on the known maze, and a PD controller between them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from rl_lab.components.acting import AgentState, Mode
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import ConfigError
from rl_lab.experts.base import Expert
from rl_lab.records import Observation

REACHED = 0.1  # distance at which a waypoint counts as reached
STIFFNESS, DAMPING = 10.0, 1.0
_ID = re.compile(r"PointMaze_(UMaze|Medium|Large|Open)(Dense)?-v\d+$")
Cell = tuple[int, int]


class PointMazeExpert(Expert):
    """Heads for the centre of the next cell on a shortest way, a = 10·(waypoint - position) - velocity, and in the last
    cell for the goal itself. Positions have cells of size 1 with the maze's centre at the origin, rows downwards."""

    environment: ClassVar = {"id": "PointMaze_UMaze-v3"}
    environments: ClassVar = _ID.pattern

    def __init__(self, *, maze: Sequence[Sequence[Any]] | None = None) -> None:
        super().__init__()
        grid = _maze_of(self.environment["id"]) if maze is None else maze
        self._rows, self._columns = len(grid), len(grid[0])
        self._open = {(r, c) for r, row in enumerate(grid) for c, cell in enumerate(row) if cell != 1}
        self._ways: dict[Cell, dict[Cell, Cell]] = {}  # goal → cell → the next cell

    @classmethod
    def for_environment(cls, settings: EnvironmentSettings) -> PointMazeExpert:
        given = settings.kwargs.get("maze_map")
        return cls(maze=given or _maze_of(settings.id))

    def initial_state(self, num_envs: int) -> AgentState:
        return {"waypoint": torch.zeros(num_envs, 2), "heads": torch.zeros(num_envs)}

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        moving, goals = observation["observation"].astype(np.float64), observation["desired_goal"].astype(np.float64)
        position, velocity = moving[:, :2], moving[:, 2:]
        waypoints, heads = state["waypoint"].numpy().astype(np.float64), state["heads"].numpy() > 0
        targets = np.stack(
            [
                self._target(position[row], goals[row], waypoints[row] if heads[row] else None)
                for row in range(len(position))
            ]
        )
        action = np.clip(STIFFNESS * (targets - position) - DAMPING * velocity, -1.0, 1.0)
        memory = {"waypoint": torch.from_numpy(targets).float(), "heads": torch.ones(len(targets))}
        return action.astype(np.float32), memory

    def _target(self, position: np.ndarray, goal: np.ndarray, waypoint: np.ndarray | None) -> np.ndarray:
        """The point to head for: the waypoint until it is reached, then the next one."""
        if waypoint is not None and np.linalg.norm(waypoint - position) > REACHED:
            at = self._cell(waypoint)
            return goal if at == self._cell(goal) else waypoint
        cell = self._cell(position if waypoint is None else waypoint)
        goal_cell = self._cell(goal)
        if cell == goal_cell:
            return goal
        following = self._way(goal_cell).get(cell)
        return goal if following is None or following == goal_cell else self._centre(following)

    def _cell(self, place: np.ndarray) -> Cell:
        row, column = self._rows / 2 - place[1], place[0] + self._columns / 2
        return int(np.clip(row, 0, self._rows - 1)), int(np.clip(column, 0, self._columns - 1))

    def _centre(self, cell: Cell) -> np.ndarray:
        return np.array([cell[1] + 0.5 - self._columns / 2, self._rows / 2 - cell[0] - 0.5])

    def _way(self, goal: Cell) -> dict[Cell, Cell]:
        """From every cell the next one on a shortest way to the goal: a search from there outwards."""
        if goal not in self._ways:
            way, queue = {goal: goal}, deque([goal])
            while queue:
                row, column = queue.popleft()
                for cell in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
                    if cell in self._open and cell not in way:
                        way[cell] = (row, column)
                        queue.append(cell)
            self._ways[goal] = way
        return self._ways[goal]


def _maze_of(environment_id: str) -> Sequence[Sequence[Any]]:
    match = _ID.search(environment_id)
    if match is None:
        raise ConfigError(f"The expert 'point_maze' knows no maze of {environment_id}.")
    from gymnasium_robotics.envs.maze import maps

    names = {"UMaze": "U_MAZE", "Medium": "MEDIUM_MAZE", "Large": "LARGE_MAZE", "Open": "OPEN"}
    maze: Sequence[Sequence[Any]] = getattr(maps, names[match[1]])
    return maze
