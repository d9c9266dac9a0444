"""One agent's learning: policies, rollouts of episodes, and gradients estimated from them."""

from byzpg.learning.gradients import GPOMDP, REINFORCE, Estimator, ImportanceWeights
from byzpg.learning.policies import CategoricalMLP, GaussianMLP, Policy
from byzpg.learning.rollouts import Episodes, rollout

__all__ = [
    "GPOMDP",
    "REINFORCE",
    "CategoricalMLP",
    "Episodes",
    "Estimator",
    "GaussianMLP",
    "ImportanceWeights",
    "Policy",
    "rollout",
]
