"""A causal transformer whose past travels as a tensor: the same code runs over whole sequences and step by step."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import at_least_float32
from rl_lab.nn.layers import Linear, RMSNorm


class BranchSteps(NamedTuple):
    """Keys and values of the own steps of branches, time first; a row is one head of one branch."""

    keys: Float[Tensor, "recent rows head"]
    values: Float[Tensor, "recent rows head"]


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, width: int, heads: int, *, feed_forward: int) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"A transformer of width {width} cannot be shared among {heads} heads: choose a divisor.")
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = RMSNorm(width), RMSNorm(width)
        self.inputs = Linear(width, 3 * width)
        self.output = Linear(width, width)
        self.expand, self.contract = Linear(width, feed_forward), Linear(feed_forward, width)

    def forward(
        self,
        x: Float[Tensor, "n t width"],
        past: Float[Tensor, "n past pair"],
        bias: Float[Tensor, "n heads t seen"],
    ) -> tuple[Float[Tensor, "n t width"], Float[Tensor, "n t pair"]]:
        """`past` are the keys and values of earlier steps; `bias` is added to the scores, -inf hides a step.

        Also returns the keys and values of these steps.
        """
        query, own = self._project(x)
        key, value = torch.cat([past.to(own.dtype), own], 1).chunk(2, -1)
        attended = F.scaled_dot_product_attention(
            self._by_head(query), self._by_head(key), self._by_head(value), attn_mask=bias.to(query.dtype)
        )
        return self._finish(x, attended), own

    def branch(
        self,
        x: Float[Tensor, "n t width"],
        past: Float[Tensor, "n past pair"],
        recent: BranchSteps,
        step: Int[Tensor, ""],
        past_bias: Float[Tensor, "n heads t past"],
        recent_bias: Float[Tensor, "heads 1 recent"],
    ) -> tuple[Float[Tensor, "n t width"], BranchSteps]:
        """One step of each of t branches that share the past and have steps of their own since, in `recent`.

        The keys of the past are read once for all branches, not copied for each. Also returns `recent` with this step
        at place `step`; where no gradient is wanted it is written in place.
        """
        lead, heads = x.shape[:2], self.heads
        query, own = self._project(x)
        write = Tensor.index_copy if torch.is_grad_enabled() else Tensor.index_copy_
        parts = zip(recent, own.chunk(2, -1), strict=True)
        recent = BranchSteps(*(write(old, 0, step.view(1), new.reshape(1, *old.shape[1:])) for old, new in parts))
        query = query * (x.shape[-1] // heads) ** -0.5
        key, value = (self._by_head(part) for part in past.to(own.dtype).chunk(2, -1))
        past_scores = self._by_head(query) @ key.transpose(-1, -2) + past_bias
        recent_scores = query.reshape(-1, 1, recent.keys.shape[-1]) @ recent.keys.permute(1, 2, 0)
        recent_scores = recent_scores.view(*lead, heads, -1).transpose(1, 2) + recent_bias
        weights = torch.softmax(at_least_float32(torch.cat([past_scores, recent_scores], -1)), -1).to(own.dtype)
        past_weights, recent_weights = weights.split([past.shape[1], recent_scores.shape[-1]], -1)
        attended = recent_weights.transpose(1, 2).flatten(0, 2).unsqueeze(1) @ recent.values.transpose(0, 1)
        attended = attended.view(*lead, heads, -1).transpose(1, 2) + past_weights @ value
        return self._finish(x, attended), recent

    def no_steps(self, lead: tuple[int, int], horizon: int, like: Tensor) -> BranchSteps:
        """Room for `horizon` steps of [n, t] branches."""
        width = self.output.in_features
        shape = (horizon, lead[0] * lead[1] * self.heads, width // self.heads)
        return BranchSteps(like.new_zeros(shape), like.new_zeros(shape))

    def _project(self, x: Float[Tensor, "n t width"]) -> tuple[Float[Tensor, "n t width"], Float[Tensor, "n t pair"]]:
        """The query, and key and value side by side."""
        query, own = self.inputs(self.attention_norm(x)).split([x.shape[-1], 2 * x.shape[-1]], -1)
        return query, own

    def _finish(self, x: Float[Tensor, "n t width"], attended: Float[Tensor, "n heads t head"]) -> Tensor:
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.contract(F.silu(self.expand(self.feed_forward_norm(x))))

    def _by_head(self, x: Float[Tensor, "n s width"]) -> Float[Tensor, "n heads s head"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def distance_slopes(heads: int, window: int) -> Float[Tensor, "heads window"]:
    """ALiBi: scores fall in proportion to the distance, steeply in the first head and hardly in the last."""
    slopes = 2.0 ** (-8.0 * (torch.arange(heads) + 1.0) / heads)
    return -slopes[:, None] * torch.arange(window)
