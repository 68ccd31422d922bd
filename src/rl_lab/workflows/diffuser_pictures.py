"""What Diffuser plans, as pictures for people: noise that becomes a plan, and the candidates."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_lab.components.diffusion.guidance import Guidance, ReverseStep
from rl_lab.components.diffusion.schedule import CLEAN
from rl_lab.components.diffusion.trajectories import TrajectoryModel
from rl_lab.metrics.charts import IMAGINED, REAL
from rl_lab.metrics.paths import Path2D, draw_paths
from rl_lab.records import Illustration

COLUMNS = 6
CELL = 200  # pixels
CANDIDATE = "#8a93a0"


class Denoising(Guidance):
    """Watches a sampler with hooks of its own, and keeps every sample on the way."""

    def __init__(self) -> None:
        self.inner = Guidance()
        self.kept: list[tuple[int, Tensor]] = []  # level, x

    def before(self, x: Float[Tensor, "batch time dim"], level: int) -> Float[Tensor, "batch time dim"]:
        x = self.inner.before(x, level)
        self.kept.append((level, x))
        return x

    def mean(self, step: ReverseStep) -> Float[Tensor, "batch time dim"]:
        return self.inner.mean(step)

    def constrain(self, x: Float[Tensor, "batch time dim"], level: int) -> Float[Tensor, "batch time dim"]:
        x = self.inner.constrain(x, level)
        if level == CLEAN:
            self.kept.append((level, x))
        return x


def picture_plans(
    model: TrajectoryModel,
    watch: Denoising,
    value: Float[Tensor, "env candidate"],
    chosen: Int[Tensor, " env"],
    happened: Float[Tensor, "env time state"],
) -> list[Illustration]:
    """One row for each environment; positions are the first two entries of a state. Empty where there is one entry."""
    if model.state_size < 2 or not int(model.seen_count):
        return []
    envs, count = value.shape
    ground = model.seen[: int(model.seen_count), :2].cpu().numpy()
    paths = {level: _positions(model, x).unflatten(0, (envs, count)).cpu().numpy() for level, x in watch.kept}
    levels = [level for level, _ in watch.kept]
    shown = [levels[round(place)] for place in np.linspace(0, len(levels) - 1, COLUMNS)]
    rows, fans, films = [], [], []
    for env in range(envs):
        best = int(chosen[env])
        final = paths[CLEAN][env]
        ends = {"start": final[best, 0], "goal": final[best, -1] if model.goal is not None else None, "pixels": CELL}
        steps = [draw_paths(ground, [Path2D(paths[level][env, best], IMAGINED)], **ends) for level in shown]
        rows.append((f"episode {env + 1}", np.stack(steps)))
        weight = torch.softmax((value[env] - value[env].max()) / value[env].std().clamp(min=1e-6), 0).cpu().numpy()
        fans.append(draw_paths(ground, _fan(final, best, weight, happened[env, :, :2].cpu().numpy()), **ends))
        if env == 0:
            films = [draw_paths(ground, [Path2D(paths[level][env, best], IMAGINED)], **ends) for level in levels]
    expected = ", ".join(
        f"{float(value[env, chosen[env]]):.0f} of {float(value[env].mean()):.0f}" for env in range(envs)
    )
    return [
        Illustration(
            "denoising", "Noise becomes a plan",
            f"The chosen plan at levels {', '.join(map(str, shown[:-1]))} of the noise, and clean. Grey: where the "
            "data have been. Start and goal are known from the beginning.",
            rows, np.stack(films), cell=CELL,
        ),
        Illustration(
            "candidates", "Candidate plans",
            "Grey: the candidates, the more the critic expects of one the stronger its line; orange: the chosen one; "
            f"dashed: what happened in the first {happened.shape[1] - 1} steps. Expected return of the chosen plan and "
            f"of the candidates on average: {expected}.",
            [("plans", np.stack(fans))], cell=CELL,
        ),
    ]  # fmt: skip


def _positions(model: TrajectoryModel, rows: Float[Tensor, "row horizon dim"]) -> Float[Tensor, "row horizon 2"]:
    return model.normalizer.inverse(rows)[..., model.action_size : model.action_size + 2]


def _fan(plans: np.ndarray, best: int, weight: np.ndarray, happened: np.ndarray) -> list[Path2D]:
    share = weight / weight.max()
    others = [
        Path2D(plan, CANDIDATE, 0.6 + 1.2 * float(part), 0.25 + 0.6 * float(part))
        for plan, part in zip(plans, share, strict=True)
    ]
    return [*others, Path2D(plans[best], IMAGINED, 2.2), Path2D(happened, REAL, 1.6, dashed=True)]
