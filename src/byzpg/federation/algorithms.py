"""The algorithms, as arrangements of agents."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from byzpg.federation.agents import Agent, PAGEAgent
from byzpg.federation.ppo import PPOAgent
from byzpg.robust.aggregators import FedPGFilter
from byzpg.robust.attacks import Attack, ByzantineSet
from byzpg.robust.components import Component
from byzpg.robust.rules import Rule

# What a receiver remembers of the messages of each block of gradients; None: its rule does not remember.
Received = tuple[Any, ...]


@dataclass(frozen=True)
class Federation(Component):
    """K agents, which of them attack and how, and the rules by which the others aggregate and agree."""

    agent: Agent
    centralized: bool
    num_agents: int
    num_attackers: int  # agents that really attack
    num_byzantine: int  # f, Byzantine agents that the rules tolerate
    aggregator: Rule
    agreement: Rule | None  # None: agents keep their own parameters
    rounds: int  # κ, of agreement
    attack: Attack
    byzantine_set: ByzantineSet

    @property
    def agrees(self) -> bool:
        """Whether agents agree on parameters; a lone agent has nobody to agree with."""
        return self.agreement is not None and self.rounds > 0 and self.num_agents > 1

    @property
    def remembered(self) -> Any:
        """The shapes of what a receiver remembers."""
        leaves, structure = jax.tree.flatten(jax.eval_shape(self.nothing_received))
        return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

    def nothing_received(self) -> Received:
        """What a receiver remembers before the first messages; a lone agent receives none."""
        return tuple(
            self.agent.rule_of_block(block, self.aggregator).initial_memory(self.num_agents, size)
            if self.num_agents > 1
            else None
            for block, size in enumerate(self.agent.blocks)
        )

    @property
    def num_holders(self) -> int:
        """The number of holders of parameters: every agent, or the one server."""
        return 1 if self.centralized else self.num_agents

    def num_players(self, large: bool) -> int:
        """The number of players: every agent or, in small batches, the one server if there is one."""
        return self.num_agents if large else self.num_holders


@dataclass(frozen=True)
class Algorithm:
    """Which agents sample, and where gradients are aggregated and parameters agreed on."""

    summary: str
    centralized: bool = False  # a trusted server holds θ; workers sample its large batches, it samples small ones alone
    robust: bool = False  # gradients are aggregated by a robust rule, not by their mean
    agrees: bool = False  # agents agree on parameters
    single: bool = False  # one agent alone
    anchored: bool = False  # see `PAGEAgent.anchored`
    agent: type[Agent] = PAGEAgent
    defaults: Mapping[str, Any] = field(default_factory=dict)  # options that are its own, whatever the preset says
    fixed: Mapping[str, Any] = field(default_factory=dict)  # options that make it this algorithm


# With large batches alone, there would be nothing to correct.
SVRG_DEFAULTS: dict[str, Any] = {"switch_probability": 0.2}
ALGORITHMS = {
    "PAGE-PG": Algorithm("one agent alone (Gargiani et al. 2022)", single=True),
    "Fed-PAGE-PG": Algorithm("a trusted server averages the workers' gradients", centralized=True),
    "ByzPG": Algorithm(
        "a trusted server aggregates the workers' gradients robustly (Alg. 1)", centralized=True, robust=True
    ),
    "Dec-PAGE-PG": Algorithm("every agent averages the gradients of all agents"),
    "DecByzPG": Algorithm(
        "every agent aggregates robustly, then all agree on parameters, with no server (Alg. 2)",
        robust=True,
        agrees=True,
    ),
    "SVRPG": Algorithm(
        "one agent alone, whose small batches correct its last large one (Papini et al. 2018)",
        single=True,
        anchored=True,
        defaults=SVRG_DEFAULTS,
    ),
    "FedPG-BR": Algorithm(
        "as ByzPG, with SVRPG's small batches and a filter around a vector median (Fan et al. 2021)",
        centralized=True,
        robust=True,
        anchored=True,
        defaults=SVRG_DEFAULTS | {"aggregator": FedPGFilter()},
    ),
    "N-PG-IGT": Algorithm(
        "one agent alone, with momentum, transported gradients and normalized steps (Fatkhullin et al. 2023)",
        single=True,
        defaults={"momentum": 0.9},
        fixed={"transport": True, "optimizer": "normalized", "switch_probability": 1.0},
    ),
    "PPO": Algorithm("one agent alone, with a critic (Schulman et al. 2017)", single=True, agent=PPOAgent),
    "Fed-PPO": Algorithm("PPO, whose gradients a trusted server averages", centralized=True, agent=PPOAgent),
    "ByzPPO": Algorithm(
        "PPO, whose gradients a trusted server aggregates robustly", centralized=True, robust=True, agent=PPOAgent
    ),
    "Dec-PPO": Algorithm("PPO, where every agent averages the gradients of all agents", agent=PPOAgent),
    "DecByzPPO": Algorithm(
        "PPO, where every agent aggregates robustly, then all agree on parameters, with no server",
        robust=True,
        agrees=True,
        agent=PPOAgent,
    ),
}
