"""Byzantine fault-tolerant federated reinforcement learning.

This version holds the robust core: `aggregators`, `agreement`, `attacks`, the `exchange` that applies a rule at every
receiver under an attack, and `robustness`, which measures what a rule withstands.
"""

from byzpg import aggregators, agreement, attacks, robustness
from byzpg.exchange import exchange

__all__ = ["aggregators", "agreement", "attacks", "exchange", "robustness"]
