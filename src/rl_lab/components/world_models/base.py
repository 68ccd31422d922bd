"""A latent world model as the Dreamers and PlaNet see it: filtering, predicting, dreaming.

A model has a deterministic path h (`deter`) and a stochastic latent z (`stoch`). A subclass says how h advances, what
prior and posterior are, and how z is distributed; the loops over time are written once, here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from rl_lab.kernels.registry import Accelerated
from rl_lab.nn.distributions import NoiseKind, UnimixCategorical, at_least_float32, categorical_kl, draw_noise, one_hot
from rl_lab.nn.normals import LatentNormal, normal_kl
from rl_lab.records import FieldSpec

DETER, STOCH = "latent.deter", "latent.stoch"  # the fields that keep the latent state of each record

Policy = Callable[[Tensor, Tensor], Tensor]  # (features, noise) -> encoded action


class LatentState(NamedTuple):
    """h and z. Categorical latents are the flat one-hots of all groups."""

    deter: Float[Tensor, "*lead deter"]
    stoch: Float[Tensor, "*lead stoch"]
    memory: Tensor | None = None  # what a model remembers beyond h: a transformer's past. Recurrent models have none.

    @property
    def features(self) -> Float[Tensor, "*lead features"]:
        return torch.cat([self.deter, self.stoch], -1)

    def map(self, function: Callable[[Tensor], Tensor]) -> LatentState:
        """Apply a function to every tensor."""
        return LatentState(*(None if part is None else function(part) for part in self))  # type: ignore[arg-type]

    def detach(self) -> LatentState:
        return self.map(Tensor.detach)

    def flatten(self) -> LatentState:
        """[a, b, size] → [a·b, size]"""
        return self.map(lambda part: part.flatten(0, 1))


def stack_states(states: Sequence[LatentState], dim: int) -> LatentState:
    """Several states along a new axis, with their memories where all have one."""
    memories = [state.memory for state in states if state.memory is not None]
    return LatentState(
        torch.stack([state.deter for state in states], dim),
        torch.stack([state.stoch for state in states], dim),
        torch.stack(memories, dim) if len(memories) == len(states) else None,
    )


class Dream(NamedTuple):
    """An imagined rollout, time first: state t, and the action chosen in it. There is one state more than actions."""

    states: LatentState  # [horizon + 1, batch, size]
    features: Float[Tensor, "steps batch features"]  # of these states
    actions: Float[Tensor, "horizon batch action"]

    @classmethod
    def stack(cls, states: Sequence[LatentState], actions: Sequence[Tensor]) -> Dream:
        """From single steps."""
        stacked = stack_states(states, 0)
        return cls(stacked, stacked.features, torch.stack(tuple(actions)))

    def clone(self) -> Dream:
        """A copy: tensors of inference mode become ordinary ones."""
        features = self.features.clone()
        deter, stoch = features.split([self.states.deter.shape[-1], self.states.stoch.shape[-1]], -1)
        return Dream(LatentState(deter, stoch), features, self.actions.clone())

    @classmethod
    def of(cls, deter: Tensor, stoch: Tensor, actions: Tensor) -> Dream:
        states = LatentState(deter, stoch)
        return cls(states, states.features, actions)


class StateSpaceModel(Accelerated, ABC):
    """h_t = f(h_{t-1}, z_{t-1}, a_{t-1});  prior p(z_t | h_t);  posterior q(z_t | h_t, e_t).

    `prev_action[:, t]` is the (encoded) action that led to `embed[:, t]`. Where `is_first[:, t]`, the state and the
    action before t are taken as zeros. Priors and posteriors travel as raw parameters; `distribution` gives their
    meaning. Each of `advance`, `prior`, `posterior`, `distribution` and `sample` may be overridden alone.
    """

    deter: int
    stoch_size: int
    noise: ClassVar[NoiseKind]  # the kind of noise that a sample of z needs
    latent: ClassVar[type[LatentState]] = LatentState
    compiled_steps: ClassVar[tuple[str, ...]] = ("observe_step", "_imagine_step")  # the bodies of its loops

    def __init__(self) -> None:
        super().__init__()
        self.compiled: dict[str, Callable] = {}  # steps of the loops in compiled form, by name

    @property
    def feature_size(self) -> int:
        return self.deter + self.stoch_size

    @abstractmethod
    def advance(self, state: LatentState, action: Float[Tensor, "b action"]) -> tuple[Tensor, Tensor | None]:
        """f: the next h, and the memory that goes with it."""

    @abstractmethod
    def prior(self, deter: Float[Tensor, "*lead deter"]) -> Tensor:
        """The parameters of p(z | h)."""

    @abstractmethod
    def posterior(self, deter: Float[Tensor, "*lead deter"], embed: Float[Tensor, "*lead embed"]) -> Tensor:
        """The parameters of q(z | h, e)."""

    @abstractmethod
    def distribution(self, params: Tensor) -> Any:
        """The distribution with these parameters; it has `detach()`."""

    @abstractmethod
    def divergence(self, left: Any, right: Any) -> Float[Tensor, "*lead"]:
        """KL(left || right) of two such distributions, summed over z."""

    @abstractmethod
    def entropy(self, distribution: Any) -> Float[Tensor, "*lead"]:
        """Entropy of the whole z, summed over its parts."""

    @abstractmethod
    def sample(self, params: Tensor, noise: Tensor | None, dtype: torch.dtype) -> Float[Tensor, "*lead stoch"]:
        """z, flat, with a gradient (reparameterised or straight-through)."""

    @property
    @abstractmethod
    def noise_shape(self) -> tuple[int, ...]:
        """The shape of the noise that one sample of z needs."""

    def draw_noise(self, lead: Sequence[int], device: torch.device | str) -> Tensor:
        """Noise for `lead` samples of z, from the device's global generator."""
        return draw_noise(self.noise, (*lead, *self.noise_shape), device)

    # One step at a time -----------------------------------------------------------------------------------------------

    def initial(self, batch: int) -> LatentState:
        """Nothing seen yet: zeros, on the module's device."""
        zeros = next(self.parameters()).new_zeros
        return LatentState(zeros(batch, self.deter), zeros(batch, self.stoch_size))

    def observe_step(
        self, state: LatentState, prev_action: Tensor, embed: Tensor, noise: Tensor | None = None
    ) -> tuple[LatentState, Tensor]:
        """One filtering step; the caller zeroes state and action at an episode's start."""
        deter, memory = self.advance(state, prev_action)
        params = self.posterior(deter, embed)
        return LatentState(deter, self.sample(params, noise, deter.dtype), memory), params

    def predict_step(self, state: LatentState, action: Tensor, noise: Tensor | None = None) -> LatentState:
        """One step of the prior."""
        deter, memory = self.advance(state, action)
        return LatentState(deter, self.sample(self.prior(deter), noise, deter.dtype), memory)

    # Whole sequences --------------------------------------------------------------------------------------------------

    def observe(
        self,
        embed: Float[Tensor, "b t embed"],
        prev_action: Float[Tensor, "b t action"],
        is_first: Bool[Tensor, "b t"],
        initial: LatentState,
        noise: Float[Tensor, "t b *latent"] | None = None,
    ) -> tuple[LatentState, Tensor]:
        """Filter sequences: (posterior states, posterior parameters), batch first."""
        if noise is None:
            noise = self.draw_noise(embed.shape[1::-1], embed.device)
        if self.kernels and (kernel := self.kernel("observe")) is not None:
            return kernel(self, embed, prev_action, is_first, initial, noise)
        keep = (~is_first).to(embed.dtype).unsqueeze(-1)
        action = prev_action.to(embed.dtype) * keep
        step = self.compiled.get("observe_step", self.observe_step)
        state, states, params = initial.map(lambda part: part.to(embed.dtype)), [], []
        for t in range(embed.shape[1]):
            state = mask_state(state, keep[:, t])
            state, step_params = step(state, action[:, t], embed[:, t], noise[t])
            states.append(state)
            params.append(step_params)
        return stack_states(states, 1), torch.stack(params, 1)

    def starts(self, states: LatentState) -> LatentState:
        """Every state of filtered sequences [b, t] as the start of a dream [b·t], without its gradient."""
        return states.detach().flatten()

    def imagine(
        self,
        start: LatentState,
        policy: Policy,
        *,
        latent_noise: Float[Tensor, "horizon b *latent"],
        action_noise: Float[Tensor, "horizon b *action"],
    ) -> Dream:
        """Roll the prior forward: `policy(features, noise)` chooses each action."""
        step = self.compiled.get("_imagine_step")
        state, states, actions = start, [start._replace(memory=None)], []
        for step_latent_noise, step_action_noise in zip(latent_noise, action_noise, strict=True):
            if step is not None:
                state, action = step(state, policy, step_latent_noise, step_action_noise)
            else:
                action = policy(state.features, step_action_noise)
                state = self.predict_step(state, action.to(state.deter.dtype), step_latent_noise)
            states.append(state._replace(memory=None))  # of a rollout only the newest memory is kept
            actions.append(action)
        return Dream.stack(states, actions)

    def _imagine_step(
        self, state: LatentState, policy: Policy, latent_noise: Tensor, action_noise: Tensor
    ) -> tuple[LatentState, Tensor]:
        """The body of that loop, for a compiler: the next state, and the action that led to it."""
        action = policy(state.features, action_noise)
        return self.predict_step(state, action.to(state.deter.dtype), latent_noise), action

    # Latents in the replay --------------------------------------------------------------------------------------------

    def stored_specs(self) -> dict[str, FieldSpec]:
        """The fields that keep a state with its record. A model that cannot be entered in mid-sequence has none."""
        return {DETER: FieldSpec((self.deter,), "float16"), STOCH: FieldSpec((self.stoch_size,), "float16")}

    def to_stored(self, state: LatentState) -> dict[str, Tensor]:
        """A state as those fields. What is not finite must not stay in the replay: zeros start afresh."""
        return {DETER: state.deter.nan_to_num(0.0).half(), STOCH: state.stoch.nan_to_num(0.0).half()}

    def from_stored(self, fields: Mapping[str, Tensor]) -> LatentState:
        return LatentState(fields[DETER].float(), fields[STOCH].float())


