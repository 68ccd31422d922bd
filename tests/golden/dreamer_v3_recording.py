"""One recorded training step of the original DreamerV3, and our own on the same parameters, batch and noise.

`dreamer_v3/README.md` says what the arrays are. The tables below say which of our parameters each of the original's is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from tests.packaged import adjusted
from torch import Tensor, nn

from rl_lab.components.actors.dreamer import make_actor
from rl_lab.components.controller_manager import ControllerManager
from rl_lab.components.critics.dreamer import ReturnNormalizer, TwoHotCritic
from rl_lab.components.decoders import MultiKeyDecoder
from rl_lab.components.encoders import MultiKeyEncoder
from rl_lab.components.predictors import ContinuePredictor, RewardPredictor
from rl_lab.components.world_models.base import DETER, STOCH
from rl_lab.components.world_models.rssm import BlockRSSM
from rl_lab.kernels.registry import enable
from rl_lab.nn.optimizers import ROW, LaProp
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer_v3 import DreamerV3

FOLDER = Path(__file__).parent / "dreamer_v3"
CASES = ("discrete", "continuous")
PATHS: tuple[Literal["auto", "off"], ...] = ("auto", "off")  # with this machine's kernels, and without
OBSERVATION = {"vector": ObservationSpec("vector", (6,), "float32")}
ACTIONS = {"discrete": ActionSpec("discrete", (1,), (3,)), "continuous": ActionSpec("continuous", (2,))}

# Original linear layer, its norm, our normed layer; {} counts the layers.
NORMED_LAYERS = (
    ("enc/mlp{}", "enc/mlp{}norm", "encoder.vector.mlp.{}", 3),
    ("dyn/dynin0", "dyn/dynin0norm", "rssm.deter_layer", 1),
    ("dyn/dynin1", "dyn/dynin1norm", "rssm.stoch_layer", 1),
    ("dyn/dynin2", "dyn/dynin2norm", "rssm.action_layer", 1),
    ("dyn/obs0", "dyn/obs0norm", "rssm.posterior_layer", 1),
    ("dyn/prior{}", "dyn/prior{}norm", "rssm.prior_layers.{}", 2),
    ("dec/mlp/linear{}", "dec/mlp/norm{}", "decoder.vector.mlp.{}", 3),
    ("rew/mlp/linear{}", "rew/mlp/norm{}", "reward.head.trunk.{}", 1),
    ("con/mlp/linear{}", "con/mlp/norm{}", "continue.head.trunk.{}", 1),
    ("pol/mlp/linear{}", "pol/mlp/norm{}", "policy.head.trunk.{}", 3),
    ("val/mlp/linear{}", "val/mlp/norm{}", "critic.head.trunk.{}", 3),
    ("slowval/mlp/linear{}", "slowval/mlp/norm{}", "critic.slow.network.trunk.{}", 3),
)
OUTPUT_LAYERS = {
    "dyn/obslogit": "rssm.posterior_logits",
    "dyn/priorlogit": "rssm.prior_logits",
    "dec/vec/vector/pred": "decoder.vector.outputs.0",
    "rew/head/logits": "reward.head.outputs.0",
    "con/head/logit": "continue.head.outputs.0",
    "pol/head/action/logits": "policy.head.outputs.0",  # discrete actions
    "pol/head/action/mean": "policy.head.outputs.0",  # continuous actions
    "pol/head/action/stddev": "policy.head.outputs.1",
    "val/head/logits": "critic.head.outputs.0",
    "slowval/head/logits": "critic.slow.network.outputs.0",
}
BLOCK_LAYERS = {"dyn/dynhid0": "rssm.core", "dyn/dyngru": "rssm.gates"}  # [block, in, out] on both sides
OTHERS = {
    "dyn/dynhid0norm/scale": "rssm.core_norm.weight",
    "retnorm/lo/value": "return_normalizer.low",
    "retnorm/hi/value": "return_normalizer.high",
}
# Our name of each loss.
LOSSES = {
    "vector": "observation", "rew": "reward", "con": "continue", "dyn": "dynamics", "rep": "representation",
    "policy": "policy", "value": "value", "repval": "replay_value",
}  # fmt: skip


class Place(NamedTuple):
    """One of our tensors, and how the original's is laid out there."""

    name: str  # component or controller, then the name in its state_dict
    is_kernel: bool = False  # [in, out] in the original, [out, in] here
    stoch_first: int = 0  # so many of the kernel's inputs are the stochastic latent, which stands last in our features

    def ours(self, array: np.ndarray) -> Tensor:
        """From the original's layout to ours."""
        array = np.roll(array, -self.stoch_first, 0) if self.stoch_first else array
        return torch.from_numpy(np.ascontiguousarray(array.T if self.is_kernel else array))


