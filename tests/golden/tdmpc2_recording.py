"""One recorded update and two plans of the original TD-MPC2, and our own on the same parameters, batch and noise.

`tdmpc2/README.md` says what the arrays are. The tables below say which of our parameters each of the original's is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tests.kernels.triton_anywhere import use_triton
from tests.packaged import adjusted, packaged
from tests.workflows.tdmpc_parts import make_part
from torch import Tensor, nn

from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.dynamics.tdmpc import episode_discount
from rl_lab.nn.flat_adam import ALIGNED, FlatAdam
from rl_lab.nn.flat_vector import padded_sizes, piece_views
from rl_lab.nn.normalizers import RunningScale
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.tdmpc2 import TDMPC2
from rl_lab.workflows.tdmpc_window import Window

FOLDER = Path(__file__).parent / "tdmpc2"
CASES = ("nonepisodic", "episodic")
PATHS = ("plain", "kernels")  # kernels: Triton's, on a GPU or in its interpreter
OBSERVATION = {"vector": ObservationSpec("vector", (6,), "float32")}
ACTION = ActionSpec("continuous", (2,))

# Original layer → our linear layer and its norm.
LAYERS = {
    "_encoder.state.0": ("encoder.vector.0.linear", "encoder.vector.0.norm"),
    "_encoder.state.1": ("encoder.vector.1.linear", "encoder.vector.1.norm"),
    "_dynamics.2": ("model.latent_output.linear", "model.latent_output.norm"),
    "_reward.2": ("model.reward_output", ""),
} | {
    f"{original}.{i}": (f"{ours}.{i}.linear", f"{ours}.{i}.norm") if i < 2 else (f"{ours}.{i}", "")
    for original, ours in (("_termination", "model.termination"), ("_pi", "policy.network"))
    for i in range(3)
}
# Original layer → our layer of several networks side by side, and which of them it is (None: all).
MEMBERS: dict[str, tuple[str, int | None]] = {
    f"{original}.{i}": (f"{ours}.layers.{i}", member)
    for original, ours, member, layers in (
        ("_dynamics", "model.trunks", 0, 2),
        ("_reward", "model.trunks", 1, 2),
        ("_Qs.params", "q.online", None, 3),
        ("target_Qs", "q.slow.network", None, 3),
    )
    for i in range(layers)
}
MEMBER_NAMES = {"weight": "linear.weight", "bias": "linear.bias", "ln.weight": "norm.weight", "ln.bias": "norm.bias"}


class Place(NamedTuple):
    """One of our tensors, and which part of it the original's is."""

    name: str
    is_member: bool = False
    member: int | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """The part that the original's array stands for, in its layout."""
        if not self.is_member:
            return tensor
        tensor = tensor if self.member is None else tensor[self.member]
        return tensor.transpose(-1, -2) if self.name.endswith("linear.weight") else tensor.squeeze(-2)


def place_of(name: str) -> Place:
    """Where an original parameter is in our model."""
    if name == "scale":
        return Place("value_scale.value")
    layer, _, kind = name.removesuffix(".ln.weight").removesuffix(".ln.bias").rpartition(".")
    if ".ln." in name:
        layer, kind = name.split(".ln.")[0], "ln." + name.split(".ln.")[1]
    if layer in MEMBERS:
        ours, member = MEMBERS[layer]
        return Place(f"{ours}.{MEMBER_NAMES[kind]}", True, member)
    linear, norm = LAYERS[layer]
    return Place(f"{norm}.{kind[3:]}" if kind.startswith("ln.") else f"{linear}.{kind}")


class Recording:
    """The arrays of one file by their names there."""

    def __init__(self, case: str) -> None:
        with np.load(FOLDER / f"{case}.npz", allow_pickle=False) as file:
            self.arrays = dict(file)
        self.case, self.config = case, json.loads(str(self.arrays["config_json"]))

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    def state(self, prefix: str) -> dict[str, Tensor]:
        """Original name → array, of all parameters under a prefix such as `before` or `grad/pi`."""
        names = [name.removeprefix(f"{prefix}/") for name in self.arrays if name.startswith(f"{prefix}/")]
        return {name: self[f"{prefix}/{name}"] for name in names if not name.startswith("adam")}

    def window(self) -> Window:
        """The batch. Nothing is masked: the original has no ends inside of a window, and learns at ended states."""
        reward, observation = self["batch/reward"][..., 0], self["batch/obs"]
        return Window(
            observation={"vector": observation},
            action=self["batch/action"],
            reward=reward,
            terminal=self["batch/terminated"][..., 0],
            valid=torch.ones_like(reward),
            alive=torch.ones(observation.shape[:2]),
            weight=None,
        )


