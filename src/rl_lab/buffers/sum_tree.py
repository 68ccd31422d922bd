"""A tree of sums over a fixed number of masses: draws in proportion to them, and changes many at once."""

from __future__ import annotations

import numpy as np

WIDTH = 32  # children of a node: a million leaves are four levels deep, and each level is a few NumPy calls
MANY = 512  # nodes from which finding the doubles costs less than summing them twice


class SumTree:
    """Masses on leaves 0 … size - 1, all 0 at first.

    A node is always computed anew from its children, never corrected by a difference. So no rounding error builds up,
    and a tree that is filled again with the same masses is the same tree to the last bit.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        widths = [size]
        while widths[-1] > 1:
            widths.append(-(-widths[-1] // WIDTH))
        # Every level is padded to whole families; `levels[0]` holds the leaves, the last one the root.
        self._levels = [np.zeros((-(-width // WIDTH), WIDTH)) for width in widths]
        self._flat = [level.reshape(-1) for level in self._levels]

    @property
    def leaves(self) -> np.ndarray:
        """All masses. Not to be written to."""
        return self._flat[0][: self.size]

    @property
    def nbytes(self) -> int:
        return sum(level.nbytes for level in self._levels)

    @property
    def total(self) -> float:
        return float(self._flat[-1][0])

    def set(self, leaves: np.ndarray, masses: np.ndarray | float) -> None:
        """Set the masses of leaves. Of a leaf that comes twice the later mass stays."""
        self._flat[0][leaves] = masses
        nodes = leaves
        for children, parents in zip(self._levels[:-1], self._flat[1:], strict=True):
            nodes = nodes // WIDTH
            if len(nodes) > MANY:  # siblings have one parent: it is enough to sum it once
                nodes = np.unique(nodes)
            parents[nodes] = children[nodes].sum(1)

    def fill(self, masses: np.ndarray) -> None:
        """Set all leaves."""
        self._flat[0][: self.size] = masses
        for children, parents in zip(self._levels[:-1], self._flat[1:], strict=True):
            parents[: len(children)] = children.sum(1)

    def find(self, points: np.ndarray) -> np.ndarray:
        """The leaf at each point of [0, total): the masses lie side by side, in order. Leaves of mass 0 are not met."""
        rest, nodes = points, np.zeros(len(points), np.int64)
        rows = np.arange(len(points))
        for children in reversed(self._levels[:-1]):
            ends = children[nodes].cumsum(1)
            # Sums of a level and of the one below differ by rounding: a point beyond the end belongs to the end.
            rest = np.minimum(rest, np.nextafter(ends[:, -1], 0.0))
            child = (ends <= rest[:, None]).sum(1)
            rest = rest - np.where(child > 0, ends[rows, child - 1], 0.0)
            nodes = nodes * WIDTH + child
        return nodes
