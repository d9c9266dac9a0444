"""Byzantine fault-tolerant federated reinforcement learning.

`train(Config(...))` trains a federation and gives back a `Run`; `load` and `resume` take a run's directory. Underneath:
`aggregators`, `agreement` and `attacks`, the `exchange` that applies a rule at every receiver under an attack,
`robustness`, which measures what a rule withstands, and `envs`.
"""

from byzpg import aggregators, agreement, attacks, envs, robustness
from byzpg.config import Config
from byzpg.exchange import exchange
from byzpg.runs import Run
from byzpg.training import load, resume, train

__all__ = [
    "Config",
    "Run",
    "aggregators",
    "agreement",
    "attacks",
    "envs",
    "exchange",
    "load",
    "resume",
    "robustness",
    "train",
]
