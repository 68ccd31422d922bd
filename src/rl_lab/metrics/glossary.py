"""What a metric's name means, in one sentence for somebody who sees it for the first time."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """A part of the report."""

    title: str
    text: str
    open: bool = True


_MODEL = Group(
    "World model",
    "The model that predicts what happens next. These losses say how wrong it is: they should fall and level off. "
    "A rise later on is normal when the agent reaches situations that it had never seen.",
)
_BEHAVIOUR = Group(
    "Behaviour",
    "The policy (which action to take) and the critic (how much return is still to come). In a world-model agent both "
    "learn from imagined futures.",
)
_OPTIMISER = Group("Optimiser and other learning", "How the updates themselves behave.")
_BY_PREFIX = {
    "controller": _BEHAVIOUR,
    "train": _OPTIMISER,
    "planner": Group("Planner", "What the planner thinks of its own plans."),
    "workflow": Group("Workflow", "Values that the algorithm reports about itself."),
    "collect": Group("Collecting", "What the agent met in its environments while it trained.", False),
    "eval": Group("Evaluations", "Episodes with held-out seeds, played without exploration.", False),
    "phase": Group("Phases", "Where the run stood in its curriculum.", False),
    "time": Group("Speed", "Where the time went.", False),
}
_OTHER = Group("Other", "Everything else that was logged.", False)
_ORDER = (_MODEL, _BEHAVIOUR, *_BY_PREFIX.values(), _OTHER)

# A word of the name decides, in this order: train/optimizer/policy_grad_norm is about the optimiser.
_WORDS = (
    (_OPTIMISER, {"grad", "gradient", "optimizer", "opt", "lr", "rms", "param", "nonfinite", "clip"}),
    (_BEHAVIOUR, {"policy", "actor", "pi", "critic", "value", "values", "val", "repval", "q", "advantage", "adv",
                  "return", "returns", "imagined", "imag", "dream", "target", "action", "actions", "entropy"}),
    (_MODEL, {"dyn", "dynamics", "rep", "representation", "rec", "recon", "reconstruction", "image", "vector",
              "decoder", "observation", "obs", "reward", "rew", "cont", "con", "continue", "kl", "latent",
              "consistency", "model", "world", "divergence", "overshooting", "contrast",
              "probe"}),
)  # fmt: skip

# (pattern on the name without its prefix, sentence); the first that matches counts.
_SENTENCES = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"fitness_(mean|best|std)", "Returns of a generation's members: their mean, the best, and their spread."),
        (r"fitness_length", "Decisions in an episode of evolution, on average."),
        (r"search_spread", "How far members are from the centre of the search, on average over parameters."),
        (r"^generation$", "Generations of the present search."),
        (r"m_loss_if_nothing_changed", "The loss of a forecast that the code stays as it is; M should be below it."),
        (r"m_loss_shuffled_actions", "M's loss with the actions of other sequences: higher, or M ignores them."),
        (r"m_share_better", "The share of the code's entries in which M beats a forecast that nothing changes."),
        (r"m_loss$|loss/m_latent$", "How badly M foresees the next code, in nats for each entry."),
        (r"expected_return", "What the plans of the last decision promised, on average over the environments."),
        (r"effective_samples", "Candidates that carry weight: all of them, or 1 where one plan has it all."),
        (r"prior_kl", "How far the planned distribution is from the planner's prior, in nats."),
        (r"dynamics_spread", "How much the members of the ensemble differ in their losses."),
        (r"loss/(dyn|dynamics)$", "How badly the model foresees its next latent state before it sees the observation."),
        (r"loss/divergence$", "How much an observation surprises the model beyond what is free, in nats."),
        (r"loss/overshooting$", "The same for what was foreseen several steps ahead."),
        (r"loss/(rep|representation)$", "How far what is seen strays from what was foreseen."),
        (r"loss/probe$|^probe/", "How badly a decoder that only looks on redraws observations; the model ignores it."),
        (r"^contrast/", "How badly states can be matched with their observations."),
        (r"loss/(rec|recon|reconstruction|decoder)$", "How badly observations are redrawn from the state."),
        (r"loss/obs", "How badly states stand for their observations: redrawn or, without a decoder, matched."),
        (r"loss/(image|vector|observation)|reconstruction/", "How badly this observation is redrawn from the state."),
        (r"loss/consistency$", "How far predicted latents are from those that the encoder makes of what came next."),
        (r"loss/termination$", "How badly the model predicts whether the episode ends."),
        (r"planned_steps", "How many steps ahead the planner looks."),
        (r"loss/(rew|reward)$", "How badly the model predicts the reward of a step."),
        (r"loss/(con|cont|continue)$", "How badly the model predicts whether the episode goes on."),
        (r"loss/(repval|replay_value|replay_critic)$", "The critic's error on real, replayed experience."),
        (r"loss/(val|value|critic)$", "How badly the critic predicts the return of imagined futures."),
        (r"loss/(pol|policy|actor)$", "The policy's objective. It has no floor and may rise while the agent improves."),
        (r"loss/trajectories$", "How badly noise is taken out of trajectories of states and actions."),
        (r"loss/inverse_dynamics$", "How badly the action between two states is told."),
        (r"loss/td$", "How far the values of the chosen actions are from what followed them."),
        (r"loss(/total)?$", "All losses together, as the optimiser sees them."),
        (r"policy/kl", "How far the policy has moved away from the one that collected the data, in nats."),
        (r"policy/clipped", "The share of decisions whose probability has moved beyond the clip range."),
        (r"explained_variance", "How much of the differences between returns the critic foresaw; 1 is all."),
        (r"(^|/)kl", "How much an observation surprises the model, in nats."),
        (r"entropy_prior|prior_entropy", "How unsure the model is about the next state before it looks."),
        (r"entropy_post|posterior_entropy", "How unsure the model still is after it looked."),
        (r"entropy", "How random the actions are: high while exploring, low once the policy has made up its mind."),
        (r"grad(ient)?_?norm|grad/norm", "The size of the gradient. Rare spikes are normal; steady growth is not."),
        (r"(^|/)(lr|learning_rate)", "How large a step the optimiser takes."),
        (r"update_(rms|norm)|/rms$", "How far an update moves the weights."),
        (r"return_(scale|range|norm)|normali[sz]er|(^|/)scale$", "How widely imagined returns are spread."),
        (r"advantage|(^|/)adv", "How much better the chosen actions were than the critic expected."),
        (r"(dream|imag|policy|critic|value).*/return", "The return of imagined futures."),
        (r"(dream|imag).*/reward", "The mean reward of an imagined step."),
        (r"(dream|imag).*/cont", "How surely imagined episodes go on to the next step."),
        (r"reward_mean|/reward$", "The mean reward of a step."),
        (r"error_size", "How far a value is from its target, on average."),
        (r"epsilon", "The share of actions that are random while training."),
        (r"target", "What the critic is trained towards."),
        (r"value", "The return that the critic expects from here on."),
        (r"replay_ratio|train_ratio|update_ratio", "Updates for each environment step."),
        (r"length", "How many decisions an episode lasted."),
        (r"return_std$", "The spread of the returns over the episodes."),
        (r"return_(mean|min|max)|return$", "The sum of rewards of an episode: what the agent is to maximise."),
        (r"episodes", "How many episodes."),
        (r"env_steps_per_s", "Agent decisions in a second, all environments together."),
        (r"updates_per_s", "Gradient updates in a second."),
        (r"param.*norm|weight", "The size of the weights."),
        (r"nonfinite|skipped", "Updates that were left out because a loss was not a number. It should stay 0."),
        (r"frames", "Environment frames: env steps times the action repeat."),
        (r"restart", "Environment processes that had to be started again."),
        (r"replay|buffer", "What is held in the replay memory."),
        (r"_s$|seconds", "Seconds spent."),
    )
)  # fmt: skip


def explain(name: str) -> str:
    """One sentence about a metric, or nothing where the name is not known."""
    bare = name.split("/", 1)[1] if "/" in name else name
    return next((text for pattern, text in _SENTENCES if pattern.search(bare)), "")


def grouped(names: list[str]) -> list[tuple[Group, list[str]]]:
    """The names by group, losses first; empty groups are left out."""
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(_group(name).title, []).append(name)
    found = {group.title: group for group in _ORDER}
    return [
        (group, sorted(members[title], key=lambda name: ("loss" not in name, name)))
        for title, group in found.items()
        if title in members
    ]


def _group(name: str) -> Group:
    prefix, _, rest = name.partition("/")
    if prefix in ("train", "workflow"):
        words = set(re.split(r"[/_.]", rest))
        if words & {"prior", "posterior", "post", "kl"}:  # the entropy of a state, not of the policy
            return _MODEL
        for group, own in _WORDS:
            if words & own:
                return group
    return _BY_PREFIX.get(prefix, _OTHER)
