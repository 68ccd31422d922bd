"""Heads that predict the reward and the continuation from a latent state."""

from rl_lab.components.predictors.ensemble import RewardEnsemble
from rl_lab.components.predictors.heads import ContinuePredictor, RewardPredictor

__all__ = ["ContinuePredictor", "RewardEnsemble", "RewardPredictor"]
