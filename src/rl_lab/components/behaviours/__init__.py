"""How a controller learns in dreams."""

from rl_lab.components.behaviours.actor_critic import ActorCritic, BehaviourRules, Learned

__all__ = ["ActorCritic", "BehaviourRules", "Learned"]
