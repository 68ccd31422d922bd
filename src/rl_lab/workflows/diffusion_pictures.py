"""How a diffusion policy draws its chunks, as pictures for people."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.actors.diffusion_policy import DiffusionPolicy
from rl_lab.components.diffusion import Guidance
from rl_lab.records import Illustration, SequenceBatch

COLUMNS = 10
CHUNKS = 48  # drawn for one observation
ENTRIES = 4  # of actions, one row each
PIXELS = 84  # of one panel
PAPER, SHADE, INK = (250, 250, 250), (226, 232, 240), (37, 99, 235)


class Watched(Guidance):
    """Keeps every x that the sampler passes."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def constrain(self, x: Float[Tensor, "batch time dim"], level: int) -> Float[Tensor, "batch time dim"]:
        if not self.seen or not torch.equal(self.seen[-1], x):
            self.seen.append(x)
        return x


@torch.no_grad()
def chunk_pictures(policy: DiffusionPolicy, batch: SequenceBatch) -> list[Illustration]:
    """Pictures of the first sequence of a batch."""
    length = len(batch.is_last[0]) - int(batch.is_last[0, -1])
    spots = np.linspace(0, length - 1, min(COLUMNS, length)).round().astype(int).tolist()
    drawn = [_draw(policy, batch, spot, watched := Watched()) for spot in spots[:1]]
    stages = [policy.action_limits.inverse(x) for x in watched.seen]
    chosen = np.linspace(0, len(stages) - 1, min(COLUMNS, len(stages))).round().astype(int)
    panels = np.stack([_panels(policy, stage) for stage in stages])  # [stage, entry, height, width, 3]
    film = np.concatenate([panels, np.repeat(panels[-1:], len(panels) // 2, 0)])
    denoising = Illustration(
        "denoising", "A chunk of actions comes out of noise",
        f"{CHUNKS} chunks for the first observation of a held-out episode, from pure noise at the left to actions at "
        "the right. A row is one entry of the action, from -1.4 at the bottom to 1.4 at the top; in each panel time "
        "goes to the right, and what is carried out is shaded. Several bundles are several ways of going on.",
        _rows(policy, panels[chosen]),
        film=np.concatenate([film[:, entry] for entry in range(film.shape[1])], 1),
    )  # fmt: skip
    drawn += [_draw(policy, batch, spot, Watched()) for spot in spots[1:]]
    along = np.stack([_panels(policy, actions) for actions in drawn])
    episode = Illustration(
        "chunks", "Chunks along an episode",
        f"{CHUNKS} chunks for each of {len(spots)} observations, from the beginning of an episode at the left to its "
        "end. Where the bundles have become one, the policy has decided.",
        _rows(policy, along),
    )  # fmt: skip
    return [denoising, episode]


def _draw(
    policy: DiffusionPolicy, batch: SequenceBatch, spot: int, watched: Watched
) -> Float[Tensor, "chunk time action"]:
    """Chunks for one record of the first sequence, with the records before it."""
    times = torch.arange(spot - policy.observation_horizon + 1, spot + 1).clamp(min=0)
    history = {
        key: value[0, times.to(value.device)].expand(CHUNKS, *[-1] * (value.ndim - 1))
        for key, value in batch.observation.items()
    }
    return policy.draw(history, guidance=watched)


def _rows(policy: DiffusionPolicy, panels: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Labelled rows from [column, entry, height, width, 3]."""
    return [(f"action {entry}", panels[:, entry]) for entry in range(panels.shape[1])]


def _panels(policy: DiffusionPolicy, actions: Float[Tensor, "chunk time action"]) -> np.ndarray:
    """[entry, height, width, 3]: the entries of some chunks over time."""
    start = policy.observation_horizon - 1
    values = actions[..., :ENTRIES].cpu().numpy()
    return np.stack([_panel(values[..., entry], start, policy.action_horizon) for entry in range(values.shape[-1])])


def _panel(values: np.ndarray, start: int, count: int) -> np.ndarray:
    """Lines [line, time] as a picture; the times from `start` on, `count` of them, are shaded."""
    picture = np.full((PIXELS, PIXELS, 3), PAPER, np.uint8)
    times = values.shape[1]
    columns = np.arange(PIXELS)
    place = columns * (times - 1) / (PIXELS - 1)
    picture[:, (place >= start - 0.5) & (place <= start + count - 0.5)] = SHADE
    for line in values:
        height = np.interp(place, np.arange(times), line).clip(-1.4, 1.4)
        rows = ((1.4 - height) / 2.8 * (PIXELS - 1)).round().astype(int)
        for column in columns:
            before = rows[max(column - 1, 0)]
            low, high = sorted((before, rows[column]))
            stroke = picture[low : high + 1, column]
            picture[low : high + 1, column] = (0.55 * stroke + 0.45 * np.asarray(INK)).astype(np.uint8)
    return picture
