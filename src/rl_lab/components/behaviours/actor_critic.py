"""An actor and a critic that learn in dreams: what the Dreamers share, with their differences as named choices.

Dreams are time-major: state t = 0 … H, the start being state 0, and action t, which was chosen in state t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rl_lab.components.behaviours.recorded_dream import RecordedDream
from rl_lab.components.controllers.actors import Actor
from rl_lab.components.controllers.critics import Critic
from rl_lab.components.predictors import ContinuePredictor, RewardPredictor
from rl_lab.components.representation_learners.base import LatentState, StateSpaceModel
from rl_lab.components.return_computers import lambda_returns, recursive_returns
from rl_lab.errors import ConfigError
from rl_lab.nn.capture import compile_block
from rl_lab.nn.dream_kernel import PolicyArrays
from rl_lab.nn.host_threads import share_rows
from rl_lab.nn.normalizers import ReturnNormalizer
from rl_lab.nn.normed_layers import LayerRecord
from rl_lab.nn.precision import WorkingCopies

Losses = dict[str, Tensor]
Gradient = Literal["reinforce", "dynamics", "mixed"]
Timing = Literal["arrival", "departure"]
Root = Literal["predicted", "discounted", "undiscounted"]
# Of dreamed states: the model's reward and discount, the value, and the slow critic's, where it is needed.
Judgement = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class BehaviourRules:
    """Where the versions differ. The defaults are DreamerV3's.

    With `timing: arrival` the return of state t begins with the reward of state t + 1,
    R_t = r_{t+1} + d_{t+1}·((1 - λ)·v_{t+1} + λ·R_{t+1}); action t is credited with R_t, and state t counts as much as
    it is likely to be reached, d_0·…·d_t. With `departure` it begins with its own, R_t = r_t + d_t·((1 - λ)·v_{t+1} +
    λ·R_{t+1}); action t is credited with R_{t+1}, and state t counts d_0·…·d_{t-1}.
    """

    horizon: int = 15
    lambda_: float = 0.95
    timing: Timing = "arrival"
    drop_start: bool = False  # departure: the critic learns from state 1 on; action t counts as much as state t + 1
    root: Root = "predicted"  # d_0: by the model, or from the data, as discount·(1 - terminal) or 1 - terminal
    gradient: Gradient = "reinforce"  # of the return by the actor: by likelihood ratio, through the model, or both
    dynamics_share: float = 0.1  # mixed: of the gradient through the model
    dynamics_objective: Literal["return", "advantage"] = "return"  # what the gradient through the model raises
    target_critic: Literal["fast", "slow"] = "fast"  # whose values stand in returns and baselines
    entropy_scale: float = 3e-4
    slow_value_scale: float = 1.0  # of a loss that holds the critic to its slow copy; 0: none

    def __post_init__(self) -> None:
        if self.drop_start and self.timing == "arrival":
            raise ConfigError("drop_start=true belongs to timing=departure: with arrival, state 0 chooses action 0.")
        if self.horizon < 2:
            raise ConfigError(f"horizon={self.horizon}: a dream needs at least two steps.")


class Learned(NamedTuple):
    """The losses of actor (`policy`) and critic (`value`), and what is known of the states that dreams started from."""

    losses: Losses
    returns: Float[Tensor, " starts"]  # of the first state that has one
    slow_value: Float[Tensor, " starts"] | None
    metrics: dict[str, Tensor]


class _Credit(NamedTuple):
    """What actor and critic learn from, time first; the actor's part may be shorter by one."""

    returns: Tensor  # the critic's targets
    weight: Tensor  # of the critic's states
    gain: Tensor  # the return that each action is credited with; it may carry a gradient
    baseline: Tensor  # the value of the state in which it was chosen
    actor_weight: Tensor


