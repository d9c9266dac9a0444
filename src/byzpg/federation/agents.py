"""The agent as a pure state machine.

In one iteration, an agent plays in its own environments (`request`, `play`) and prepares what it learns from
(`digest`). Once or several times, it sends a gradient (`message`) and takes a step along the aggregate of the gradients
it received (`advance`). Then it sends its parameters, and takes over what the agents agreed on (`settle`). Nothing here
sends anything: the simulator moves messages by indexing arrays, a live peer over a network.

Every function takes a batch of agents: arrays lead with [agent]. A live peer's batch has one agent.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
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
from byzpg.learning.host_segments import Venue
from byzpg.learning.policies import Policy
from byzpg.learning.rollout_kernel import where_agents
from byzpg.learning.rollouts import Clock, Episodes, PlayAttacks
from byzpg.robust.components import Component
from byzpg.robust.rules import Rule

Optimizer = Literal["adam", "local-adam", "sgd", "normalized"]

# The weight of the past in an agent's mean of squared gradients, as in Adam.
SQUARES = 0.999


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AgentState:
    """All that an agent carries from one iteration to the next."""

    parameters: Array  # θ_t [agent, d]
    previous: Array  # θ_{t−1} [agent, d], see `Conventions.remembered` and `PAGEAgent.anchored`
    direction: Array  # v̂_{t−1} [agent, d]
    optimizer: optax.OptState  # local to each agent, leaves [agent, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """What an agent with momentum remembers of its own estimates, and of nobody else's.

    A memory of aggregates would be shared: a lie that is repeated in every iteration would add up to its full effect.
    """

    mean: Array  # m_t [agent, d]
    squares: Array | None  # mean square of every coordinate [agent, d], with Adam at the agents
    count: Array  # [agent], how many estimates it holds


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What an agent's episodes were like."""

    returns: Array  # [agent, episode], undiscounted
    steps: Array  # [agent], steps in the environment
    ended: Array  # [agent], episodes that ended
    health: Health  # of the importance weights


