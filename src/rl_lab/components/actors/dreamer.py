"""Actors: from features to a distribution over encoded actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.actions import ActionCodec
from rl_lab.components.spaces import action_spec
from rl_lab.errors import ConfigError, nearest
from rl_lab.nn.distributions import Distribution, MultiCategorical, NoiseKind, UnimixCategorical, draw_noise
from rl_lab.nn.layers import Head
from rl_lab.nn.normals import BoundedNormal, TanhNormal, TruncatedNormal
from rl_lab.nn.styles import StyleLike, layer_style
from rl_lab.specs import ActionSpec


class Actor(nn.Module, ABC):
    """`forward` gives raw parameters in float32, `distribution` what they mean.

    Sampled actions are encoded (one-hots or continuous values); `codec` turns them into stored ones and back.
    """

    action_kind: ClassVar[Literal["continuous", "discrete"]]
    noise: ClassVar[NoiseKind]

    def __init__(
        self,
        *,
        feature_size: int,
        action: ActionSpec | Mapping[str, Any],
        units: int = 256,
        layers: int = 3,
        outscale: float = 0.01,
        style: StyleLike = None,
    ) -> None:
        super().__init__()
        self.codec = ActionCodec(action)
        if self.codec.spec.kind != self.action_kind:
            raise ConfigError(
                f"{type(self).__name__} is for {self.action_kind} actions, but the environment's are "
                f"{self.codec.spec.kind}. Use actor=auto to get the one that fits."
            )
        outputs = self._output_sizes(self.codec.encoded_size)
        self.head = Head(feature_size, outputs, units=units, layers=layers, outscale=outscale, style=layer_style(style))

    def forward(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead params"]:
        return self.head(features)

    @abstractmethod
    def distribution(self, params: Float[Tensor, "*lead params"]) -> Distribution: ...

    @abstractmethod
    def _output_sizes(self, size: int) -> Sequence[int]: ...

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """The shape of the noise that one sample needs."""
        return (self.codec.encoded_size,)

    def draw_noise(self, lead: Sequence[int], device: torch.device | str) -> Float[Tensor, "*lead size"]:
        """Noise for `lead` samples, from the device's global generator."""
        return draw_noise(self.noise, (*lead, *self.noise_shape), device)


class CategoricalActor(Actor):
    """Discrete actions, one categorical per component, each with a 1 % uniform share."""

    action_kind = "discrete"
    noise = UnimixCategorical.noise

    def __init__(self, *, unimix: float = 0.01, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.unimix = unimix
        self.classes = self.codec.spec.classes

    def distribution(self, params: Float[Tensor, "*lead params"]) -> UnimixCategorical | MultiCategorical:
        if len(self.classes) == 1:
            return UnimixCategorical(params, unimix=self.unimix)
        return MultiCategorical(params, self.classes, unimix=self.unimix)

    def _output_sizes(self, size: int) -> Sequence[int]:
        return (size,)


class BoundedNormalActor(Actor):
    """DreamerV3's continuous actor: a normal whose mean is in [-1, 1] and whose deviation is in [0.1, 1]."""

    action_kind = "continuous"
    noise = BoundedNormal.noise

    def __init__(self, *, min_std: float = 0.1, max_std: float = 1.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.min_std, self.max_std = min_std, max_std

    def distribution(self, params: Float[Tensor, "*lead params"]) -> BoundedNormal:
        return BoundedNormal(params, min_std=self.min_std, max_std=self.max_std)

    def _output_sizes(self, size: int) -> Sequence[int]:
        return (size, size)


class TanhNormalActor(Actor):
    """Dreamer V1's actor: a normal squashed by tanh."""

    action_kind = "continuous"
    noise = TanhNormal.noise

    def __init__(
        self, *, init_std: float = 5.0, min_std: float = 1e-4, mean_scale: float = 5.0, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.init_std, self.min_std, self.mean_scale = init_std, min_std, mean_scale

    def distribution(self, params: Float[Tensor, "*lead params"]) -> TanhNormal:
        return TanhNormal(params, init_std=self.init_std, min_std=self.min_std, mean_scale=self.mean_scale)

    def _output_sizes(self, size: int) -> Sequence[int]:
        return (2 * size,)


class TruncatedNormalActor(Actor):
    """DreamerV2's continuous actor: a normal cut off at ±1."""

    action_kind = "continuous"
    noise = TruncatedNormal.noise

    def __init__(self, *, min_std: float = 0.1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.min_std = min_std

    def distribution(self, params: Float[Tensor, "*lead params"]) -> TruncatedNormal:
        return TruncatedNormal(params, min_std=self.min_std)

    def _output_sizes(self, size: int) -> Sequence[int]:
        return (size, size)


ACTORS: dict[str, type[Actor]] = {
    "categorical": CategoricalActor,
    "bounded_normal": BoundedNormalActor,
    "tanh_normal": TanhNormalActor,
    "truncated_normal": TruncatedNormalActor,
}


def make_actor(
    *, action: ActionSpec | Mapping[str, Any], actor: str = "auto", continuous: str = "bounded_normal",
    unimix: float = 0.01, **arguments: Any,
) -> Actor:  # fmt: skip
    """The named actor; `auto` is categorical, with the share `unimix`, for discrete actions and the one named
    `continuous` for others."""
    spec = action_spec(action)
    if actor == "auto":
        actor = "categorical" if spec.kind == "discrete" else continuous
    if actor not in ACTORS:
        raise ConfigError(f"actor='{actor}' does not exist.{nearest(actor, ['auto', *ACTORS])}")
    if actor == "categorical":
        arguments = {"unimix": unimix, **arguments}
    return ACTORS[actor](action=spec, **arguments)
