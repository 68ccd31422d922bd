"""A transformer state-space model in the manner of TransDreamer (Chen et al., 2022), with DreamerV3's latents.

The deterministic path is a causal transformer over the steps of the episode so far. The posterior looks at the
observation alone, so that all steps of a sequence are encoded, sampled and filtered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rl_lab.components.world_models.base import (
    CategoricalModel,
    Dream,
    LatentState,
    Policy,
)
from rl_lab.errors import ConfigError
from rl_lab.nn.layers import MLP, Linear, NormedLinear, RMSNorm
from rl_lab.nn.transformer import BranchSteps, TransformerBlock, distance_slopes
from rl_lab.records import FieldSpec

LONGEST_WINDOW = 256  # the memory counts its steps in numbers that bfloat16 must hold exactly
STEPS = ("advance", "transform", "posterior", "observe_step", "predict_step")  # a pass over a sequence stands for these

Recent = tuple[BranchSteps, ...]  # the dreams' own steps, by layer


class SharedPast(NamedTuple):
    """The past that all dreams which start in one sequence attend to."""

    slots: Float[Tensor, "b past slot"]  # the memory before the sequence, and its steps
    distance: Int[Tensor, "t past"]  # from the step that each dream starts after
    visible: Bool[Tensor, "b t past"]  # whether a step is of the start's episode, and not after it


class TransformerSSM(CategoricalModel):
    """h_t = transformer(x_1 … x_t), x_t = token(z_{t-1}, a_{t-1});  prior p(z_t | h_t);  posterior q(z_t | e_t).

    A step sees itself and the `window` - 1 steps before it, as far as they belong to its episode; what a score gains
    or loses by distance is learned, one number for each head. A state's memory [*lead, window - 1, slot] is the last
    steps, newest last: in each slot the keys and values of all layers and, as the last number, how many steps of the
    episode the memory then held. Distances, not positions: the memory can shift. Zeros are an empty memory.
    """

    compiled_steps = ("observe_step", "_imagine_step", "transform", "dream_step")

    def __init__(
        self,
        *,
        embed_size: int,
        action_size: int,
        deter: int,
        hidden: int,
        groups: int,
        classes: int,
        window: int,
        layers: int = 2,
        heads: int = 4,
        feed_forward: int | None = None,
        unimix: float = 0.01,
        prior_layers: int = 2,
    ) -> None:
        super().__init__(groups=groups, classes=classes, unimix=unimix)
        if not 2 <= window <= LONGEST_WINDOW:
            raise ConfigError(
                f"window={window}: the transformer must see at least 2 and can see at most {LONGEST_WINDOW} steps. "
                "Set components.rssm.window (by default it is half of workflow.sequence_length)."
            )
        self.deter, self.window = deter, window
        self.token = NormedLinear(self.stoch_size + action_size, deter)
        blocks = (TransformerBlock(deter, heads, feed_forward=feed_forward or 4 * deter) for _ in range(layers))
        self.blocks: Sequence[TransformerBlock] = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.distance_bias = nn.Parameter(distance_slopes(heads, window))
        self.output_norm = RMSNorm(deter)
        self.posterior_layer = NormedLinear(embed_size, hidden)
        self.posterior_logits = Linear(hidden, self.stoch_size)
        self.prior_layers = MLP(deter, hidden, prior_layers)
        self.prior_logits = Linear(hidden, self.stoch_size)

    # One step at a time -----------------------------------------------------------------------------------------------

    def initial(self, batch: int) -> LatentState:
        slot = 2 * self.deter * len(self.blocks) + 1
        memory = self.distance_bias.new_zeros(batch, self.window - 1, slot)
        return super().initial(batch)._replace(memory=memory)

    def advance(self, state: LatentState, action: Float[Tensor, "b action"]) -> tuple[Tensor, Tensor]:
        memory = self._memory(state)
        deter, slots = self.transform(state.stoch.unsqueeze(1), action.unsqueeze(1), memory, memory[:, -1:, -1])
        return deter.squeeze(1), torch.cat([memory[:, 1:].to(slots.dtype), slots], 1)

    def prior(self, deter: Float[Tensor, "*lead deter"]) -> Float[Tensor, "*lead groups classes"]:
        return self.grid(self.prior_logits(self.prior_layers(deter)))

    def posterior(self, deter: Tensor, embed: Float[Tensor, "*lead embed"]) -> Float[Tensor, "*lead groups classes"]:
        """q(z | e): h is not looked at, so no step waits for another."""
        return self.grid(self.posterior_logits(self.posterior_layer(embed)))

    # Whole sequences --------------------------------------------------------------------------------------------------

    @property
    def _in_one_pass(self) -> bool:
        """Whether a sequence may be filtered, and dreamt from, at once. A model with a step of its own goes step by
        step; so does one whose posterior may look at h."""
        return not any(
            name in vars(self) or getattr(type(self), name) is not getattr(TransformerSSM, name) for name in STEPS
        )

    def observe(
        self,
        embed: Float[Tensor, "b t embed"],
        prev_action: Float[Tensor, "b t action"],
        is_first: Bool[Tensor, "b t"],
        initial: LatentState,
        noise: Float[Tensor, "t b groups classes"] | None = None,
    ) -> tuple[LatentState, Float[Tensor, "b t groups classes"]]:
        """Filter sequences in one pass. The memories of the states are views of one tensor and cost nothing."""
        if not self._in_one_pass:
            return super().observe(embed, prev_action, is_first, initial, noise)
        if noise is None:
            noise = self.draw_noise(embed.shape[1::-1], embed.device)
        logits = self.posterior(embed[..., :0], embed)
        stoch = self.sample(logits, noise.transpose(0, 1), embed.dtype)
        keep = (~is_first).to(embed.dtype).unsqueeze(-1)
        before = torch.cat([initial.stoch.to(embed.dtype).unsqueeze(1), stoch[:, :-1]], 1) * keep
        memory = self._memory(initial)
        earlier = _steps_since_start(is_first, memory[:, -1, -1])
        transform = self.compiled.get("transform", self.transform)
        deter, slots = transform(before, prev_action.to(embed.dtype) * keep, memory, earlier)
        steps = torch.cat([memory.to(slots.dtype), slots], 1)
        memories = steps[:, 1:].unfold(1, self.window - 1, 1).transpose(2, 3)
        return LatentState(deter, stoch, memories), logits

    def transform(
        self,
        stoch: Float[Tensor, "b t stoch"],
        action: Float[Tensor, "b t action"],
        memory: Float[Tensor, "b past slot"],
        earlier: Float[Tensor, "b t"],
    ) -> tuple[Float[Tensor, "b t deter"], Float[Tensor, "b t slot"]]:
        """h after each step, and the slot of each step. `earlier`: how many steps before it are of its episode."""
        x = self._tokens(stoch, action)
        earlier = earlier.clamp_max(self.window - 1)
        bias = self._score_bias(earlier)
        slots = []
        for block, past in zip(self.blocks, self._by_layer(memory), strict=True):
            x, own = block(x, past, bias)
            slots.append(own)
        held = (earlier + 1.0).clamp_max(self.window - 1)
        return self.output_norm(x), torch.cat([*slots, held.unsqueeze(-1).to(x.dtype)], -1)

    def _tokens(self, stoch: Tensor, action: Tensor) -> Float[Tensor, "*lead deter"]:
        action = action / action.abs().clamp_min(1.0).detach()
        return self.token(torch.cat([stoch, action.to(stoch.dtype)], -1))

    def _score_bias(self, earlier: Float[Tensor, "b t"]) -> Float[Tensor, "b heads t seen"]:
        """The learned bias of each distance; -inf for what lies ahead, too far back, or in another episode."""
        past, steps = self.window - 1, earlier.shape[1]
        index = torch.arange(past + steps, device=earlier.device)
        distance = index[past:, None] - index
        visible = (distance >= 0) & (distance <= earlier.unsqueeze(-1))
        bias = self.distance_bias[:, distance.clamp(0, past)]
        return torch.where(visible.unsqueeze(1), bias, -torch.inf)

    def _by_layer(self, slots: Float[Tensor, "b past slot"]) -> tuple[Float[Tensor, "b past pair"], ...]:
        return slots[..., :-1].chunk(len(self.blocks), -1)

    def _memory(self, state: LatentState) -> Float[Tensor, "b past slot"]:
        memory = self.initial(state.stoch.shape[0]).memory if state.memory is None else state.memory
        assert memory is not None
        return memory.flatten(0, -3)

    # Dreams -----------------------------------------------------------------------------------------------------------

    def starts(self, states: LatentState) -> LatentState:
        """Every filtered state as the start of a dream. Memories keep [b, t] in front: they stay views of one shared
        tensor."""
        if not self._in_one_pass:
            return super().starts(states)
        states = states.detach()
        return LatentState(states.deter.flatten(0, 1), states.stoch.flatten(0, 1), states.memory)

    def imagine(
        self,
        start: LatentState,
        policy: Policy,
        *,
        latent_noise: Float[Tensor, "horizon b groups classes"],
        action_noise: Float[Tensor, "horizon b *action"],
    ) -> Dream:
        """Roll the prior forward. Dreams from whole sequences (`starts`) attend to one past for each sequence."""
        if start.memory is None or start.memory.ndim == 3:
            return super().imagine(start, policy, latent_noise=latent_noise, action_noise=action_noise)
        past, horizon = _shared_past(start.memory), len(latent_noise)
        lead = (start.memory.shape[0], start.memory.shape[1])
        state = LatentState(start.deter, start.stoch)
        own = tuple(block.no_steps(lead, horizon, past.slots) for block in self.blocks)
        states, actions = [state], []
        dream_step = self.compiled.get("dream_step", self.dream_step)
        steps = torch.arange(horizon, device=past.slots.device)
        for step, *noise in zip(steps, latent_noise, action_noise, strict=True):
            state, action, own = dream_step(state, own, policy, *noise, past, step)
            states.append(state)
            actions.append(action)
        return Dream.stack(states, actions)

    def dream_step(
        self, state: LatentState, own: Recent, policy: Policy, latent_noise: Tensor, action_noise: Tensor,
        past: SharedPast, step: Int[Tensor, ""],
    ) -> tuple[LatentState, Tensor, Recent]:  # fmt: skip
        """One step of every dream. `own` holds the dreams' earlier steps."""
        action = policy(state.features, action_noise)
        x = self._tokens(state.stoch, action.to(state.stoch.dtype)).unflatten(0, past.visible.shape[:2])
        past_bias, own_bias = self._dream_bias(past, step, horizon=own[0].keys.shape[0])
        layers = []
        for block, slots, recent in zip(self.blocks, self._by_layer(past.slots), own, strict=True):
            x, recent = block.branch(x, slots, recent, step, past_bias.to(x.dtype), own_bias.to(x.dtype))
            layers.append(recent)
        deter = self.output_norm(x).flatten(0, 1)
        stoch = self.sample(self.prior(deter), latent_noise, deter.dtype)
        return LatentState(deter, stoch), action, tuple(layers)

    def _dream_bias(
        self, past: SharedPast, step: Int[Tensor, ""], *, horizon: int
    ) -> tuple[Float[Tensor, "b heads t past"], Float[Tensor, "heads 1 horizon"]]:
        """Attention biases by distance: for the past before the dream, and for the dream's own steps."""
        reach = self.window - 1
        distance = past.distance + step + 1
        visible = past.visible & (distance <= reach)
        past_bias = torch.where(visible.unsqueeze(1), self.distance_bias[:, distance.clamp(0, reach)], -torch.inf)
        distance = step - torch.arange(horizon, device=step.device)
        visible = (distance >= 0) & (distance <= reach)
        own_bias = torch.where(visible, self.distance_bias[:, distance.clamp(0, reach)], -torch.inf)
        return past_bias, own_bias.unsqueeze(1)

    # Latents in the replay --------------------------------------------------------------------------------------------

    def stored_specs(self) -> dict[str, FieldSpec]:
        """None: a memory is too large to keep with every record. Replayed sequences start from nothing."""
        return {}


def _steps_since_start(is_first: Bool[Tensor, "b t"], held: Float[Tensor, " b"]) -> Float[Tensor, "b t"]:
    """Number of earlier steps of the same episode, for each step; `held` is the number before the sequence."""
    index = torch.arange(is_first.shape[1], device=is_first.device)
    last_start = torch.where(is_first, index, -1).cummax(1).values
    return torch.where(last_start >= 0, (index - last_start).to(held.dtype), held.unsqueeze(1) + index)


def _shared_past(memory: Float[Tensor, "b t window slot"]) -> SharedPast:
    """The steps of which these memories are windows: the first one, and the newest slot of each other."""
    slots = torch.cat([memory[:, 0], memory[:, 1:, -1]], 1)
    index = torch.arange(slots.shape[1], device=memory.device)
    distance = index[memory.shape[2] - 1 :, None] - index
    held = memory[:, :, -1, -1].unsqueeze(-1)
    return SharedPast(slots, distance, (distance >= 0) & (distance < held))