@dataclass(frozen=True)
class Agent(Component, ABC):
    """How agents play, learn and take steps: everything in the method that is not a message.

    A number may be an array [agent], for agents that differ in it.
    """

    unit: ClassVar[Literal["trajectories", "steps"]]  # in which the length of a run is counted

    env: Task
    policy: Policy
    horizon: int  # H
    discount: Number  # γ
    momentum: Number | None  # β of the agents' histories; None: agents send their estimates as they are
    optimizer: Optimizer
    step_size: Number  # η
    adam_epsilon: Number  # added to the root of Adam's second moment
    decay: Number | None  # the share of η by which each step is smaller than the one before; None: η is constant

    # What differs between learners

    @property
    @abstractmethod
    def shared(self) -> tuple[Any, ...]:
        """What the agents of one simulation must have in common: all that shapes their play, θ_0 and the coin."""

    @property
    def num_exchanges(self) -> int:
        """The number of rounds of messages with gradients in one iteration."""
        return 1

    @property
    def num_updates(self) -> int:
        """The number of estimates that an agent computes in one iteration."""
        return 1

    def updates_before(self, iteration: Any) -> Any:
        """The number of updates in all iterations before one."""
        return iteration * self.num_updates

    @property
    def blocks(self) -> tuple[int, ...]:
        """The lengths of the parts of θ whose gradients are aggregated each by itself; the policy's is the first."""
        return (self.policy.dimension,)

    @property
    def deployed_policy(self) -> Policy:
        """The policy that takes `deployed` parameters: the one that plays."""
        return self.policy

    def rule_of_block(self, block: int, rule: Rule) -> Rule:
        """The rule that aggregates a block in a federation that aggregates with `rule`."""
        return rule

    @abstractmethod
    def initial_parameters(self, key: Array) -> Array:
        """θ_0 [d]."""

    @abstractmethod
    def initial_memory(self, parameters: Array) -> Any:
        """What agents [agent, d] keep to themselves, before iteration 0; None if that is nothing."""

    @abstractmethod
    def recalled(self, direction: Array, iteration: Array) -> Any:
        """The memory of agents [agent, d] that lost theirs before an iteration [agent], where v̂ was `direction`."""

    @abstractmethod
    def request(self, state: AgentState, memory: Any, keys: Array, large: bool) -> Any:
        """What agents need to play a batch, with fresh keys [agent]; leaves lead with [agent]."""

    def venue(self) -> Venue | None:
        """Where agents play that go on in their environments on a host task; None if they need no such place."""
        return None

    @abstractmethod
    def play(
        self, request: Any, keys: Array, large: bool, attackers: PlayAttacks = (), venue: Venue | None = None
    ) -> Any:
        """Play what was requested, under attacks on play. On a host task, this must not be traced.

        Its `venue` is the same in all iterations, and was opened for these agents alone.
        """

    @abstractmethod
    def digest(self, state: AgentState, request: Any, experience: Any, keys: Array, large: bool) -> tuple[Any, Sampled]:
        """Prepare what all messages of the iteration are computed from; also return what the play was like."""

    @abstractmethod
    def message(self, state: AgentState, memory: Any, batch: Any, exchange: Array | int) -> tuple[Any, Array]:
        """The memory afterwards, and the message [agent, d] of one exchange, from what `digest` prepared.

        Without a memory (None), which a server has that samples alone, the message is the estimate itself.
        """

    def deployed(self, parameters: Array) -> Array:
        """The parameters of the policies that agents with θ [agent, d] act with."""
        return parameters[:, : self.policy.dimension]

    # What all learners have in common

    @property
    def dimension(self) -> int:
        """The length d of θ."""
        return sum(self.blocks)

    def parts(self, vectors: Any) -> list[Any]:
        """The blocks of vectors [..., d]."""
        ends = [*accumulate(self.blocks)]
        return [vectors[..., end - size : end] for size, end in zip(self.blocks, ends, strict=True)]

    def _transform(
        self, step_size: Number = 0.0, adam_epsilon: Number = 0.0, decay: Number = 0.0
    ) -> optax.GradientTransformation:
        def decaying(count: Array) -> Array:
            return step_size * jnp.maximum(1 - decay * count, 0)

        rate: Any = step_size if self.decay is None else decaying
        if self.optimizer in ("sgd", "local-adam"):
            return optax.sgd(rate)
        if self.optimizer == "normalized":
            return optax.chain(optax.normalize_by_update_norm(eps=1e-12), optax.sgd(rate))
        # A first moment on top of the agents' momentum would average twice, and learns more slowly than either.
        return optax.adam(rate, b1=0.9 if self.momentum is None else 0.0, eps=adam_epsilon)

    def initial(self, parameters: Array) -> AgentState:
        """The state of agents that start from parameters [agent, d]."""
        return AgentState(
            parameters, parameters, jnp.zeros_like(parameters), jax.vmap(self._transform().init)(parameters)
        )

    def initial_history(self, parameters: Array) -> History | None:
        """The history of agents [agent, d] that have estimated nothing yet; None without momentum."""
        if self.momentum is None:
            return None
        blank = jnp.zeros_like(parameters)
        squares = blank if self.optimizer == "local-adam" else None
        return History(blank, squares, jnp.zeros(len(parameters), jnp.int32))

    def remember(self, history: History | None, estimate: Array) -> tuple[History | None, Array]:
        """The history with one more estimate ṽ_t [agent, d], and the message that the agents send.

        m_t = β m_{t−1} + (1 − β) ṽ_t, and the message is m_t/(1 − β^t) for the t-th estimate, which removes the weight
        of m_0 = 0 (Karimireddy et al. 2021). Without momentum, the message is ṽ_t. With Adam at the agents, each
        coordinate is divided by the root of the agent's own mean square, so that no coordinate decides the distances
        between messages. A history skips estimates that are not finite: they would never leave it.
        """
        if self.momentum is None or history is None:
            return history, estimate
        finite = jnp.all(jnp.isfinite(estimate), axis=1)
        share, count = per_agent(self.momentum, 2), history.count + 1
        mean = share * history.mean + (1 - share) * estimate
        message, squares = mean / self._weight(count), None
        if history.squares is not None:
            squares = SQUARES * history.squares + (1 - SQUARES) * jnp.square(estimate)
            roots = jnp.sqrt(squares / (1 - SQUARES ** count[:, None]))
            message /= roots + per_agent(self.adam_epsilon, 2)
        kept = jax.tree.map(partial(where_agents, finite), History(mean, squares, count), history)
        return kept, where_agents(finite, message, estimate)

    def recalled_history(self, direction: Array, count: Array) -> History | None:
        """The history of agents [agent, d] that lost theirs: as if all their estimates had been `direction`.

        With Adam at the agents, `direction` is no estimate, and the history begins anew.
        """
        if self.momentum is None or self.optimizer == "local-adam":
            return self.initial_history(direction)
        return History(self._weight(count) * direction, None, count)

    def _weight(self, count: Array) -> Array:
        """The weight of `count` [agent] estimates in a history: 1 − β^count [agent, 1]."""
        assert self.momentum is not None
        return 1 - per_agent(self.momentum, 2) ** count[:, None]

    def stepped(self, state: AgentState, aggregated: Array) -> AgentState:
        """Take a step of the optimizer along v = `aggregated` [agent, d].

        θ + η v, θ + η v/‖v‖, or Adam's. With Adam at the agents it is θ + η v: the messages are scaled already.
        """

        def of_agent(
            numbers: tuple[Array, ...], optimizer: optax.OptState, parameters: Array, aggregated: Array
        ) -> tuple[Array, optax.OptState]:
            updates, optimizer = self._transform(*numbers).update(-aggregated, optimizer)  # optax descends
            return parameters + jnp.asarray(updates), optimizer

        numbers = self.step_size, self.adam_epsilon, 0.0 if self.decay is None else self.decay
        of_agents = tuple(jnp.broadcast_to(each, len(aggregated)) for each in numbers)
        moved, optimizer = jax.vmap(of_agent)(of_agents, state.optimizer, state.parameters, aggregated)
        return replace(state, parameters=moved, optimizer=optimizer)

    def advance(self, state: AgentState, own: Array, aggregated: Array, large: Array | bool) -> AgentState:
        """The state after a step along the aggregate v_t; `own` is what the agent sent itself."""
        return replace(self.stepped(state, aggregated), previous=state.parameters, direction=aggregated)

    def settle(self, before: Array, state: AgentState, agreed: Array) -> AgentState:
        """Take over the agreed parameters θ_{t+1}; `before` is θ_t."""
        return replace(state, parameters=agreed)

    def gradient_squared(self, parameters: Array) -> Array:
        """‖∇J(θ)‖² [agent] at parameters [agent, d], exactly; NaN where the task cannot tell."""
        if not isinstance(self.env, Enumerable):
            return jnp.full(len(parameters), jnp.nan)
        exact = exact_gradient(self.env, self.policy, self.deployed(parameters), self.horizon, self.discount)
        return jnp.sum(jnp.square(exact), axis=1)


