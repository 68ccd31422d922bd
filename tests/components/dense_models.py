"""Small dense RSSMs of every generation, with sequences to filter, for tests."""

from __future__ import annotations

import torch

from rl_lab.components.world_models.base import LatentState, StateSpaceModel
from rl_lab.components.world_models.dense_rssm import DenseCategoricalRSSM, GaussianRSSM

B, T, EMBED, ACTION, DETER, HIDDEN, STOCH, GROUPS, CLASSES = 3, 6, 5, 2, 8, 7, 4, 3, 4
SIZES = {"embed_size": EMBED, "action_size": ACTION, "deter": DETER, "hidden": HIDDEN}
GRID = {"groups": GROUPS, "classes": CLASSES}

FORMS = {
    "planet": lambda: GaussianRSSM(**SIZES, stoch=STOCH),
    "dreamer_v1": lambda: GaussianRSSM(
        **SIZES, stoch=STOCH, cell="reset_after", style="dreamer_v1", separate_std=False
    ),
    "dreamer_v2": lambda: DenseCategoricalRSSM(**SIZES, **GRID),
    "dreamer_v3_2023": lambda: DenseCategoricalRSSM(
        **SIZES, **GRID, style="dreamer_v3_2023", unimix=0.01, clip_actions=True, learned_initial=True
    ),
}


def make_model(form: str) -> StateSpaceModel:
    """In float64, with biases and norms away from where they begin."""
    torch.manual_seed(0)
    model = FORMS[form]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def sequence(model: StateSpaceModel) -> dict:
    generator = torch.Generator().manual_seed(1)
    normal = {"generator": generator, "dtype": torch.float64}
    start = LatentState(0.3 * torch.randn(B, DETER, **normal), torch.randn(B, model.stoch_size, **normal))
    if isinstance(model, DenseCategoricalRSSM):
        choice = torch.randint(0, CLASSES, (B, GROUPS), generator=generator)
        start = LatentState(start.deter, torch.eye(CLASSES, dtype=torch.float64)[choice].flatten(1))
    noise = torch.empty(T, B, *model.noise_shape, dtype=torch.float64)
    is_first = torch.rand(B, T, generator=generator) < 0.25
    return {
        "embed": torch.randn(B, T, EMBED, **normal),
        "prev_action": 1.5 * torch.randn(B, T, ACTION, **normal),
        "is_first": is_first,
        "initial": start,
        "noise": getattr(noise, f"{model.noise}_")(generator=generator),
    }
