"""The method: agents as pure state machines, arranged in a federation, simulated or behind a network.

The simulator is not imported here: members of a real federation do not need it.
"""

from byzpg.federation.agents import Agent
from byzpg.federation.algorithms import ALGORITHMS, Algorithm, Federation
from byzpg.federation.devices import Hardware
from byzpg.federation.members import Peer, Server, Worker
from byzpg.federation.metrics import Metrics
from byzpg.federation.schedule import CommonCoin, Conventions, Paper, Plan, Schedule

__all__ = [
    "ALGORITHMS",
    "Agent",
    "Algorithm",
    "CommonCoin",
    "Conventions",
    "Federation",
    "Hardware",
    "Metrics",
    "Paper",
    "Peer",
    "Plan",
    "Schedule",
    "Server",
    "Worker",
]
