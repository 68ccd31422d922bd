"""What MuZero is trained towards: returns, rewards and search policies of recorded steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_lab.components.frame_stack import FrameStack
from rl_lab.components.muzero.model import MuZeroModel
from rl_lab.components.planners.mcts import MCTS
from rl_lab.errors import DataError
from rl_lab.losses.returns import lambda_returns, masked_discount
from rl_lab.losses.unrolled import EpisodeMasks, absorb, bootstrap_positions, episode_masks, unrolled_n_step_returns
from rl_lab.records import SequenceBatch

POLICY, VALUE, ACTIONS = "search.policy", "search.value", "search.actions"  # fields that a search adds to a record


class Targets(NamedTuple):
    """Targets of an unroll of K steps; its states are the window's first K + 1 records."""

    value: Float[Tensor, "batch states"]
    reward: Float[Tensor, "batch steps"]  # on arriving at the records 1 … K
    policy: Float[Tensor, "batch states edges"]
    actions: Float[Tensor, "batch states edges action"] | None  # those that the policy is over; None: all classes
    masks: EpisodeMasks


class MuZeroTargets:
    """Makes targets from windows of records. `model` is the slow copy, `planner` searches in it."""

    def __init__(
        self,
        *,
        model: MuZeroModel,
        planner: MCTS,
        frames: FrameStack,
        mask: str | None,  # the observation key of legal actions
        unroll: int,
        discount: float,  # negative where two players alternate
        td_steps: int,
        lambda_: float | None,
        bootstrap: Literal["network", "search"],
        correction_interval: int | None,
        reanalyze: float,
    ) -> None:
        self.model, self.planner, self.frames, self.mask = model, planner, frames, mask
        self.states, self.discount, self.td_steps, self.lambda_ = unroll + 1, discount, td_steps, lambda_
        self.bootstrap, self.correction_interval, self.reanalyze = bootstrap, correction_interval, reanalyze

    @torch.no_grad()
    def make(
        self, batch: SequenceBatch, lengths: Int[Tensor, " batch"] | None = None
    ) -> tuple[Targets, dict[str, Tensor] | None]:
        """Targets of the windows' first records, whose returns have `lengths` (None: all of them `td_steps`), and what
        was found where they were searched again."""
        first = self.frames.context
        stop = first + self.states
        masks = episode_masks(batch.is_last[:, first:], batch.is_terminal[:, first:], self.states)
        renewed, windows = None, len(batch.reward)
        if count := round(self.reanalyze * windows):
            renewed = self.search_again(batch, count)
        if count < windows and POLICY not in batch.extras:
            raise DataError(
                f"The records hold no searches ('{POLICY}'): they were not collected by MuZero. Set workflow.reanalyze"
                "=1.0, so that all of them are searched."
            )

        def joined(name: str) -> Tensor:  # what was searched now, then what was stored
            stored = [batch.extras[name][count:, first:stop]] if count < windows else []
            return torch.cat([*([renewed[name]] if renewed else []), *stored])

        policy, actions = joined(POLICY), None if self.planner.enumerates else joined(ACTIONS)
        value = absorb(self.returns(batch, lengths), masks)
        return Targets(value, batch.reward[:, first + 1 : stop], policy, actions, masks), renewed

    # Returns ----------------------------------------------------------------------------------------------------------

    def returns(self, batch: SequenceBatch, lengths: Int[Tensor, " batch"] | None) -> Float[Tensor, "batch states"]:
        """n-step or λ-returns of the first records, bootstrapped from the slow copy's values or the stored ones."""
        first = self.frames.context
        reward, is_last = batch.reward[:, first:], batch.is_last[:, first:]
        is_terminal = batch.is_terminal[:, first:]
        if self.lambda_ is not None:
            every = torch.arange(is_last.shape[1], device=reward.device).expand_as(is_last)
            mix = self.lambda_ * (1.0 - is_last.float())
            live = masked_discount(is_terminal, self.discount)
            return lambda_returns(reward, live, self._values(batch, every), mix)[:, : self.states]
        steps = self.td_steps if lengths is None else lengths.to(reward.device)
        position = bootstrap_positions(is_last, steps, self.states)
        value = self._values(batch, position) * (1.0 - is_terminal.gather(1, position).float())
        return unrolled_n_step_returns(reward, position, value, discount=self.discount, steps=self.td_steps)

    def return_lengths(self, batch: SequenceBatch, records: int) -> Int[Tensor, " batch"] | None:
        """n, and less for old records, whose actions are those of a policy that is gone. `records`: how many were
        collected so far. None: n for all."""
        if self.correction_interval is None or batch.indices is None:
            return None
        age = (records - batch.indices[:, self.frames.context]).clamp(min=0)
        return (self.td_steps - age // self.correction_interval).clamp(1, self.td_steps)

    def _values(self, batch: SequenceBatch, position: Int[Tensor, "batch states"]) -> Float[Tensor, "batch states"]:
        """The value of these records; where nothing was searched (an episode's last record, random play) always the
        network's."""
        first = self.frames.context
        values = self.model.value(self.seen(batch, first + position)).view(position.shape[1], -1).t()
        if self.bootstrap == "network" or VALUE not in batch.extras:
            return values
        searched = (batch.extras[POLICY][:, first:].sum(-1) > 0).gather(1, position)
        return torch.where(searched, batch.extras[VALUE][:, first:].gather(1, position), values)

    # Searches ---------------------------------------------------------------------------------------------------------

    def search_again(self, batch: SequenceBatch, count: int) -> dict[str, Tensor]:
        """Search the first records of `count` windows by the slow copy, without noise: fields to be stored with them,
        [windows, states, …]."""
        first = self.frames.context
        times = first + torch.arange(self.states, device=batch.reward.device).expand(count, -1)
        seen = self.seen(batch, times)
        search = self.planner.search(self.planner.simulator.observe(seen), legal=self._legal(seen))
        decided = ~batch.is_last[:count, first : first + self.states]

        def by_window(value: Tensor) -> Tensor:  # [states × count, …] → [count, states, …]
            return value.unflatten(0, (self.states, count)).transpose(0, 1)

        fields = {POLICY: by_window(search.policy) * decided[..., None], VALUE: by_window(search.value) * decided}
        if not self.planner.enumerates:
            fields[ACTIONS] = by_window(search.actions)
        return fields

    def _legal(self, seen: Mapping[str, Tensor]) -> Bool[Tensor, "rows actions"] | None:
        """An episode's last record may allow no action: nothing is taken from there, so all of them are searched."""
        if self.mask is None:
            return None
        legal = seen[self.mask] > 0
        return legal | ~legal.any(-1, keepdim=True)

    def seen(self, batch: SequenceBatch, position: Int[Tensor, "windows times"]) -> dict[str, Tensor]:
        """Observations at these records of the first windows, [times × windows, …], ordered by time."""
        windows = len(position)
        observation = {key: value[:windows] for key, value in batch.observation.items()}
        if not self.frames.specs:
            rows = torch.arange(windows, device=position.device)
            return {key: value[rows, position.t()].flatten(0, 1) for key, value in observation.items()}
        parts = [self.frames.at(observation, batch.is_first[:windows], column) for column in position.unbind(1)]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def clipped_targets(model: MuZeroModel, value: Tensor, reward: Tensor) -> str | None:
    """A warning for the user where the model's bins do not reach the targets; None where they do."""
    for name, support, targets in (
        ("prediction", model.prediction.support, value),
        ("dynamics", model.dynamics.support, reward),
    ):
        if support.outside(targets).any():
            return (
                f"components.{name}.limit={support.limit:g} is too small: targets as large as "
                f"{float(targets.abs().max()):g} were seen, and are clipped. Set it to at least the square root of the "
                "largest return (and the bins to 2·limit + 1)."
            )
    return None
