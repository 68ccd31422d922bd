"""What every latent world model of the family offers: filtering, predicting, dreaming.

A model has a deterministic path h (`deter`) and a stochastic latent z (`stoch`). A subclass says how h advances, what
prior and posterior are, and how z is distributed; the loops over time are written once, here, in plain form. A faster
form of a loop overrides the plain one and is tested against it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rl_lab.nn.capture import compile_block
from rl_lab.nn.distributions import (
    LatentNormal,
    NoiseKind,
    UnimixCategorical,
    categorical_kl,
    draw_noise,
    normal_kl,
)
from rl_lab.nn.dream_kernel import PolicyArrays
from rl_lab.nn.math import at_least_float32, one_hot
from rl_lab.records import FieldSpec

DETER, STOCH = "latent.deter", "latent.stoch"  # the fields that keep the latent state of each record

Policy = Callable[[Tensor, Tensor], Tensor]  # (features, noise) -> encoded action


@runtime_checkable
class KernelPolicy(Protocol):
    """A policy that a kernel may run as a part of a dream."""

    def arrays(self) -> PolicyArrays | None:
        """None where there is no kernel for it."""


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
    """h and z of several states along a new axis; memories are left out."""
    return LatentState(torch.stack([s.deter for s in states], dim), torch.stack([s.stoch for s in states], dim))


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


class StateSpaceModel(nn.Module, ABC):
    """h_t = f(h_{t-1}, z_{t-1}, a_{t-1});  prior p(z_t | h_t);  posterior q(z_t | h_t, e_t).

    `prev_action[:, t]` is the (encoded) action that led to `embed[:, t]`. Where `is_first[:, t]`, the state and the
    action before t are taken as zeros. Priors and posteriors travel as raw parameters; `distribution` gives their
    meaning.
    """

    deter: int
    stoch_size: int
    noise: ClassVar[NoiseKind]  # what sampling z takes
    shares_rows: ClassVar[bool] = False  # whether threads share the rows of its dreams: see `rl_lab.nn.host_threads`

    def __init__(self) -> None:
        super().__init__()
        self._observe_step: Callable[..., tuple[LatentState, Tensor]] = self.observe_step
        self._imagine_step: Callable[..., tuple[LatentState, Tensor]] = self._plain_imagine_step

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
        """Of the whole z."""

    @abstractmethod
    def sample(self, params: Tensor, noise: Tensor | None, dtype: torch.dtype) -> Float[Tensor, "*lead stoch"]:
        """z, flat, with a gradient (reparameterised or straight-through)."""

    @property
    @abstractmethod
    def noise_shape(self) -> tuple[int, ...]:
        """What one sample of z takes."""

    def draw_noise(self, lead: Sequence[int], device: torch.device | str) -> Tensor:
        """Noise for `lead` samples of z, from the device's global generator."""
        return draw_noise(self.noise, (*lead, *self.noise_shape), device)

    def compile_steps(self, dtype: torch.dtype = torch.float32) -> None:
        """Compile one step of each loop; products are computed in `dtype`."""
        self._observe_step = compile_block(self.observe_step)
        self.compile_imagination()

    def rehearse(self, batch: int, dtype: torch.dtype) -> None:
        """Compile the kernels of its own that `observe` will use, where it has some."""

    def compile_imagination(self) -> None:
        """Compile one step of a dream."""
        self._imagine_step = compile_block(self._plain_imagine_step)

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
        keep = (~is_first).to(embed.dtype).unsqueeze(-1)
        action = prev_action.to(embed.dtype) * keep
        state, states, params = initial.map(lambda part: part.to(embed.dtype)), [], []
        for t in range(embed.shape[1]):
            state = _masked(state, keep[:, t])
            state, step_params = self._observe_step(state, action[:, t], embed[:, t], noise[t])
            states.append(state)
            params.append(step_params)
        return stack_states(states, 1), torch.stack(params, 1)

    def fuse(self) -> bool:
        """Run `prior` on kernels of our own from now on, where there are some."""
        return False

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
        state, states, actions = start, [_forget(start)], []
        for step_latent_noise, step_action_noise in zip(latent_noise, action_noise, strict=True):
            state, action = self._imagine_step(state, policy, step_latent_noise, step_action_noise)
            states.append(_forget(state))
            actions.append(action)
        return Dream.stack(states, actions)

    def imagine_actions(self, start: LatentState, actions: Float[Tensor, "b t action"]) -> LatentState:
        """Roll the prior forward under given actions: the states they lead to, batch first."""
        state, states = start, []
        for action in actions.unbind(1):
            state = self.predict_step(state, action)
            states.append(_forget(state))
        return stack_states(states, 1)

    def _plain_imagine_step(
        self, state: LatentState, policy: Policy, latent_noise: Tensor, action_noise: Tensor
    ) -> tuple[LatentState, Tensor]:
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


def _forget(state: LatentState) -> LatentState:
    """h and z alone: of a rollout only the newest memory is kept alive."""
    return state._replace(memory=None)


def _masked(state: LatentState, keep: Float[Tensor, "b 1"]) -> LatentState:
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