def mask_state(state: LatentState, keep: Float[Tensor, "b 1"]) -> LatentState:
    """Zeros where an episode starts."""
    return state.map(lambda part: part * keep.view(-1, *[1] * (part.ndim - 1)).to(part.dtype))


class CategoricalModel(StateSpaceModel):
    """z is a grid of `groups` one-hots with `classes` classes each; parameters are logits [*lead, groups, classes]."""

    noise = UnimixCategorical.noise

    def __init__(self, *, groups: int, classes: int, unimix: float) -> None:
        super().__init__()
        self.groups, self.classes, self.unimix = groups, classes, unimix
        self.stoch_size = groups * classes

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (self.groups, self.classes)

    def distribution(self, params: Float[Tensor, "*lead groups classes"]) -> UnimixCategorical:
        return UnimixCategorical(params, unimix=self.unimix)

    def divergence(self, left: UnimixCategorical, right: UnimixCategorical) -> Float[Tensor, "*lead"]:
        return categorical_kl(left, right)

    def entropy(self, distribution: UnimixCategorical) -> Float[Tensor, "*lead"]:
        return distribution.entropy().sum(-1)

    def sample(self, params: Tensor, noise: Tensor | None, dtype: torch.dtype) -> Float[Tensor, "*lead stoch"]:
        return self.distribution(params).sample(noise).flatten(-2).to(dtype)

    def grid(self, logits: Float[Tensor, "*lead stoch"]) -> Float[Tensor, "*lead groups classes"]:
        return logits.unflatten(-1, (self.groups, self.classes))

    def stored_specs(self) -> dict[str, FieldSpec]:
        """Classes instead of one-hots."""
        return {DETER: FieldSpec((self.deter,), "float16"), STOCH: FieldSpec((self.groups,), "uint8")}

    def to_stored(self, state: LatentState) -> dict[str, Tensor]:
        choice = self.grid(state.stoch).argmax(-1).to(torch.uint8)
        return {DETER: state.deter.nan_to_num(0.0).half(), STOCH: choice}

    def from_stored(self, fields: Mapping[str, Tensor]) -> LatentState:
        return LatentState(fields[DETER].float(), one_hot(fields[STOCH], self.classes).flatten(-2))


