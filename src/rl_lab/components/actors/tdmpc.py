"""The policy priors of TD-MPC and TD-MPC2: they propose actions to the planner and to the values' targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.actions import ActionCodec
from rl_lab.components.spaces import action_spec
from rl_lab.nn.distributions import MultiCategorical, NoiseKind, draw_noise
from rl_lab.nn.normals import HALF_LOG_TWO_PI
from rl_lab.nn.tdmpc_layers import TDMPCMLP, Style, hidden_layers
from rl_lab.specs import ActionSpec

MOST_CHOICES = 64  # up to this many joint discrete actions the policy learns from all of them
EDGE = 1.0 - 1e-6


class Choices(NamedTuple):
    """Actions with weights, such that Σ weight · Q(latent, action) is the policy's value; and the policy's entropy.

    The gradient of continuous actions runs through the action itself, that of discrete ones through the weights.
    """

    action: Float[Tensor, "choices rows action"]
    weight: Float[Tensor, "choices rows"]
    entropy: Float[Tensor, " rows"]


class TDMPCPolicy(nn.Module, ABC):
    """π(a | z). Actions are encoded: entries in [-1, 1], or concatenated one-hots."""

    noise: ClassVar[NoiseKind] = "normal"
    choice_count = 1  # actions that `choices` returns for each row

    def __init__(
        self,
        *,
        latent_size: int,
        action: ActionSpec | Mapping[str, Any],
        outputs: int,  # for each entry of the encoded action
        units: int,
        layers: int,
        style: Style,
    ) -> None:
        super().__init__()
        self.codec = ActionCodec(action)
        self.action_size = self.codec.encoded_size
        hidden = hidden_layers(style, units, layers)
        self.network = TDMPCMLP(latent_size, hidden, outputs * self.action_size, style=style)

    def draw_noise(self, lead: Sequence[int]) -> Float[Tensor, "*lead action"]:
        """Noise for `lead` samples, from the device's global generator."""
        return draw_noise(self.noise, (*lead, self.action_size), next(self.parameters()).device)

    def forward(self, latent: Float[Tensor, "*lead latent"]) -> Float[Tensor, "*lead outputs"]:
        return self.network(latent).float()

    def sample(
        self, latent: Float[Tensor, "*lead latent"], noise: Float[Tensor, "*lead action"]
    ) -> Float[Tensor, "*lead action"]:
        return self.drawn(self(latent), noise)

    @abstractmethod
    def drawn(
        self, output: Float[Tensor, "*lead outputs"], noise: Float[Tensor, "*lead action"]
    ) -> Float[Tensor, "*lead action"]:
        """An action from the outputs of `forward` and noise."""

    @abstractmethod
    def mode(self, latent: Float[Tensor, "*lead latent"]) -> Float[Tensor, "*lead action"]: ...

    @abstractmethod
    def choices(self, latent: Float[Tensor, "rows latent"], noise: Float[Tensor, "rows action"]) -> Choices:
        """Actions whose values the policy's loss is taken on."""


