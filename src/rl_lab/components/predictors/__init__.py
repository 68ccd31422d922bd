"""What can be read off a latent state."""

from rl_lab.components.predictors.ensemble import RewardEnsemble
from rl_lab.components.predictors.heads import ContinuePredictor, RewardPredictor

__all__ = ["ContinuePredictor", "RewardEnsemble", "RewardPredictor"]