StdForm = Literal["softplus", "sigmoid"]


class GaussianModel(StateSpaceModel):
    """z is a diagonal normal of size `stoch`; parameters are concat(mean, raw deviation).

    The deviation is softplus(raw) + min_std (PlaNet, Dreamer v1) or 2·sigmoid(raw / 2) + min_std (the normal latents of
    v2). Samples are reparameterised.
    """

    noise = LatentNormal.noise

    def __init__(self, *, stoch: int, min_std: float, std_form: StdForm) -> None:
        super().__init__()
        self.stoch_size, self.min_std, self.std_form = stoch, min_std, std_form

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (self.stoch_size,)

    def distribution(self, params: Float[Tensor, "*lead params"]) -> LatentNormal:
        mean, raw = at_least_float32(params).chunk(2, -1)
        std = F.softplus(raw) if self.std_form == "softplus" else 2.0 * torch.sigmoid(raw / 2.0)
        return LatentNormal(mean, std + self.min_std)

    def divergence(self, left: LatentNormal, right: LatentNormal) -> Float[Tensor, "*lead"]:
        return normal_kl(left, right)

    def entropy(self, distribution: LatentNormal) -> Float[Tensor, "*lead"]:
        return distribution.entropy()

    def sample(self, params: Tensor, noise: Tensor | None, dtype: torch.dtype) -> Float[Tensor, "*lead stoch"]:
        return self.distribution(params).sample(noise).to(dtype)