class RecordedPolicy:
    """Chooses the actions of a dream step after step; how the actor's layers came to them is recorded."""

    def __init__(self, actor: Actor, record: LayerRecord) -> None:
        self._actor, self._record, self._at = actor, record, 0

    def arrays(self) -> PolicyArrays | None:
        """For a kernel that chooses all of them; None where these layers or this actor's samples have none."""
        return None if self._actor.sampling is None else self._record.policy_arrays(self._actor.sampling)

    def __call__(self, features: Tensor, noise: Tensor) -> Tensor:
        at, self._at = self._at, self._at + self._record.rows
        return self._actor.distribution(self._record.extend(features, at)).sample(noise)


class ActorCritic:
    """Dreams from given states and gives the losses of the actor and of the critic. They reach nothing else: not the
    world model that the dreams run through, not the critic that judges them, not the slow copy."""

    def __init__(
        self,
        rules: BehaviourRules,
        *,
        rssm: StateSpaceModel,
        reward: RewardPredictor,
        continuation: ContinuePredictor | None,
        discount: float,
        actor: Actor,
        critic: Critic,
        return_scale: ReturnNormalizer | None = None,
    ) -> None:
        self.rules, self.rssm, self.actor, self.critic = rules, rssm, actor, critic
        self.reward, self.continuation, self.discount = reward, continuation, discount
        self.return_scale = return_scale
        self._copies: WorkingCopies | None = None
        self._dream_rssm, self._dream_actor = rssm, actor
        self._recorded_dream: RecordedDream | None = None
        self.needs_slow = rules.target_critic == "slow" or rules.slow_value_scale > 0
        if self.needs_slow and critic.slow is None:
            raise ConfigError(
                "The critic has no slow copy, and target_critic=slow or slow_value_scale asks for one. Give it a "
                "slow_rate."
            )

    def compile_pieces(self, dtype: torch.dtype) -> None:
        """For computing in `dtype`. The plain methods stay the reference."""
        if self.rules.gradient == "reinforce" and dtype != torch.float32:
            self._copies = WorkingCopies(dtype)
            self._dream_rssm, self._dream_actor = self._copies.add(self.rssm), self._copies.add(self.actor)
            self._dream_rssm.compile_imagination()
        if self.rules.gradient != "reinforce" and self.rssm.initial(1).memory is None:
            self._recorded_dream = RecordedDream(self.rssm, self.actor, dtype)
            self._recorded_dream.compile()
        pieces = ["_judge", "_actor_critic_losses"]
        if not self.critic.fuse():
            pieces.append("evaluate_critic")
        if not self.actor.head.fuse():
            pieces.append("_evaluate_actor")
        for name in pieces:
            setattr(self, name, compile_block(getattr(self, name)))

    def learn(self, start: LatentState, is_terminal: Bool[Tensor, " starts"]) -> Learned:
        """`is_terminal`: the episode had ended in this state."""
        rules = self.rules
        with self._imagining():
            features, actions, record = self._dream(start)
        judgement, evaluated = self._evaluate(features)
        reward, live, value, slow_value = judgement
        with self._imagining():
            live = self._with_root(live, is_terminal)
            credit = self._credit(reward, live, value)
            scale = None if self.return_scale is None else self.return_scale(credit.returns.detach())
            score, gain = self._objectives(credit, scale)
        first, chosen = 1 if rules.drop_start else 0, credit.gain.shape[0]
        last = first + credit.returns.shape[0]
        policy_output = None
        if score is not None or rules.entropy_scale:
            policy_output = self._evaluate_actor(features[:chosen].detach(), record)
        losses, metrics = self._actor_critic_losses(
            policy_output, actions[:chosen].detach(), score, gain, credit.actor_weight, evaluated(first, last),
            credit.weight, credit.returns.detach(), None if slow_value is None else slow_value[first:last],
        )  # fmt: skip
        metrics |= {"dream/reward": reward.mean(), "dream/continue": live.mean(), "dream/value": value.mean()}
        metrics |= {"dream/return": credit.returns.mean()} | ({} if scale is None else {"dream/return_scale": scale})
        metrics = {name: metric.detach() for name, metric in metrics.items()}
        first_slow = None if slow_value is None else slow_value[0].detach()
        return Learned(losses, credit.returns[0].detach(), first_slow, metrics)

    # The dream --------------------------------------------------------------------------------------------------------

    def _imagining(self) -> AbstractContextManager:
        """A likelihood ratio needs no gradient of the dream; else it flows through the model, which stays as it is."""
        if self.rules.gradient == "reinforce":
            return torch.no_grad()
        judges = [self.rssm, self.reward, self.critic, *([] if self.continuation is None else [self.continuation])]
        return frozen(*judges)

    def _dream(self, start: LatentState) -> tuple[Tensor, Tensor, LayerRecord | None]:
        """Features [horizon + 1, starts, size], the actions taken in all but the last, and how the actor's layers came
        to them, where that is recorded."""
        lead, device = (self.rules.horizon, start.deter.shape[0]), start.deter.device
        noise, action_noise = self.rssm.draw_noise(lead, device), self.actor.draw_noise(lead, device)
        if self._recorded_dream is not None:
            dream = self._recorded_dream(start, noise, action_noise)
            return dream.features, dream.actions, None
        if self._copies is not None:
            self._copies.refresh()
        record = None
        if self.rules.gradient == "reinforce" and self._copies is None:
            record = self.actor.head.record(*lead, like=start.deter)
        policy = self._choose if record is None else RecordedPolicy(self.actor, record)
        dream = self._dream_rssm.imagine(start, policy, latent_noise=noise, action_noise=action_noise)
        return dream.features, dream.actions, record

    def _choose(self, features: Tensor, noise: Tensor) -> Tensor:
        return self._dream_actor.distribution(self._dream_actor(features.detach())).sample(noise)

    # The judgement ----------------------------------------------------------------------------------------------------

    def evaluate_critic(self, features: Tensor) -> Tensor:
        return self.critic(features)

    def _evaluate(self, features: Float[Tensor, "time starts size"]) -> tuple[Judgement, Callable[[int, int], Tensor]]:
        """What is thought of the dreamed states; the critic's outputs, with a gradient, from one time to another."""
        seen, record = features.detach(), None
        if self.rules.gradient == "reinforce":
            record = self.critic.head.record(1, features.shape[:2].numel(), like=features)
        if record is None:
            output = self.evaluate_critic(seen)
            with self._imagining():
                return self._judge(features, output), lambda first, last: output[first:last]
        # Threads share the rows. Only the states that are learned from have a gradient of the critic, later.
        rows, (times, starts, _) = seen.flatten(0, 1), seen.shape

        def judge_part(first: int, end: int) -> Judgement:
            with torch.no_grad():
                return self._judge(rows[first:end], record.extend(rows[first:end], at=first))

        *parts, slow_parts = zip(*share_rows(judge_part, len(rows)), strict=True)
        reward, live, value = (torch.cat(part).view(times, starts) for part in parts)
        slow_value = None if slow_parts[0] is None else torch.cat(slow_parts).view(times, starts)
        judgement = reward, live, value, slow_value
        return judgement, lambda first, last: record.outputs(seen[first:last], at=first * starts)

    def _judge(self, features: Float[Tensor, "*states size"], value_output: Tensor) -> Judgement:
        """`value_output`: what the critic put out for these states."""
        reward = self.reward.mean(self.reward(features))
        if self.continuation is None:
            live = torch.full_like(reward, self.discount)
        else:
            live = self.continuation.mean(self.continuation(features))
        slow_value = self.critic.slow_mean(features) if self.needs_slow else None
        return reward, live, self._target_value(features, value_output, slow_value), slow_value

    def _with_root(self, live: Tensor, is_terminal: Tensor) -> Tensor:
        if self.rules.root == "predicted":
            return live
        root = 1.0 - is_terminal.to(live.dtype)
        return torch.cat([(root * self.discount if self.rules.root == "discounted" else root)[None], live[1:]])

    def _target_value(self, features: Tensor, value_output: Tensor, slow_value: Tensor | None) -> Tensor:
        """The values in returns and baselines, with a gradient by the features where the actor needs it."""
        if slow_value is not None and self.rules.target_critic == "slow":
            return slow_value
        return self.critic.mean(value_output if self.rules.gradient == "reinforce" else self.critic(features))

    def _credit(self, reward: Tensor, live: Tensor, value: Tensor) -> _Credit:
        """Returns, and which action each of them speaks for: see `BehaviourRules`."""
        rules = self.rules
        if rules.timing == "arrival":
            returns = lambda_returns(reward, live, value, rules.lambda_, dim=0)
            weight = live.detach().cumprod(0)[:-1]  # how surely the dream is still alive, its first state included
            return _Credit(returns, weight, returns, value[:-1], weight)
        returns = recursive_returns(reward[:-1], live[:-1], value[1:], rules.lambda_, value[-1], dim=0)
        weight = torch.cat([torch.ones_like(live[:1]), live[:-2]]).detach().cumprod(0)
        gain, baseline = returns[1:], value[:-2]
        if rules.drop_start:
            return _Credit(returns[1:], weight[1:], gain, baseline, weight[1:])
        return _Credit(returns, weight, gain, baseline, weight[:-1])

    # The losses -------------------------------------------------------------------------------------------------------

    def _objectives(self, credit: _Credit, scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """What the likelihood of each sampled action is weighted with, and what is raised through the dream itself."""
        rules, gain, advantage = self.rules, credit.gain, credit.gain - credit.baseline
        if scale is not None:
            gain, advantage = gain / scale, advantage / scale
        raised = gain if rules.dynamics_objective == "return" else advantage
        if rules.gradient == "reinforce":
            return advantage, None
        if rules.gradient == "dynamics":
            return None, raised
        return (1.0 - rules.dynamics_share) * advantage.detach(), rules.dynamics_share * raised

    def _evaluate_actor(self, features: Tensor, record: LayerRecord | None) -> Tensor:
        return self.actor.head(features, record)

    def _actor_critic_losses(
        self, policy_output: Tensor | None, actions: Tensor, score: Tensor | None, raised: Tensor | None,
        actor_weight: Tensor, value_output: Tensor, weight: Tensor, returns: Tensor, slow_value: Tensor | None,
    ) -> tuple[Losses, dict[str, Tensor]]:  # fmt: skip
        value_loss = weight * self.value_loss(value_output, returns, slow_value)
        objective, metrics = raised, {}
        policy = None if policy_output is None else self.actor.distribution(policy_output)
        if policy is not None and score is not None:
            scored = policy.log_prob(actions) * score
            objective = scored if objective is None else objective + scored
            metrics["policy/advantage_size"] = score.abs().mean()
        assert objective is not None
        if policy is not None and self.rules.entropy_scale:
            entropy = policy.entropy()
            objective = objective + self.rules.entropy_scale * entropy
            metrics["policy/entropy"] = entropy.mean()
        return {"policy": (-actor_weight * objective).mean(), "value": value_loss.mean()}, metrics

    def value_loss(self, output: Tensor, target: Tensor, slow_value: Tensor | None) -> Tensor:
        """Towards the return, and, where the rules say so, towards the slow critic's own prediction."""
        if slow_value is None or not self.rules.slow_value_scale:
            return self.critic.loss(output, target)
        loss, distance = self.critic.losses(output, target, slow_value)
        return loss + self.rules.slow_value_scale * distance


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """What is computed meanwhile has gradients by its inputs, but none by these modules' parameters."""
    parameters = [value for module in modules for value in module.parameters() if value.requires_grad]
    for value in parameters:
        value.requires_grad_(False)
    try:
        yield
    finally:
        for value in parameters:
            value.requires_grad_(True)
