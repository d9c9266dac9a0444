"""The agent as a pure state machine, and the algorithms as arrangements of such agents.

In one iteration, an agent plays episodes of its own (`play`), estimates a gradient from them (`estimate`) and sends
it; it takes a step along the aggregate of the gradients it received (`advance`) and sends its parameters; it takes over
what the agents agreed on (`settle`). Nothing here sends anything: the simulator moves messages by indexing arrays, a
live peer over a network.

Every function takes a batch of agents: arrays lead with [agent]. A live peer's batch has one agent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from byzpg.envs import Enumerable, Task
from byzpg.federation.schedule import Conventions
from byzpg.learning.gradients import (
    Correction,
    Estimator,
    Health,
    Number,
    SmallBatch,
    corrected_gradient,
    exact_gradient,
    gradient,
    per_agent,
)
from byzpg.learning.host_rollouts import play
from byzpg.learning.policies import Policy
from byzpg.learning.rollouts import Clock, Episodes, PlayAttacks
from byzpg.robust.aggregators import FedPGFilter
from byzpg.robust.attacks import Attack, ByzantineSet
from byzpg.robust.components import Component
from byzpg.robust.rules import Rule

Optimizer = Literal["adam", "sgd", "normalized"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AgentState:
    """All that an agent carries from one iteration to the next."""

    parameters: Array  # θ_t [agent, d]
    previous: Array  # θ_{t−1} [agent, d], see `Conventions.remembered` and `Agent.anchored`
    direction: Array  # v̂_{t−1} [agent, d]
    optimizer: optax.OptState  # local to each agent, leaves [agent, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """What an agent with momentum remembers of its own estimates, and of nobody else's.

    A memory of aggregates would be shared: a lie that is repeated in every iteration would add up to its full effect.
    """

    mean: Array  # m_t [agent, d]
    count: Array  # [agent], how many estimates it holds


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

    numbers: ClassVar[tuple[str, ...]] = ("discount", "gate", "momentum", "step_size", "adam_epsilon")

    env: Task
    policy: Policy
    horizon: int  # H
    discount: Number  # γ
    large_batch: int  # N
    small_batch: int  # B
    estimator: Estimator
    importance: Correction
    gate: Number | Literal["health"]  # β of the PAGE correction
    momentum: Number | None  # β of the agents' histories; None: agents send their estimates as they are
    transport: bool  # whether agents with momentum play ahead of θ_t, so that their histories do not lag behind it
    anchored: bool  # whether a small batch corrects the last large batch (SVRPG), not the last iteration (PAGE)
    optimizer: Optimizer
    step_size: Number  # η
    adam_epsilon: Number  # added to the root of Adam's second moment
    conventions: Conventions

    @property
    def shared(self) -> tuple[Any, ...]:
        """What the agents of one simulation must have in common: all that shapes their episodes, θ_0 and the coin."""
        return (
            *(self.env, self.policy, self.horizon, self.large_batch, self.small_batch, self.importance.num_points),
            *self.conventions.shared,
        )

    def _transform(self, step_size: Number = 0.0, adam_epsilon: Number = 0.0) -> optax.GradientTransformation:
        if self.optimizer == "sgd":
            return optax.sgd(step_size)
        if self.optimizer == "normalized":
            return optax.chain(optax.normalize_by_update_norm(eps=1e-12), optax.sgd(step_size))
        # A first moment on top of the agents' momentum would average twice, and learns more slowly than either.
        return optax.adam(step_size, b1=0.9 if self.momentum is None else 0.0, eps=adam_epsilon)

    def initial(self, parameters: Array) -> AgentState:
        """The state of agents that start from parameters [agent, d]."""
        return AgentState(
            parameters, parameters, jnp.zeros_like(parameters), jax.vmap(self._transform().init)(parameters)
        )

    def initial_history(self, parameters: Array) -> History | None:
        """The history of agents [agent, d] that have estimated nothing yet; None without momentum."""
        if self.momentum is None:
            return None
        return History(jnp.zeros_like(parameters), jnp.zeros(len(parameters), jnp.int32))

    def points(self, state: AgentState, keys: Array, large: bool) -> Array:
        """The parameters [agent, point, d] with which agents with fresh keys [agent] play equal parts of a batch.

        θ_t, unless the correction of small batches says otherwise. With transport, a large batch is played with
        θ_t + β/(1 − β) (θ_t − θ_{t−1}): where J is quadratic, the mean of such a history is ∇J(θ_t) (Fatkhullin et al.
        2023, N-PG-IGT).
        """
        if not large:
            return self.importance.points(state.parameters, state.previous, keys)
        if not self.transport:
            return state.parameters[:, None]
        assert self.momentum is not None
        share = per_agent(self.momentum, 2)
        return (state.parameters + share / (1 - share) * (state.parameters - state.previous))[:, None]

    def play(self, points: Array, keys: Array, large: bool, attackers: PlayAttacks = ()) -> Episodes:
        """Play a batch of episodes with `points` [agent, point, d] and fresh keys [agent], under attacks on play."""
        num_agents, num_points, dimension = points.shape
        num_episodes = self.large_batch if large else self.small_batch
        if num_points > 1:
            keys = jax.vmap(lambda key: jax.random.split(key, num_points))(keys).reshape(-1)
            attackers = [(attack, jnp.repeat(mask, num_points)) for attack, mask in attackers]
        episodes = play(
            self.env,
            self.policy,
            points.reshape(-1, dimension),
            keys,
            num_episodes=num_episodes // num_points,
            horizon=self.horizon,
            attackers=attackers,
        )

        def of_agents(leaf: Array) -> Array:
            return leaf.reshape(num_agents, num_episodes, *leaf.shape[2:]) if leaf.ndim else leaf

        return jax.tree.map(of_agents, episodes)

    def estimate(self, state: AgentState, points: Array, episodes: Episodes, large: bool) -> tuple[Array, Sampled]:
        """Estimate the gradient ṽ_t [agent, d] from the agents' episodes, played with `points` [agent, point, d].

        Large: ṽ = (1/N) Σ g(τ_i|θ_t). Small: the PAGE correction of v̂_{t−1} by B episodes.
        """
        clock = Clock(self.horizon)
        if large:
            estimate = gradient(self.policy, points[:, 0], episodes, self.estimator, self.discount, clock)
            health = Health.perfect(len(state.parameters))
        else:
            batch = SmallBatch(
                policy=self.policy,
                parameters=state.parameters,
                previous=state.previous,
                played=points,
                episodes=episodes,
                estimator=self.estimator,
                discount=self.discount,
                clock=clock,
            )
            estimate, health = corrected_gradient(
                batch, direction=state.direction, importance=self.importance, gate=self.gate
            )
        return estimate, Sampled(episodes.returns, episodes.lengths, health)

    def remember(self, history: History | None, estimate: Array) -> tuple[History | None, Array]:
        """The history with one more estimate ṽ_t [agent, d], and the message that the agents send.

        m_t = β m_{t−1} + (1 − β) ṽ_t, and the message is m_t/(1 − β^t) for the t-th estimate, which removes the weight
        of m_0 = 0 (Karimireddy et al. 2021). Without momentum, the message is ṽ_t. A history skips estimates that are
        not finite: they would never leave it.
        """
        if self.momentum is None or history is None:
            return history, estimate
        finite = jnp.all(jnp.isfinite(estimate), axis=1)
        share, count = per_agent(self.momentum, 2), history.count + 1
        mean = share * history.mean + (1 - share) * estimate
        message = jnp.where(finite[:, None], mean / self._weight(count), estimate)
        kept = History(jnp.where(finite[:, None], mean, history.mean), jnp.where(finite, count, history.count))
        return kept, message

    def recalled(self, direction: Array, count: Array) -> History | None:
        """The history of agents [agent, d] that lost theirs: as if all their estimates had been `direction`."""
        if self.momentum is None:
            return None
        return History(self._weight(count) * direction, count)

    def _weight(self, count: Array) -> Array:
        """The weight of `count` [agent] estimates in a history: 1 − β^count [agent, 1]."""
        assert self.momentum is not None
        return 1 - per_agent(self.momentum, 2) ** count[:, None]

    def advance(self, state: AgentState, own: Array, aggregated: Array, large: Array | bool) -> AgentState:
        """θ̃_{t+1} = θ_t + η v_t, θ_t + η v_t/‖v_t‖ or Adam's step along v_t; `own` is the agent's ṽ_t.

        What the agent remembers for its next small batch is up to the conventions; in the paper, θ_t and v_t. An
        anchored agent remembers those of its last large batch.
        """

        def of_agent(
            step_size: Number, epsilon: Number, optimizer: optax.OptState, parameters: Array, aggregated: Array
        ) -> tuple[Array, optax.OptState]:
            updates, optimizer = self._transform(step_size, epsilon).update(-aggregated, optimizer)  # optax descends
            return parameters + jnp.asarray(updates), optimizer

        step_sizes = jnp.broadcast_to(self.step_size, len(aggregated))
        epsilons = jnp.broadcast_to(self.adam_epsilon, len(aggregated))
        moved, optimizer = jax.vmap(of_agent)(step_sizes, epsilons, state.optimizer, state.parameters, aggregated)
        previous, direction = self.conventions.remembered(
            before=state.parameters, moved=moved, own=own, aggregated=aggregated
        )
        if self.anchored:
            previous, direction = (
                jnp.where(large, new, old) for new, old in ((previous, state.previous), (direction, state.direction))
            )
        return AgentState(moved, previous, direction, optimizer)

    def settle(self, before: Array, state: AgentState, agreed: Array) -> AgentState:
        """Take over the agreed parameters θ_{t+1}; `before` is θ_t.

        With plain SGD, v̂_t becomes the realized direction (θ_{t+1} − θ_t)/η. A step of Adam is not a gradient, so there
        v̂_t = v_t.
        """
        state = replace(state, parameters=agreed)
        if self.optimizer == "sgd" and self.conventions.uses_realized_direction and not self.anchored:
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
    anchored: bool = False  # see `Agent.anchored`
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
}
