"""Pictures of tree searches: the trees, what they made of the network's policy, and how true the values were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_lab.metrics.charts import IMAGINED, REAL, Panel, Series, decorate, new_figure, png_chart, style, to_png
from rl_lab.records import PlannedEpisode, SearchedDecision

if TYPE_CHECKING:  # matplotlib is imported where a figure is drawn: commands start without it
    from matplotlib.axes import Axes

EDGE = "#8a93a0"
MAX_ACTIONS = 20  # bars of a policy


def trees_picture(searches: Sequence[SearchedDecision], path: Path) -> Path:
    """A row for each decision: its tree, and the policies of network and search."""
    figure = new_figure(9.2, 2.7 * len(searches) + 0.3)
    with style():
        grid = figure.subplots(len(searches), 2, squeeze=False, width_ratios=(2.2, 1.0))
        for row, search in enumerate(searches):
            _draw_tree(grid[row, 0], search)
            _draw_policies(grid[row, 1], search, legend=row == 0)
    return to_png(figure, path)


def _draw_tree(axes: Axes, search: SearchedDecision) -> None:
    """Nodes by depth, as large as they were often visited, in the colour of their value; the principal line bold."""
    place, depth = tree_layout(search.parent)
    line = set(zip(search.line[:-1].tolist(), search.line[1:].tolist(), strict=True))
    for node, parent in enumerate(search.parent.tolist()):
        if parent >= 0:
            chosen = (parent, node) in line
            width, colour = (2.4, REAL) if chosen else (0.4 + 1.6 * search.visits[node] / search.visits[0], EDGE)
            axes.plot([place[parent], place[node]], [depth[parent], depth[node]], color=colour, lw=width, zorder=1)
    size = 12.0 + 160.0 * search.visits / search.visits[0]
    shown = axes.scatter(place, depth, s=size, c=search.value, cmap="viridis", zorder=2, edgecolors="white", lw=0.4)
    axes.invert_yaxis()
    axes.set_yticks(range(0, int(depth.max()) + 1, 1 + int(depth.max()) // 8))
    axes.set_xticks([])
    axes.set_ylabel("steps ahead", fontsize=8.5)
    axes.set_title(
        f"decision {search.step}: {int(search.visits[0]) - 1} simulations; actions of the principal line: "
        f"{', '.join(search.line_names)}",
        loc="left", fontsize=9.0,
    )  # fmt: skip
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.figure.colorbar(shown, ax=axes, label="value", fraction=0.04, pad=0.01)


def tree_layout(parent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places across and depths of nodes: leaves stand side by side in the order of a walk, a parent over the middle of
    its children."""
    children: list[list[int]] = [[] for _ in parent]
    depth = np.zeros(len(parent), int)
    for node, above in enumerate(parent.tolist()):
        if above >= 0:
            children[above].append(node)
            depth[node] = depth[above] + 1
    place, leaves, stack = np.zeros(len(parent)), 0, [(0, False)]
    while stack:
        node, seen = stack.pop()
        if not children[node]:
            place[node], leaves = leaves, leaves + 1
        elif seen:
            place[node] = float(np.mean(place[children[node]]))
        else:
            stack.append((node, True))
            stack += [(child, False) for child in reversed(children[node])]
    return place, depth


def _draw_policies(axes: Axes, search: SearchedDecision, *, legend: bool) -> None:
    shown = np.sort(np.argsort(-np.maximum(search.policy, search.prior), kind="stable")[:MAX_ACTIONS])
    position = np.arange(len(shown))
    decorate(axes)
    axes.bar(position - 0.2, search.prior[shown], 0.4, color=EDGE, label="network")
    axes.bar(position + 0.2, search.policy[shown], 0.4, color=IMAGINED, label="search")
    names = [search.names[action] for action in shown]
    axes.set_xticks(position, names, rotation=90 if max(map(len, names)) > 2 else 0)
    axes.set_ylim(0.0, 1.0)
    axes.set_title("policy by action", loc="left", fontsize=9.0)
    if legend:
        axes.legend(frameon=False, fontsize=8.0)


def calibration_picture(episode: PlannedEpisode, path: Path) -> Path:
    """Values of network and search over the episode, and against the discounted returns that came."""
    assert episode.network_value is not None
    assert episode.discounted is not None
    step, returns = np.arange(len(episode.expected)), episode.discounted
    network, search = episode.network_value, episode.expected
    over = [
        Series(step, network, "network", EDGE), Series(step, search, "search", IMAGINED),
        Series(step, returns, "what came", REAL, dashes=(0, (4, 1.5))),
    ]  # fmt: skip
    panels = [Panel(over, "Value at each decision", "decision", "discounted return")]
    both = np.concatenate([returns, network, search])
    ends = [float(both.min()), float(both.max())]
    scatter = [
        Series(ends, ends, "as predicted", REAL, dashes=(0, (4, 1.5)), width=1.2),
        Series(returns, network, "network", EDGE, "dots", alpha=0.6),
        Series(returns, search, "search", IMAGINED, "dots", alpha=0.6),
    ]
    panels.append(Panel(scatter, "Predicted against received", "what came", "value"))
    return png_chart(path, panels, columns=2, width=9.6, height=3.2)
