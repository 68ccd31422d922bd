"""The last few observations seen together, from records that hold each of them once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from rl_lab.components.spaces import SpecLike, observation_specs
from rl_lab.errors import ConfigError
from rl_lab.specs import ObservationSpec

SEEN = "frame_stack.seen"  # in the agent's memory: whether an environment has seen anything in this episode
FRAMES = "frame_stack."  # … and the frames of each key


class FrameStack(nn.Module):
    """Puts the last `depth` observations together as the environment's own `frame_stack` would: images by channel,
    vectors end to end where there is no image, the oldest first, and the first one of an episode in place of those
    before it.

    In a batch the frames are gathered from the records before; an agent keeps them in its memory.
    """

    def __init__(self, *, observation: Mapping[str, SpecLike], depth: int) -> None:
        super().__init__()
        if depth < 1:
            raise ConfigError(f"depth={depth}: expected at least 1, which stacks nothing.")
        specs = observation_specs(observation)
        kind = "image" if any(spec.kind == "image" for spec in specs.values()) else "vector"
        self.depth = depth
        self.specs = {key: spec for key, spec in specs.items() if spec.kind == kind and depth > 1}
        # What the network sees.
        self.observation = specs | {key: _stacked(spec, depth) for key, spec in self.specs.items()}

    @property
    def context(self) -> int:
        """Records that must come before one in a batch."""
        return self.depth - 1

    def at(
        self, observation: Mapping[str, Tensor], is_first: Bool[Tensor, "batch time"], position: int | Tensor
    ) -> dict[str, Tensor]:
        """Observations [batch, …] as an agent would have seen them at one record of each sequence.

        `observation` is [batch, time, …], `position` one index for all sequences or [batch]; `context` records must lie
        before it.
        """
        if isinstance(position, int) and not self.specs:
            return {key: value[:, position] for key, value in observation.items()}
        rows = torch.arange(len(is_first), device=is_first.device)
        at = torch.full_like(rows, position) if isinstance(position, int) else position
        result = {key: value[rows, at] for key, value in observation.items() if key not in self.specs}
        if self.specs:
            steps = self._steps(is_first, at)
        for key in self.specs:
            result[key] = self._join(key, observation[key][rows[:, None], steps])
        return result

    def _steps(self, is_first: Tensor, at: Tensor) -> Int[Tensor, "batch depth"]:
        """Which records the frames come from: none from before the episode's first."""
        numbers = torch.arange(is_first.shape[1], device=at.device)
        start = torch.where(is_first & (numbers <= at[:, None]), numbers, 0).amax(1)
        ages = torch.arange(1 - self.depth, 1, device=at.device)
        return torch.maximum(at[:, None] + ages, start[:, None])

    def _join(self, key: str, frames: Tensor) -> Tensor:
        """[batch, depth, *shape] → [batch, *stacked shape]."""
        if self.specs[key].kind == "image":
            return frames.movedim(1, -2).flatten(-2)
        return frames.flatten(1)

    # Acting -----------------------------------------------------------------------------------------------------------

    def initial(self, num_envs: int, device: torch.device) -> dict[str, Tensor]:
        """The memory before the first observation: zeros."""
        if not self.specs:
            return {}
        memory = {SEEN: torch.zeros(num_envs, dtype=torch.bool, device=device)}
        for key, spec in self.specs.items():
            shape, dtype = self.observation[key].shape, getattr(torch, spec.dtype)
            memory[FRAMES + key] = torch.zeros(num_envs, *shape, dtype=dtype, device=device)
        return memory

    def push(
        self, observation: Mapping[str, Tensor], memory: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], dict[str, Tensor]]:
        """Stacked observations [env, …], and the new memory. An episode begins where the memory was cleared."""
        if not self.specs:
            return observation, {}
        seen, result = memory[SEEN], dict(observation)
        updated = {SEEN: torch.ones_like(seen)}
        for key, spec in self.specs.items():
            frame, old = observation[key], memory[FRAMES + key]
            if spec.kind != "image":
                frame = frame.flatten(1)
            later = torch.cat([old[..., frame.shape[-1] :], frame], -1)
            anew = frame.repeat(*[1] * (frame.ndim - 1), self.depth)
            stacked = torch.where(seen.view(-1, *[1] * (frame.ndim - 1)), later, anew)
            result[key] = updated[FRAMES + key] = stacked
        return result, updated

    def wiring(self) -> dict[str, str]:
        """For people: which keys are stacked."""
        return {key: f"the last {self.depth}, stored once each, are stacked" for key in self.specs}


def _stacked(spec: ObservationSpec, depth: int) -> ObservationSpec:
    if spec.kind == "image":
        return ObservationSpec(spec.kind, (*spec.shape[:-1], spec.shape[-1] * depth), spec.dtype)
    return ObservationSpec(spec.kind, (spec.encoded_size * depth,), spec.dtype)
