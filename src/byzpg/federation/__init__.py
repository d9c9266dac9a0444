"""The method: agents as pure state machines, arranged in a federation, simulated or behind a network."""

from byzpg.federation.algorithms import ALGORITHMS, Agent, Algorithm, Federation
from byzpg.federation.members import Peer, Server, Worker
from byzpg.federation.metrics import Metrics
from byzpg.federation.schedule import CommonCoin, Paper, Plan, Schedule

__all__ = [
    "ALGORITHMS",
    "Agent",
    "Algorithm",
    "CommonCoin",
    "Federation",
    "Metrics",
    "Paper",
    "Peer",
    "Plan",
    "Schedule",
    "Server",
    "Worker",
]
