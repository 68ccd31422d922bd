"""The list of all kernels: what each stands in for, and where it is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Backend = Literal["cpu", "triton"]
BACKENDS: tuple[Backend, ...] = ("cpu", "triton")
PACKAGES: dict[Backend, str] = {"cpu": "numba", "triton": "triton"}


@dataclass(frozen=True)
class Kernel:
    """One fast path: `implementation` computes `target.method` on `backend`."""

    target: str  # the exact class, by its full name
    method: str
    backend: Backend
    implementation: str  # "package.module:function"; beside it may stand `supports_function` and `precompile_function`
    mirrors: tuple[str, ...]  # full names of the plain functions that it computes
    parts: tuple[str, ...] = ()  # the exact classes that submodules may have

    @property
    def name(self) -> str:
        return f"{self.target.rpartition('.')[2]}.{self.method}"

    def load(self) -> Callable[..., Any]:
        """The function itself. Its module is imported here, and nowhere before."""
        function = self._find()
        assert function is not None, self.implementation
        return function

    def precompile(self) -> Callable[..., None] | None:
        """The function that compiles it ahead of its first call, where there is one."""
        return self._find("precompile_")

    def supports(self, module: Any) -> str | None:
        """The reason why the kernel cannot take a module of this size or kind; None where it can."""
        supports = self._find("supports_")
        return None if supports is None else supports(module)

    def _find(self, prefix: str = "") -> Callable[..., Any] | None:
        place, _, function = self.implementation.partition(":")
        return getattr(importlib.import_module(place), prefix + function, None)


LAYERS = "rl_lab.nn.layers"
CONVOLUTIONS = "rl_lab.nn.convolutions"
MODULE_LIST = "torch.nn.modules.container.ModuleList"
MODELS = "rl_lab.components.world_models"
DENSE_LAYERS = (f"{LAYERS}.NormedLinear", f"{LAYERS}.Linear", f"{LAYERS}.RMSNorm", f"{LAYERS}.LayerNorm")
LOOP_SOURCES = tuple(
    f"{MODELS}.base.{name}" for name in ("StateSpaceModel.observe", "StateSpaceModel.observe_step", "mask_state")
)
SAMPLE_SOURCES = (
    "rl_lab.nn.distributions.softmax",
    *(f"rl_lab.nn.distributions.UnimixCategorical.{name}" for name in ("probs", "sample", "sample_index")),
    "rl_lab.nn.distributions.UnimixCategorical._straight_through",
)
DENSE_SOURCES = tuple(f"{MODELS}.dense_rssm.DenseModel.{name}" for name in ("advance", "posterior"))
DENSE_PARTS = (
    *DENSE_LAYERS, f"{LAYERS}.MLP", f"{LAYERS}.Head", MODULE_LIST,
    "torch.nn.modules.linear.Identity", "torch.nn.modules.rnn.GRUCell",
    *(f"{MODELS}.recurrent_cells.{name}" for name in ("ResetBeforeGRU", "ResetAfterGRU", "NormGRU")),
)  # fmt: skip

PLANNERS, MUZERO = "rl_lab.components.planners", "rl_lab.components.muzero"
SEARCH_RULES = tuple(f"{PLANNERS}.search_rules.{name}" for name in ("PUCT", "GumbelRule"))  # those with kernels
TREE = (
    "search_tree.Edges.q", "search_tree.Edges.value",
    *(f"search_tree.SearchTree.{name}" for name in ("select", "edges", "_edges", "expand", "_back_up")),
    "search_rules.PUCT.root",
    "search_rules.PUCT.interior", "search_rules.PUCT.scores", "search_rules.PUCT.normalized",
    "search_rules.GumbelRule.root", "search_rules.GumbelRule.best", "search_rules.GumbelRule.interior",
    "search_rules.GumbelRule.improved", "search_rules.GumbelRule.transformed", "search_rules.mixed_value",
)  # fmt: skip
MUZERO_STEP = (
    "model.MuZeroModel.step", "model.MuZeroModel.predict", "dynamics.Dynamics.forward",
    "dynamics.Dynamics.following", "dynamics.Dynamics._reward", "prediction.PolicyValueNetwork.forward",
    "layers.scale_latent", "layers.MLP.__init__",
)  # fmt: skip
MUZERO_PARTS = (
    f"{MUZERO}.representation.VectorRepresentation", f"{MUZERO}.dynamics.Dynamics", f"{MUZERO}.layers.MLP",
    f"{MUZERO}.prediction.PolicyValueNetwork", "rl_lab.nn.support.Support",
    *(f"torch.nn.modules.{name}" for name in ("linear.Linear", "linear.Identity", "normalization.LayerNorm")),
    *(f"torch.nn.modules.{name}" for name in ("activation.ReLU", "container.Sequential")),
)  # fmt: skip
MUZERO_MIRRORS = (
    *(f"{MUZERO}.{name}" for name in MUZERO_STEP), "rl_lab.nn.support.Support.mean", "rl_lab.nn.support.unsquash",
)  # fmt: skip
# No kernel: the model that whole searches are compiled for, and the layers that it may have.
SEARCHED_MODEL = Kernel(
    f"{MUZERO}.model.MuZeroModel", "step", "cpu", "rl_lab.kernels.cpu.muzero:grow", mirrors=(), parts=MUZERO_PARTS,
)  # fmt: skip
SEARCH_KERNELS = (
    Kernel(
        f"{PLANNERS}.mcts.MCTS", "_grow", "cpu", "rl_lab.kernels.cpu.muzero:grow",
        mirrors=(
            *(f"{PLANNERS}.{name}" for name in (*TREE, "mcts.MCTS._grow", "mcts.MCTS._expand", "mcts.MCTS._evaluate")),
            *MUZERO_MIRRORS, *(f"rl_lab.simulation.muzero.MuZeroSimulator.{name}" for name in ("step", "predict")),
        ),
    ),
    *(
        Kernel(
            f"{PLANNERS}.mcts.MCTS", "_walker", backend, f"rl_lab.kernels.{backend}.mcts:walker",
            mirrors=tuple(f"{PLANNERS}.{name}" for name in (*TREE, "mcts.MCTS._walker")),
        )
        for backend in BACKENDS
    ),
)  # fmt: skip

KERNELS: tuple[Kernel, ...] = (
    *SEARCH_KERNELS,
    Kernel(
        f"{MODELS}.rssm.BlockRSSM", "observe", "triton", "rl_lab.kernels.triton.rssm:observe",
        mirrors=(
            *LOOP_SOURCES, *(f"{MODELS}.base.CategoricalModel.{name}" for name in ("sample", "distribution", "grid")),
            *(
                f"{MODELS}.rssm.BlockRSSM.{name}"
                for name in ("advance", "activate", "posterior", "_to_blocks", "_from_blocks")
            ),
            *(f"{LAYERS}.{name}" for name in ("BlockLinear.forward_blocks", "NormedLinear.forward", "RMSNorm.forward")),
            "rl_lab.nn.distributions.tanh", *SAMPLE_SOURCES,
        ),
        parts=(*DENSE_LAYERS, f"{LAYERS}.BlockLinear", f"{LAYERS}.MLP"),
    ),
    *(
        Kernel(
            f"{MODELS}.dense_rssm.{name}", "observe", "triton", "rl_lab.kernels.deferred:observe",
            mirrors=(*LOOP_SOURCES, *DENSE_SOURCES), parts=DENSE_PARTS,
        )
        for name in ("GaussianRSSM", "DenseCategoricalRSSM")
    ),
    Kernel(
        "rl_lab.components.encoders.cnn.DreamerCNN", "forward", "triton", "rl_lab.kernels.triton.images:forward",
        mirrors=(
            "rl_lab.components.encoders.cnn.DreamerCNN.forward", "rl_lab.components.encoders.images.scale_image",
            f"{CONVOLUTIONS}.PooledConv.forward", f"{CONVOLUTIONS}.PooledConv.by_phases", f"{LAYERS}.RMSNorm.forward",
        ),
        parts=(MODULE_LIST, f"{CONVOLUTIONS}.PooledConv", f"{CONVOLUTIONS}.Conv", f"{LAYERS}.RMSNorm"),
    ),
    Kernel(
        "rl_lab.components.decoders.cnn.DreamerCNNDecoder", "image_loss", "triton",
        "rl_lab.kernels.triton.images:image_loss",
        mirrors=(
            *(f"rl_lab.components.decoders.cnn.DreamerCNNDecoder.{name}" for name in ("forward", "loss", "image_loss")),
            f"{CONVOLUTIONS}.UpsampleConv.forward", f"{LAYERS}.RMSNorm.forward",
        ),
        parts=(
            *DENSE_LAYERS, MODULE_LIST, "torch.nn.modules.container.Sequential", f"{CONVOLUTIONS}.UpsampleConv",
            f"{LAYERS}.BlockLinear",
        ),
    ),
)  # fmt: skip
