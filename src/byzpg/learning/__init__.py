"""One agent's learning: policies, episodes, and gradients estimated from them."""

from byzpg.learning.gradients import GPOMDP, REINFORCE, ImportanceWeights
from byzpg.learning.policies import CategoricalMLP, GaussianMLP, Policy

__all__ = ["GPOMDP", "REINFORCE", "CategoricalMLP", "GaussianMLP", "ImportanceWeights", "Policy"]