class SquashedGaussian(TDMPCPolicy):
    """TD-MPC2's: tanh of a normal whose log-deviation is squashed into a range.

    Its entropy is that of the normal times the number of action entries: the correction for tanh cancels out.
    """

    def __init__(self, *, log_std_range: tuple[float, float] = (-10.0, 2.0), **arguments: Any) -> None:
        super().__init__(outputs=2, **arguments)
        self.log_std_range = log_std_range

    def _normal(self, output: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = output.chunk(2, -1)
        low, high = self.log_std_range
        return mean, low + 0.5 * (high - low) * (torch.tanh(raw) + 1.0)

    def drawn(
        self, output: Float[Tensor, "*lead outputs"], noise: Float[Tensor, "*lead action"]
    ) -> Float[Tensor, "*lead action"]:
        mean, log_std = self._normal(output)
        return torch.tanh(mean + log_std.exp() * noise)

    def mode(self, latent: Float[Tensor, "*lead latent"]) -> Float[Tensor, "*lead action"]:
        return torch.tanh(self._normal(self(latent))[0])

    def choices(self, latent: Float[Tensor, "rows latent"], noise: Float[Tensor, "rows action"]) -> Choices:
        mean, log_std = self._normal(self(latent))
        action = torch.tanh(mean + log_std.exp() * noise)
        log_prob = (-0.5 * noise.square() - log_std - HALF_LOG_TWO_PI).sum(-1)
        return Choices(action[None], torch.ones_like(log_prob)[None], -self.action_size * log_prob)


class NoisyMean(TDMPCPolicy):
    """TD-MPC's: tanh of a mean, plus normal noise that is cut off; without an entropy."""

    def __init__(self, *, noise_std: float, noise_limit: float = 0.3, **arguments: Any) -> None:
        super().__init__(outputs=1, **arguments)
        self.noise_std, self.noise_limit = noise_std, noise_limit

    def drawn(
        self, output: Float[Tensor, "*lead outputs"], noise: Float[Tensor, "*lead action"]
    ) -> Float[Tensor, "*lead action"]:
        """Inside of [-1, 1]; the clip lets the gradient through."""
        action = torch.tanh(output) + (self.noise_std * noise).clamp(-self.noise_limit, self.noise_limit)
        return action + (action.clamp(-EDGE, EDGE) - action).detach()

    def mode(self, latent: Float[Tensor, "*lead latent"]) -> Float[Tensor, "*lead action"]:
        return torch.tanh(self(latent))

    def choices(self, latent: Float[Tensor, "rows latent"], noise: Float[Tensor, "rows action"]) -> Choices:
        action = self.sample(latent, noise)
        return Choices(action[None], torch.ones_like(action[None, :, 0]), torch.zeros_like(action[:, 0]))


class CategoricalPrior(TDMPCPolicy):
    """Discrete actions: a categorical for each component, with a small uniform share.

    With few joint actions the policy learns from the values of all of them, which is exact; with more of them from the
    value of a sample, whose gradient is passed straight through.
    """

    noise = "exponential"
    every: Tensor

    def __init__(self, *, unimix: float, **arguments: Any) -> None:
        super().__init__(outputs=1, **arguments)
        self.unimix, self.classes = unimix, self.codec.spec.classes
        self.enumerates = prod(self.classes) <= MOST_CHOICES
        if self.enumerates:
            self.choice_count = prod(self.classes)
            numbers = torch.cartesian_prod(*(torch.arange(size) for size in self.classes)).view(-1, len(self.classes))
            self.register_buffer("every", self.codec.encode(numbers), persistent=False)

    def _distribution(self, output: Tensor) -> MultiCategorical:
        return MultiCategorical(output, self.classes, unimix=self.unimix)

    def drawn(
        self, output: Float[Tensor, "*lead outputs"], noise: Float[Tensor, "*lead action"]
    ) -> Float[Tensor, "*lead action"]:
        return self._distribution(output).sample(noise)

    def mode(self, latent: Float[Tensor, "*lead latent"]) -> Float[Tensor, "*lead action"]:
        return self._distribution(self(latent)).mode()

    def choices(self, latent: Float[Tensor, "rows latent"], noise: Float[Tensor, "rows action"]) -> Choices:
        distribution = self._distribution(self(latent))
        if not self.enumerates:
            action = distribution.sample(noise)
            return Choices(action[None], torch.ones_like(action[None, :, 0]), distribution.entropy())
        action = self.every[:, None].expand(-1, latent.shape[0], -1)
        return Choices(action, distribution.log_prob(action).exp(), distribution.entropy())


def make_tdmpc_policy(
    *,
    action: ActionSpec | Mapping[str, Any],
    style: Style,
    noise_std: float,
    unimix: float,
    **arguments: Any,
) -> TDMPCPolicy:
    """The policy that the action space and the algorithm call for. `noise_std` is TD-MPC's, `unimix` that of discrete
    actions."""
    spec = action_spec(action)
    if spec.kind == "discrete":
        return CategoricalPrior(action=spec, style=style, unimix=unimix, **arguments)
    if style == "tdmpc":
        return NoisyMean(action=spec, style=style, noise_std=noise_std, **arguments)
    return SquashedGaussian(action=spec, style=style, **arguments)
