"""The agent as a pure state machine, and the five algorithms as arrangements of such agents.

In one iteration, an agent plays episodes of its own (`play`), estimates a gradient from them (`estimate`) and sends
it; it takes a step along the aggregate of the gradients it received (`advance`) and sends its parameters; it takes over
what the agents agreed on (`settle`). Nothing here sends anything: the simulator moves messages by indexing arrays, a
live peer over a network.

Every function takes a batch of agents: arrays lead with [agent]. A live peer's batch has one agent.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from byzpg.envs import Enumerable, Task
from byzpg.federation.schedule import Conventions
from byzpg.learning.gradients import (
    Estimator,
    Health,
    ImportanceWeights,
    Number,
    corrected_gradient,
    exact_gradient,
    gradient,
    per_agent,
)
from byzpg.learning.host_rollouts import play
from byzpg.learning.policies import Policy
from byzpg.learning.rollouts import Clock, Episodes, PlayAttacks
from byzpg.robust.attacks import Attack, ByzantineSet
from byzpg.robust.components import Component
from byzpg.robust.rules import Rule


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AgentState:
    """All that an agent carries from one iteration to the next."""

    parameters: Array  # θ_t [agent, d]
    previous: Array  # θ_{t−1} [agent, d], see `Conventions.remembered`
    direction: Array  # v̂_{t−1} [agent, d]
    optimizer: optax.OptState  # local to each agent, leaves [agent, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What an agent's episodes were like."""

    returns: Array  # [agent, episode], undiscounted
    lengths: Array  # [agent, episode]
    health: Health  # of the importance weights


@dataclass(frozen=True)
class Agent(Component):
    """How agents play, estimate and take steps: everything in the method that is not a message.

    A number may be an array [agent], for agents that differ in it.
    """

    numbers: ClassVar[tuple[str, ...]] = ("discount", "gate", "step_size")

    env: Task
    policy: Policy
    horizon: int  # H
    discount: Number  # γ
    large_batch: int  # N
    small_batch: int  # B
    estimator: Estimator
    importance: ImportanceWeights
    gate: Number | Literal["health"]  # β of the PAGE correction
    optimizer: Literal["adam", "sgd"]
    step_size: Number  # η
    conventions: Conventions

    @property
    def shared(self) -> tuple[Any, ...]:
        """What the agents of one simulation must have in common: all that shapes their episodes, θ_0 and the coin."""
        return (
            *(self.env, self.policy, self.horizon, self.large_batch, self.small_batch),
            *self.conventions.shared,
        )

    def _transform(self, step_size: Number = 0.0) -> optax.GradientTransformation:
        return {"adam": optax.adam, "sgd": optax.sgd}[self.optimizer](step_size)

    def initial(self, parameters: Array) -> AgentState:
        """The state of agents that start from parameters [agent, d]."""
        return AgentState(
            parameters, parameters, jnp.zeros_like(parameters), jax.vmap(self._transform().init)(parameters)
        )

    def play(self, parameters: Array, keys: Array, large: bool, attackers: PlayAttacks = ()) -> Episodes:
        """Play a batch of episodes with parameters [agent, d] and fresh keys [agent], under the attacks on play."""
        return play(
            self.env,
            self.policy,
            parameters,
            keys,
            num_episodes=self.large_batch if large else self.small_batch,
            horizon=self.horizon,
            attackers=attackers,
        )

    def estimate(self, state: AgentState, episodes: Episodes, large: bool) -> tuple[Array, Sampled]:
        """Estimate the gradient ṽ_t [agent, d] from the agents' episodes.

        Large: ṽ = (1/N) Σ g(τ_i|θ_t). Small: the PAGE correction of v̂_{t−1} by B episodes.
        """
        clock = Clock(self.horizon)
        if large:
            estimate = gradient(self.policy, state.parameters, episodes, self.estimator, self.discount, clock)
            health = Health.perfect(len(state.parameters))
        else:
            estimate, health = corrected_gradient(
                self.policy,
                state.parameters,
                episodes,
                previous=state.previous,
                direction=state.direction,
                estimator=self.estimator,
                importance=self.importance,
                gate=self.gate,
                discount=self.discount,
                clock=clock,
            )
        return estimate, Sampled(episodes.returns, episodes.lengths, health)

    def advance(self, state: AgentState, own: Array, aggregated: Array) -> AgentState:
        """θ̃_{t+1} = θ_t + η v_t, or Adam's step along v_t; `own` is the agent's ṽ_t.

        What the agent remembers for its next small batch is up to the conventions; in the paper, θ_t and v_t.
        """

        def of_agent(
            step_size: Number, optimizer: optax.OptState, parameters: Array, aggregated: Array
        ) -> tuple[Array, optax.OptState]:
            updates, optimizer = self._transform(step_size).update(-aggregated, optimizer)  # optax descends
            return parameters + jnp.asarray(updates), optimizer

        step_sizes = jnp.broadcast_to(self.step_size, len(aggregated))
        moved, optimizer = jax.vmap(of_agent)(step_sizes, state.optimizer, state.parameters, aggregated)
        previous, direction = self.conventions.remembered(
            before=state.parameters, moved=moved, own=own, aggregated=aggregated
        )
        return AgentState(moved, previous, direction, optimizer)

    def settle(self, before: Array, state: AgentState, agreed: Array) -> AgentState:
        """Take over the agreed parameters θ_{t+1}; `before` is θ_t.

        With plain SGD, v̂_t becomes the realized direction (θ_{t+1} − θ_t)/η. A step of Adam is not a gradient, so there
        v̂_t = v_t.
        """
        state = replace(state, parameters=agreed)
        if self.optimizer == "sgd" and self.conventions.uses_realized_direction:
            state = replace(state, direction=(agreed - before) / per_agent(self.step_size, agreed.ndim))
        return state

    def gradient_squared(self, parameters: Array) -> Array:
        """‖∇J(θ)‖² [agent] at parameters [agent, d], exactly; NaN where the task cannot tell."""
        if not isinstance(self.env, Enumerable):
            return jnp.full(len(parameters), jnp.nan)
        exact = exact_gradient(self.env, self.policy, parameters, self.horizon, self.discount)
        return jnp.sum(jnp.square(exact), axis=1)


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
}