def places(names: Sequence[str], stoch_size: int) -> dict[str, Place]:
    """Original name → place, for those of the names that a table has."""
    table = {name: Place(ours) for name, ours in OTHERS.items()}
    for original, ours in BLOCK_LAYERS.items():
        table |= {f"{original}/kernel": Place(f"{ours}.weight"), f"{original}/bias": Place(f"{ours}.bias")}
    linear = dict(OUTPUT_LAYERS)
    for original, norm, ours, layers in NORMED_LAYERS:
        for i in range(layers):
            linear[original.format(i)] = f"{ours.format(i)}.linear"
            table[f"{norm.format(i)}/scale"] = Place(f"{ours.format(i)}.norm.weight")
    for original, ours in linear.items():
        table |= {f"{original}/kernel": Place(f"{ours}.weight", True), f"{original}/bias": Place(f"{ours}.bias")}
    table["dec/mlp/linear0/kernel"] = Place("decoder.vector.mlp.0.linear.weight", True, stoch_first=stoch_size)
    return {name: table[name] for name in names if name in table}


class Recording:
    """The arrays of one file by their names there."""

    def __init__(self, case: str) -> None:
        with np.load(FOLDER / f"{case}.npz", allow_pickle=False) as file:
            self.arrays = dict(file)
        self.case, self.config = case, json.loads(str(self.arrays["config_json"]))
        rssm = "agent.dyn.rssm"
        self.deter, self.hidden, self.groups, self.classes, self.blocks = (
            self.config[f"{rssm}.{name}"] for name in ("deter", "hidden", "stoch", "classes", "blocks")
        )
        names = [name.removeprefix("before/") for name in self.arrays if name.startswith("before/")]
        self.places = places(names, self.groups * self.classes)
        missing = {name for name in names if not name.startswith("opt/")} - set(self.places)
        assert missing == {"slowval_count/value"}, missing  # we count no updates where the slow critic follows in each

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    def state(self, prefix: str) -> dict[str, Tensor]:
        """Our name → tensor in our layout, of all that is recorded under a prefix such as `before`."""
        found = {place: self.arrays.get(f"{prefix}/{name}") for name, place in self.places.items()}
        return {place.name: place.ours(array) for place, array in found.items() if array is not None}

    def batch(self) -> SequenceBatch:
        """With the latent that the step started from as the context's stored one: row 3 took it from its carry."""
        deter, stoch = self["batch/dyn/deter"].clone(), self["batch/dyn/stoch"].clone()
        deter[:, 0], stoch[:, 0] = self["ref/in/carry/deter"], self["ref/in/carry/stoch"]
        action = self["batch/action"]
        return SequenceBatch(
            observation={"vector": self["batch/vector"]},
            action=action.unsqueeze(-1) if self.case == "discrete" else action,
            reward=self["batch/reward"],
            is_first=self["batch/is_first"],
            is_last=self["batch/is_last"],
            is_terminal=self["batch/is_terminal"],
            extras={DETER: deter, STOCH: stoch.argmax(-1).to(torch.uint8)},
            indices=torch.arange(action.shape[0] * action.shape[1]).view(action.shape[:2]),
        )

    def noise(self, name: str, kind: str) -> Tensor:
        """A draw in the form that our distributions take: a Gumbel variable is -log of an exponential one."""
        if name == "noise/act" and self.case == "continuous":
            assert kind == "normal"
            return self[name]
        assert kind == "exponential"
        return torch.exp(-self[name].double()).float()