def tensors_of(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers by our names."""
    named = {f"{part}.{name}": value for part, module in modules.items() for name, value in module.named_parameters()}
    buffers = {f"{part}.{name}": value for part, module in modules.items() for name, value in module.named_buffers()}
    return named | buffers


def make_workflow(recording: Recording, path: str) -> TDMPC2:
    """Our TD-MPC2 in the state before the recorded update."""
    assert path in PATHS, path
    config = recording.config
    latent, units, bins = config["latent_dim"], config["mlp_dim"], config["num_bins"]
    size = {"latent_size": latent, "action_size": 2, "units": units, "bins": bins, "limit": float(config["vmax"])}
    encoder = make_part(
        "encoder", observation=OBSERVATION, latent_size=latent, units=config["enc_dim"], simplex=config["simnorm_dim"]
    )
    discount = episode_discount(config["episode_length"])
    model = make_part("model", **size, simplex=config["simnorm_dim"], episodic=config["episodic"], discount=discount)
    policy = make_part("policy", action=ACTION, latent_size=latent, units=units)
    q = make_part("q", **size, members=config["num_q"], dropout=0.0, target_rate=config["tau"])
    planner = make_part(
        "planner", action=ACTION, horizon=config["horizon"], samples=config["num_samples"],
        elites=config["num_elites"], policy_samples=config["num_pi_trajs"], iterations=config["iterations"],
        temperature=config["temperature"], min_std=config["min_std"], max_std=float(config["max_std"]),
    )  # fmt: skip
    components = {
        "encoder": encoder,
        "model": model,
        "value_scale": RunningScale(**packaged("components/normalizers/values")),
    }
    controllers = {"policy": policy, "q": q, "planner": planner}
    tensors = tensors_of(components | controllers)
    with torch.no_grad():
        for name, value in recording.state("before").items():
            place = place_of(name)
            own = place.view(tensors[place.name])
            own.copy_(value.view_as(own))
    lr, clip = config["lr"], float(config["grad_clip_norm"])
    groups = [{"params": list(encoder.parameters()), "lr": lr * config["enc_lr_scale"]}]
    groups += [{"params": [p for p in part.parameters() if p.requires_grad]} for part in (model, q)]
    optimizers = {
        "model": FlatAdam(groups, lr=lr, eps=1e-8, clip=clip),
        "policy": FlatAdam(policy.parameters(), lr=lr, eps=1e-5, clip=clip),
    }
    for optimizer in optimizers.values():
        _load_moments(optimizer, tensors, recording)
    context = WorkflowContext(
        config={}, device=torch.device("cpu"), seed=0, observation_spec=OBSERVATION, action_spec=ACTION,
        components=components, controllers=ControllerManager(controllers), optimizers=optimizers,
    )  # fmt: skip
    settings = adjusted(
        "workflow/tdmpc2", batch_size=config["batch_size"], horizon=config["horizon"], rho=config["rho"],
        entropy_scale=config["entropy_coef"],
    )  # fmt: skip
    workflow = TDMPC2(**settings)
    workflow.initialize(context)
    if path == "kernels":
        assert sum(use_triton(module) for module in (encoder, model, policy, q)) > 10
    return workflow


@torch.no_grad()
def _load_moments(optimizer: FlatAdam, tensors: Mapping[str, Tensor], recording: Recording) -> None:
    """Momentum and second moment of those parameters that the optimiser has, after two updates."""
    sizes = padded_sizes(optimizer.params, ALIGNED)
    for own, original in ((optimizer.momentum, "adam_m"), (optimizer.second_moment, "adam_v")):
        pieces = {
            id(p): piece for p, piece in zip(optimizer.params, piece_views(own, optimizer.params, sizes), strict=True)
        }
        for name in (name for name in recording.arrays if name.startswith(f"before/{original}/")):
            place = place_of(name.removeprefix(f"before/{original}/"))
            if id(tensors[place.name]) in pieces:
                place.view(pieces[id(tensors[place.name])]).copy_(recording[name])
    optimizer.updates.fill_(2.0)