@dataclass(frozen=True)
class PAGEAgent(Agent):
    """An agent of the paper: it plays whole episodes, large batches of them and small ones, which PAGE corrects."""

    numbers: ClassVar[tuple[str, ...]] = ("discount", "gate", "momentum", "step_size", "adam_epsilon", "decay")
    unit: ClassVar[Literal["trajectories", "steps"]] = "trajectories"

    large_batch: int  # N
    small_batch: int  # B
    estimator: Estimator
    importance: Correction
    gate: Number | Literal["health"]  # β of the PAGE correction
    transport: bool  # whether agents with momentum play ahead of θ_t, so that their histories do not lag behind it
    anchored: bool  # whether a small batch corrects the last large batch (SVRPG), not the last iteration (PAGE)
    conventions: Conventions

    @property
    def shared(self) -> tuple[Any, ...]:
        return (
            *(self.env, self.policy, self.horizon, self.large_batch, self.small_batch, self.importance.num_points),
            *self.conventions.shared,
        )

    def initial_parameters(self, key: Array) -> Array:
        return self.conventions.initial_parameters(self.policy, key)

    def initial_memory(self, parameters: Array) -> History | None:
        return self.initial_history(parameters)

    def recalled(self, direction: Array, iteration: Array) -> History | None:
        return self.recalled_history(direction, self.updates_before(iteration))

    def request(self, state: AgentState, memory: Any, keys: Array, large: bool) -> Array:
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

    def play(
        self, request: Array, keys: Array, large: bool, attackers: PlayAttacks = (), venue: Venue | None = None
    ) -> Episodes:
        """Play a batch of episodes with the points of a `request` [agent, point, d], equally many with each."""
        num_agents, num_points, dimension = request.shape
        num_episodes = self.large_batch if large else self.small_batch
        if num_points > 1:
            keys = jax.vmap(lambda key: jax.random.split(key, num_points))(keys).reshape(-1)
            attackers = [(attack, jnp.repeat(mask, num_points)) for attack, mask in attackers]
        episodes = play(
            self.env,
            self.policy,
            request.reshape(-1, dimension),
            keys,
            num_episodes=num_episodes // num_points,
            horizon=self.horizon,
            attackers=attackers,
        )

        def of_agents(leaf: Array) -> Array:
            return leaf.reshape(num_agents, num_episodes, *leaf.shape[2:]) if leaf.ndim else leaf

        return jax.tree.map(of_agents, episodes)

    def digest(
        self, state: AgentState, request: Array, experience: Episodes, keys: Array, large: bool
    ) -> tuple[Array, Sampled]:
        """Estimate the gradient ṽ_t [agent, d] from the agents' episodes.

        Large: ṽ = (1/N) Σ g(τ_i|θ_t). Small: the PAGE correction of v̂_{t−1} by B episodes.
        """
        clock = Clock(self.horizon)
        if large:
            estimate = gradient(self.policy, request[:, 0], experience, self.estimator, self.discount, clock)
            health = Health.perfect(len(state.parameters))
        else:
            batch = SmallBatch(
                policy=self.policy,
                parameters=state.parameters,
                previous=state.previous,
                played=request,
                episodes=experience,
                estimator=self.estimator,
                discount=self.discount,
                clock=clock,
            )
            estimate, health = corrected_gradient(
                batch, direction=state.direction, importance=self.importance, gate=self.gate
            )
        steps, ended = jnp.sum(experience.lengths, axis=1), jnp.full(len(estimate), experience.lengths.shape[1])
        return estimate, Sampled(experience.returns, steps, ended, health)

    def message(
        self, state: AgentState, memory: History | None, batch: Array, exchange: Array | int
    ) -> tuple[History | None, Array]:
        return self.remember(memory, batch)

    def advance(self, state: AgentState, own: Array, aggregated: Array, large: Array | bool) -> AgentState:
        """θ̃_{t+1}, and what the agent remembers for its next small batch; `own` is its ṽ_t.

        That is up to the conventions; in the paper, θ_t and v_t. An anchored agent remembers those of its last large
        batch.
        """
        moved = self.stepped(state, aggregated)
        previous, direction = self.conventions.remembered(
            before=state.parameters, moved=moved.parameters, own=own, aggregated=aggregated
        )
        if self.anchored:
            previous, direction = (
                jnp.where(large, new, old) for new, old in ((previous, state.previous), (direction, state.direction))
            )
        return replace(moved, previous=previous, direction=direction)

    def settle(self, before: Array, state: AgentState, agreed: Array) -> AgentState:
        """Take over the agreed parameters θ_{t+1}; `before` is θ_t.

        With plain SGD, v̂_t becomes the realized direction (θ_{t+1} − θ_t)/η. A step of Adam is not a gradient, and one
        that decays may be 0, so there v̂_t = v_t.
        """
        state = replace(state, parameters=agreed)
        realizes = self.conventions.uses_realized_direction and not self.anchored
        if self.optimizer == "sgd" and self.decay is None and realizes:
            state = replace(state, direction=(agreed - before) / per_agent(self.step_size, agreed.ndim))
        return state