def make_dreamer(recording: Recording, *, path: Literal["auto", "off"] = "auto") -> DreamerV3:
    """Our DreamerV3 in the state before the recorded step. The 1 % of uniform actions, which the original's code leaves
    out, is switched off."""
    config, action = recording.config, ACTIONS[recording.case]
    units = config["agent.policy.units"]
    encoder = MultiKeyEncoder(observation=OBSERVATION, units=units)
    rssm = BlockRSSM(
        embed_size=encoder.output_size, action_size=action.encoded_size, deter=recording.deter, hidden=recording.hidden,
        groups=recording.groups, classes=recording.classes, blocks=recording.blocks,
    )  # fmt: skip
    size = {"feature_size": rssm.feature_size, "units": units}
    components = {
        "encoder": encoder, "rssm": rssm, "reward": RewardPredictor(**size), "continue": ContinuePredictor(**size),
        "decoder": MultiKeyDecoder(observation=OBSERVATION, deter=rssm.deter, stoch_size=rssm.stoch_size, units=units),
        "return_normalizer": ReturnNormalizer(),
    }  # fmt: skip
    controllers = {"policy": make_actor(action=action, unimix=0.0, **size), "critic": TwoHotCritic(**size)}
    enable(components | controllers, device=torch.device("cpu"), mode=path)
    load_state(components | controllers, recording.state("before"))
    parameters = trainable(components | controllers)
    optimizer = LaProp(parameters.values(), lr=config["agent.opt.lr"], warmup=config["agent.opt.warmup"])
    load_moments(optimizer, parameters, recording)
    context = WorkflowContext(
        config={}, device=torch.device("cpu"), seed=0, observation_spec=OBSERVATION, action_spec=action,
        components=components, controllers=ControllerManager(controllers), optimizers={"main": optimizer},
        data_sources={"replay": WrittenLatents()},
    )  # fmt: skip
    sizes = {"batch_size": "batch_size", "sequence_length": "batch_length", "horizon": "agent.imag_length"}
    settings = adjusted("workflow/dreamer_v3", **{ours: config[original] for ours, original in sizes.items()})
    workflow = DreamerV3(**settings)
    workflow.initialize(context)
    return workflow


def load_state(modules: Mapping[str, nn.Module], state: Mapping[str, Tensor]) -> None:
    """Into every parameter and every buffer: a name that is missing on either side is an error."""
    for part, module in modules.items():
        own = {name.removeprefix(f"{part}."): value for name, value in state.items() if name.startswith(f"{part}.")}
        counter = {name: value for name, value in module.state_dict().items() if name == "slow.updates"}
        module.load_state_dict(own | counter)


def trainable(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """By our names, in the order in which they were defined."""
    named = {f"{part}.{name}": value for part, module in modules.items() for name, value in module.named_parameters()}
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


def modules_of(workflow: DreamerV3) -> dict[str, nn.Module]:
    return {**workflow.context.components, **dict(workflow.context.controllers.items())}


def all_tensors(workflow: DreamerV3) -> dict[str, Tensor]:
    """Every parameter and buffer by our name."""
    modules = modules_of(workflow)
    return {f"{part}.{name}": value for part, module in modules.items() for name, value in module.state_dict().items()}


def load_moments(optimizer: LaProp, parameters: Mapping[str, Tensor], recording: Recording) -> None:
    """The optimiser's moments lie in one vector, where each tensor begins a new row."""
    state = optimizer.state_dict()
    for name, original in (("momentum", "mu"), ("second_moment", "nu")):
        moments = recording.state(f"before/opt/{original}")
        flat = [nn.functional.pad(moments[key].flatten(), (0, -parameters[key].numel() % ROW)) for key in parameters]
        state[name] = [torch.cat(flat)]
    state["updates"] = [recording["before/opt/step"].long().expand(len(parameters))]
    optimizer.load_state_dict(state)


def moments_of(optimizer: LaProp, parameters: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """By our names: `momentum` or `second_moment`."""
    (flat,) = optimizer.state_dict()[name]
    sizes = [parameter.numel() for parameter in parameters.values()]
    pieces = flat.split([size + -size % ROW for size in sizes])
    shaped = zip(pieces, parameters.items(), strict=True)
    return {key: piece[: parameter.numel()].view(parameter.shape) for piece, (key, parameter) in shaped}


class WrittenLatents:
    """A replay that keeps the latents that an update writes back."""

    def __init__(self) -> None:
        self.indices, self.fields = torch.empty(0), {}

    def update(self, indices: Tensor, fields: Mapping[str, Tensor]) -> None:
        self.indices, self.fields = indices, dict(fields)
