"""Two-player board games: self-play in one environment, or against an opponent that the environment plays.

An observation is the board as the player to move sees it, and a mask of legal actions. A win pays 1 to the player who
made it. In self-play (`opponent=self`) the sides alternate from step to step, and each reward is that of the side that
has just moved. Against an opponent the agent's side is drawn at each reset, and a step is the agent's move and the
answer to it.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.errors import ConfigError

Opponent = Literal["self", "random", "minimax"]
MASK = "action_mask"
CELL = 32  # pixels of a cell in a picture
COLORS = np.array([[60, 90, 150], [235, 90, 70], [245, 205, 70]], np.uint8)  # board, first player, second player


class BoardGame(gymnasium.Env):
    """Stones on a grid; who has `length` in a row wins. Stones of a side are the bits of one integer."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 2}  # noqa: RUF012
    rows: ClassVar[int]
    columns: ClassVar[int]
    length: ClassVar[int]
    actions: ClassVar[int]

    def __init__(
        self,
        *,
        opponent: Opponent = "self",
        depth: int = 4,
        random_moves: int = 0,  # at most so many open a game
        render_mode: str | None = None,
    ) -> None:
        self.cells = self.rows * self.columns
        if opponent not in ("self", "random", "minimax") or depth < 1 or not 0 <= random_moves < self.cells:
            raise ConfigError(
                f"environment.kwargs: opponent={opponent!r}, depth={depth}, random_moves={random_moves}: expected "
                f"self, random or minimax, a depth of at least 1, and 0 to {self.cells - 1} random moves."
            )
        self.opponent, self.depth, self.render_mode = opponent, depth, render_mode
        self.random_moves = random_moves
        self._lines = winning_lines(self.rows, self.columns, self.length)
        board = spaces.Box(-1, 1, (self.rows, self.columns), np.int8)
        self.observation_space = spaces.Dict({"board": board, MASK: spaces.MultiBinary(self.actions)})
        self.action_space = spaces.Discrete(self.actions)
        self.own = self.other = 0  # stones of the side to move, and of the other
        self.agent_is_second = False

    # Rules ------------------------------------------------------------------------------------------------------------

    def cell(self, action: int, stones: int) -> int | None:
        """The cell that an action fills, given the taken cells as a bit mask; None where the action is illegal."""
        return None if stones >> action & 1 else action

    def legal(self, own: int, other: int) -> list[int]:
        return [action for action in self._order if self.cell(action, own | other) is not None]

    @property
    def _order(self) -> list[int]:
        """Actions from the middle outwards: good ones first make a search short."""
        return sorted(range(self.actions), key=lambda action: abs(action - (self.actions - 1) / 2))

    def wins(self, stones: int, cell: int) -> bool:
        """Whether the stone just put on a cell completes a line."""
        return any(stones & line == line for line in self._lines[cell])

    def is_full(self, own: int, other: int) -> bool:
        return own | other == (1 << self.cells) - 1

    # Playing ----------------------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.own = self.other = 0
        if self.random_moves:
            self._open()
        self.agent_is_second = self.opponent != "self" and bool(self.np_random.integers(2))
        if self.agent_is_second:
            self._move(self.choose())
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """An illegal action loses the game."""
        if self.cell(int(action), self.own | self.other) is None:
            return self._observe(), -1.0, True, False, {"illegal": True}
        reward, ended = self._move(int(action))
        if not ended and self.opponent != "self":
            answer, ended = self._move(self.choose())
            reward = -answer
        return self._observe(), reward, ended, False, {}

    def _move(self, action: int) -> tuple[float, bool]:
        """Put a stone and change sides: (reward of the mover, whether the game is over)."""
        cell = self.cell(action, self.own | self.other)
        assert cell is not None
        own, other = self.own | 1 << cell, self.other
        self.own, self.other = other, own
        won = self.wins(own, cell)
        return float(won), won or self.is_full(own, other)

    def _open(self) -> None:
        """Up to `random_moves` moves at random that end nothing: from there self-play learns of positions that it would
        not come to by itself."""
        for _ in range(int(self.np_random.integers(self.random_moves + 1))):
            taken = self.own | self.other
            cells = [(action, self.cell(action, taken)) for action in self.legal(self.own, self.other)]
            quiet = [action for action, cell in cells if cell is not None and not self.wins(self.own | 1 << cell, cell)]
            if len(cells) == 1 or not quiet:
                return
            self._move(quiet[int(self.np_random.integers(len(quiet)))])

    def _observe(self) -> dict[str, np.ndarray]:
        bits = np.arange(self.cells)
        own, other = ((np.array(stones, dtype=object) >> bits & 1).astype(np.int8) for stones in (self.own, self.other))
        mask = np.array([self.cell(action, self.own | self.other) is not None for action in range(self.actions)])
        return {"board": (own - other).reshape(self.rows, self.columns), MASK: mask.astype(np.int8)}

    def render(self) -> np.ndarray | None:
        """The board as a picture, the first player's stones red."""
        if self.render_mode != "rgb_array":
            return None
        stones = (self.own | self.other).bit_count()
        first, second = (self.own, self.other) if stones % 2 == 0 else (self.other, self.own)
        picture = np.empty((self.rows * CELL, self.columns * CELL, 3), np.uint8)
        middle = np.arange(CELL) - (CELL - 1) / 2
        disc = middle[:, None] ** 2 + middle**2 <= (0.4 * CELL) ** 2
        for cell in range(self.cells):
            row, column = divmod(cell, self.columns)
            color = 1 if first >> cell & 1 else 2 if second >> cell & 1 else 0
            place = picture[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
            place[:] = COLORS[0] // 2
            place[disc] = COLORS[color]
        return picture

    # The opponent -----------------------------------------------------------------------------------------------------

    def choose(self) -> int:
        """The opponent's action: any legal one, or any of the best by minimax."""
        actions = self.legal(self.own, self.other)
        if self.opponent == "minimax":
            values = [self._value_of(action) for action in actions]
            actions = [action for action, value in zip(actions, values, strict=True) if value == max(values)]
        return actions[int(self.np_random.integers(len(actions)))]

    def _value_of(self, action: int) -> float:
        cell = self.cell(action, self.own | self.other)
        assert cell is not None
        return self._after(self.own | 1 << cell, self.other, cell, self.depth - 1, -np.inf, np.inf)

    def _after(self, own: int, other: int, cell: int, depth: int, low: float, high: float) -> float:
        """The value for a side that has just put a stone on `cell`; a win counts more the sooner it comes."""
        if self.wins(own, cell):
            return 1e6 + depth
        if self.is_full(own, other):
            return 0.0
        return -self.negamax(other, own, depth, -high, -low)

    def negamax(self, own: int, other: int, depth: int, low: float, high: float) -> float:
        """The value of a position for the side to move, by alpha-beta search."""
        if depth == 0:
            return self.evaluate(own, other)
        best = -np.inf
        for action in self.legal(own, other):
            cell = self.cell(action, own | other)
            assert cell is not None
            best = max(best, self._after(own | 1 << cell, other, cell, depth - 1, max(low, best), high))
            if best >= high:
                break
        return best

    def evaluate(self, own: int, other: int) -> float:
        """Lines that only one side has stones in, by the square of their number."""
        total = 0
        for line in all_lines(self.rows, self.columns, self.length):
            mine, theirs = (own & line).bit_count(), (other & line).bit_count()
            if not theirs:
                total += mine * mine
            elif not mine:
                total -= theirs * theirs
        return float(total)


@lru_cache
def all_lines(rows: int, columns: int, length: int) -> tuple[int, ...]:
    """Every row of `length` cells, as bits."""
    lines = []
    for row in range(rows):
        for column in range(columns):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                cells = [(row + down * step, column + right * step) for step in range(length)]
                if all(0 <= r < rows and 0 <= c < columns for r, c in cells):
                    lines.append(sum(1 << r * columns + c for r, c in cells))
    return tuple(lines)


@lru_cache
def winning_lines(rows: int, columns: int, length: int) -> tuple[tuple[int, ...], ...]:
    """The lines through each cell."""
    lines = all_lines(rows, columns, length)
    return tuple(tuple(line for line in lines if line >> cell & 1) for cell in range(rows * columns))


class TicTacToe(BoardGame):
    """Three in a row on 3×3. With `depth=9` the opponent plays perfectly."""

    rows, columns, length, actions = 3, 3, 3, 9

    def negamax(self, own: int, other: int, depth: int, low: float, high: float) -> float:
        """Without pruning: there are few positions, and each is solved once."""
        return self._solved(own, other, depth)

    @cache  # noqa: B019  # there are at most a few thousand positions, and the class has no state in them
    def _solved(self, own: int, other: int, depth: int) -> float:
        return super().negamax(own, other, depth, -np.inf, np.inf)


class Connect4(BoardGame):
    """Four in a row on 6×7; a stone falls to the lowest free cell of its column."""

    rows, columns, length, actions = 6, 7, 4, 7

    def cell(self, action: int, stones: int) -> int | None:
        for row in range(self.rows - 1, -1, -1):
            cell = row * self.columns + action
            if not stones >> cell & 1:
                return cell
        return None


for _name, _class in (("TicTacToe", TicTacToe), ("Connect4", Connect4)):
    gymnasium.register(f"rl_lab/{_name}-v0", entry_point=f"{__name__}:{_class.__name__}")
