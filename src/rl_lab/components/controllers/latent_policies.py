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
from rl_lab.nn.distributions import HALF_LOG_TWO_PI, MultiCategorical, NoiseKind, draw_noise
from rl_lab.nn.latent_mlp import LatentMLP, Style, hidden_layers
from rl_lab.specs import ActionSpec

MOST_CHOICES = 64  # up to so many joint discrete actions are all tried when the policy learns
EDGE = 1.0 - 1e-6


class Choices(NamedTuple):
    """Actions with weights, such that Σ weight · Q(latent, action) is what the policy is worth; and how random it is.

    The gradient of continuous actions runs through the action itself, that of discrete ones through the weights.
    """

    action: Float[Tensor, "choices rows action"]
    weight: Float[Tensor, "choices rows"]
    entropy: Float[Tensor, " rows"]


class LatentPolicy(nn.Module, ABC):
    """π(a | z). Actions are encoded: entries in [-1, 1], or concatenated one-hots."""

    noise: ClassVar[NoiseKind] = "normal"
    choice_count = 1  # of what `choices` returns

    def __init__(
        self,
        *,
        latent_size: int,
        action: ActionSpec | Mapping[str, Any],
        outputs: int,  # for each entry of the encoded action
        units: int = 512,
        layers: int = 2,
        style: Style = "tdmpc2",
    ) -> None:
        super().__init__()
        self.codec = ActionCodec(action)
        self.action_size = self.codec.encoded_size
        hidden = hidden_layers(style, units, layers)
        self.network = LatentMLP(latent_size, hidden, outputs * self.action_size, style=style)

    def draw_noise(self, lead: Sequence[int]) -> Float[Tensor, "*lead action"]:
        """What so many samples take, from the device's global generator."""
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
        """An action from what `forward` gave."""

    @abstractmethod
    def mode(self, latent: Float[Tensor, "*lead latent"]) -> Float[Tensor, "*lead action"]: ...

    @abstractmethod
    def choices(self, latent: Float[Tensor, "rows latent"], noise: Float[Tensor, "rows action"]) -> Choices:
        """For learning."""


class SquashedGaussian(LatentPolicy):
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


class NoisyMean(LatentPolicy):
    """TD-MPC's: tanh of a mean, plus normal noise that is cut off; without an entropy."""

    def __init__(self, *, noise_std: float = 0.05, noise_limit: float = 0.3, **arguments: Any) -> None:
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


class CategoricalPrior(LatentPolicy):
    """Discrete actions: a categorical for each component, with a small uniform share.

    With few joint actions the policy learns from the values of all of them, which is exact; with more of them from the
    value of a sample, whose gradient is passed straight through.
    """

    noise = "exponential"
    every: Tensor

    def __init__(self, *, unimix: float = 0.01, **arguments: Any) -> None:
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


def make_latent_policy(
    *,
    action: ActionSpec | Mapping[str, Any],
    style: Style = "tdmpc2",
    noise_std: float = 0.05,
    unimix: float = 0.01,
    **arguments: Any,
) -> LatentPolicy:
    """The policy that the action space and the algorithm call for. `noise_std` is TD-MPC's, `unimix` that of discrete
    actions."""
    spec = action_spec(action)
    if spec.kind == "discrete":
        return CategoricalPrior(action=spec, style=style, unimix=unimix, **arguments)
    if style == "tdmpc":
        return NoisyMean(action=spec, style=style, noise_std=noise_std, **arguments)
    return SquashedGaussian(action=spec, style=style, **arguments)
