"""Agents with a critic, which learn by proximal policy optimization.

θ is the policy's parameters followed by the critic's. Their gradients are aggregated each by itself: the critic's is
longer, and would otherwise decide every distance.

If observations are normalized, the third part of θ is their means and the logarithms of their standard deviations. In
the last exchange of an iteration, agents send how far the statistics of their own steps would move them. So a robust
rule protects them as it protects gradients. Statistics and policy together are a policy that sees observations as they
are: this is the one that plays, and the one that is deployed. A first layer that is linear absorbs the statistics; a
network of the user's own is preceded by them.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from byzpg.envs import HostTask
from byzpg.federation.agents import Agent, AgentState, History, Sampled
from byzpg.learning.advantages import PPO, Steps, generalized_advantages, normalized, objective, shortened, statistics
from byzpg.learning.gradients import Health
from byzpg.learning.host_segments import Venue
from byzpg.learning.policies import Critic, Policy
from byzpg.learning.rollout_kernel import where_agents
from byzpg.learning.rollouts import PlayAttacks
from byzpg.learning.segments import Environments, Segment, keys_for, play_segment
from byzpg.robust.aggregators import Mean, TrimmedMean
from byzpg.robust.components import with_numbers, without_numbers
from byzpg.robust.rules import Rule

# The factor of the policy's last layer in θ_0: so the first actions are almost uniform, whatever is observed.
FIRST_POLICY = 0.01
STATISTICS = 2  # the block of θ with those of observations, if they are normalized
# The purpose of the keys of minibatches under an agent's key, beside those of play.
MINIBATCHES = 6
# The share of statistics that an iteration replaces. They follow the policy, which changes what is observed; so they
# are a mean over the last ten iterations or so, and no mean over all of them. The first measurement counts in full.
NEW_STATISTICS = 0.1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """What an agent keeps to itself; arrays lead with [agent]."""

    environments: Environments
    history: History | None  # of its gradients, with momentum
    optimizer: optax.OptState | None  # of the steps it takes alone, if there is more than one between two exchanges


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Played:
    """What agents did in one iteration, and where that left their environments."""

    environments: Environments
    segment: Segment


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """What the updates of one iteration are computed from."""

    environments: Environments
    steps: Steps  # [agent, environment, time, ...]
    statistics: Array | None  # of the observations [agent, 2n], if they are normalized
    orders: Array | None  # of the steps in each epoch [agent, epoch, step]; None if it has one minibatch


@dataclass(frozen=True)
class PPOAgent(Agent):
    """An agent that plays on in its environments, and learns from every step several times."""

    numbers: ClassVar[tuple[str, ...]] = ("discount", "momentum", "step_size", "adam_epsilon", "decay")
    unit: ClassVar[Literal["trajectories", "steps"]] = "steps"

    ppo: PPO

    @property
    def critic(self) -> Critic:
        return self.policy.critic()

    @property
    def shared(self) -> tuple[Any, ...]:
        options = self.ppo
        counts = options.environments, options.segment, options.epochs, options.minibatches, options.exchange_every
        return self.env, self.policy, self.horizon, counts, options.normalize_observations

    @property
    def num_exchanges(self) -> int:
        return self.ppo.num_exchanges

    @property
    def num_updates(self) -> int:
        return self.ppo.num_updates

    @property
    def blocks(self) -> tuple[int, ...]:
        networks = self.policy.dimension, self.critic.dimension
        return (*networks, 2 * self.policy.observation_size) if self.ppo.normalize_observations else networks

    @property
    def deployed_policy(self) -> Policy:
        return self.policy.normalizing() if self.ppo.normalize_observations else self.policy

    @property
    def _steps_alone(self) -> bool:
        """Whether agents take steps of their own between exchanges, and exchange how far these led."""
        return self.ppo.exchange_every > 1

    def initial_parameters(self, key: Array) -> Array:
        for_policy, for_critic = jax.random.split(key)
        policy = self.policy.with_last_layer(self.policy.initial(for_policy), FIRST_POLICY)
        theta = jnp.concatenate([policy, self.critic.initial(for_critic)])
        return jnp.pad(theta, (0, self.dimension - len(theta)))  # statistics that change nothing

    def initial(self, parameters: Array) -> AgentState:
        state = super().initial(parameters)
        return replace(state, optimizer=()) if self._steps_alone else state  # its optimizer is in its memory

    def initial_memory(self, parameters: Array) -> Memory:
        return Memory(
            Environments.initial(self.env, len(parameters), self.ppo.environments),
            self.initial_history(parameters),
            jax.vmap(self._transform().init)(parameters) if self._steps_alone else None,
        )

    def recalled(self, direction: Array, iteration: Array) -> Memory:
        blank, count = self.initial_memory(direction), self.updates_before(iteration)
        if not self._steps_alone:
            return Memory(blank.environments, self.recalled_history(direction, count), None)

        def with_count(state: Any) -> Any:
            """Its steps have decayed as far as those of the others; Adam begins anew."""
            return state._replace(count=count) if is_schedule(state) else state

        def is_schedule(state: Any) -> bool:
            return isinstance(state, optax.ScaleByScheduleState)

        # `direction` is a change of parameters here, and no gradient.
        return replace(blank, optimizer=jax.tree.map(with_count, blank.optimizer, is_leaf=is_schedule))

    def updates_before(self, iteration: Any) -> Any:
        # The first iteration only measures observations that are to be normalized.
        return super().updates_before(jnp.maximum(iteration - 1, 0) if self.ppo.normalize_observations else iteration)

    def rule_of_block(self, block: int, rule: Rule) -> Rule:
        """Statistics are trimmed coordinate by coordinate: features have different units, so distances say nothing."""
        return TrimmedMean() if block == STATISTICS and not isinstance(rule, Mean) else rule

    def request(self, state: AgentState, memory: Memory, keys: Array, large: bool) -> tuple[Array, Environments]:
        """The parameters of the policies [agent, ...], and where the environments stand."""
        return self.deployed(state.parameters), memory.environments

    def deployed(self, parameters: Array) -> Array:
        policies, _, *statistics = self.parts(parameters)
        if not statistics:
            return policies
        mean, log_std = jnp.split(statistics[0], 2, axis=1)
        return jax.vmap(self.policy.with_normalized_inputs)(policies, mean, jnp.exp(log_std))

    def venue(self) -> Venue | None:
        return Venue(self.env) if isinstance(self.env, HostTask) else None

    def play(
        self,
        request: tuple[Array, Environments],
        keys: Array,
        large: bool,
        attackers: PlayAttacks = (),
        venue: Venue | None = None,
    ) -> Played:
        """Play S steps in each of the agents' E environments."""
        if isinstance(self.env, HostTask):
            assert venue is not None
            play = venue.play_segment
        else:
            play = partial(play_segment, self.env)
        return Played(
            *play(
                self.deployed_policy,
                *request,
                keys,
                num_steps=self.ppo.segment,
                horizon=self.horizon,
                attackers=attackers,
            )
        )

    def digest(
        self, state: AgentState, request: tuple[Array, Environments], experience: Played, keys: Array, large: bool
    ) -> tuple[Batch, Sampled]:
        """Compute advantages and the critic's targets."""
        code, numbers = self._separated(len(keys))

        def of_agent(numbers: tuple[Array, ...], parameters: Array, segment: Segment) -> Steps:
            agent = with_numbers(code, numbers)
            _, critic, *agreed = agent.parts(parameters)
            weights, observed = agent.critic.unflatten(critic), (segment.observations, segment.following)
            if agreed:
                mean, log_std = jnp.split(agreed[0], 2)
                observed = tuple((each - mean) * jnp.exp(-log_std) for each in observed)
            values, following = (agent.critic.values(weights, seen) for seen in observed)
            advantages = generalized_advantages(
                agent.ppo.reward_scale * segment.rewards,
                values,
                following,
                segment.terminated,
                segment.ended,
                discount=agent.discount,
                gae_lambda=agent.ppo.gae_lambda,
            )
            return Steps(
                observed[0],
                segment.actions,
                segment.log_probabilities,
                normalized(advantages),
                advantages + values,
            )

        environments = experience.environments
        sampled = Sampled(
            returns=environments.returns,
            steps=jnp.full(len(keys), self.ppo.num_steps),
            ended=jnp.sum(environments.ended - request[1].ended, axis=1),
            health=Health.perfect(len(keys)),
        )
        steps = jax.vmap(of_agent)(numbers, state.parameters, experience.segment)
        seen = experience.segment.observations
        measured = jax.vmap(statistics)(seen) if self.ppo.normalize_observations else None
        return Batch(environments, steps, measured, self._orders(keys)), sampled

    def _orders(self, keys: Array) -> Array | None:
        """A random order of the steps for each epoch.

        Sorting can take longer than a gradient. It is done once per epoch, and sorts words of random high bits whose
        low bits are the numbers of the steps, which on CPUs is ten times as fast as `jax.random.permutation`.
        """
        if self.ppo.minibatches == 1:
            return None

        def of_epoch(key: Array, epoch: Array) -> Array:
            words = jax.random.bits(jax.random.fold_in(key, epoch), (self.ppo.num_steps,))
            return (jnp.sort(words & ~low | numbers, stable=False) & low).astype(jnp.int32)

        numbers = jnp.arange(self.ppo.num_steps, dtype=jnp.uint32)
        low = jnp.uint32(2 ** (self.ppo.num_steps - 1).bit_length() - 1)
        of_agents = jax.vmap(jax.vmap(of_epoch, (None, 0)), (0, None))
        return of_agents(keys_for(keys, MINIBATCHES), jnp.arange(self.ppo.epochs))

    def message(self, state: AgentState, memory: Memory, batch: Batch, exchange: Array | int) -> tuple[Memory, Array]:
        """What an agent learned in one exchange and, in the last one, how far its statistics would move those of θ."""
        after, message = self._learned(state, memory, batch, exchange)
        if batch.statistics is None:
            return after, message
        # Observations of any scale could spoil the networks: as long as nothing is measured, agents learn nothing else.
        known, agreed = self._normalizes(state.parameters), self.parts(state.parameters)[STATISTICS]
        kept = replace(memory, environments=after.environments)
        after = jax.tree.map(partial(where_agents, known), after, kept)
        share = jnp.where(exchange == self.num_exchanges - 1, jnp.where(known, NEW_STATISTICS, 1), 0)[:, None]
        learned = where_agents(known, message, jnp.zeros_like(message))
        return after, learned.at[:, -agreed.shape[1] :].set(share * (batch.statistics - agreed))

    def _normalizes(self, parameters: Array) -> Array:
        """Whether agents [agent] with θ [agent, d] know statistics of their observations: before, these are all 0."""
        return jnp.any(self.parts(parameters)[STATISTICS] != 0, axis=1)

    def _learned(self, state: AgentState, memory: Memory, batch: Batch, exchange: Array | int) -> tuple[Memory, Array]:
        """The gradient of the objective in one update or, with several updates, the change that they make."""
        if not self._steps_alone:
            estimate = self._gradient(state.parameters, batch, exchange)
            history, message = self.remember(memory.history, estimate)
            return Memory(batch.environments, history, None), message

        def update(carry: tuple[AgentState, History | None], number: Array) -> tuple[Any, None]:
            alone, history = carry
            history, message = self.remember(history, self._gradient(alone.parameters, batch, number))
            # No rule stands between this gradient and the agent's own optimizer, which would never forget it.
            finite = jnp.all(jnp.isfinite(message), axis=1)
            alone = jax.tree.map(partial(where_agents, finite), self.stepped(alone, message), alone)
            return (alone, history), None

        assert memory.optimizer is not None
        every = self.ppo.exchange_every
        first = replace(state, optimizer=memory.optimizer)
        numbers = exchange * every + jnp.arange(every)
        (alone, history), _ = lax.scan(update, (first, memory.history), numbers)
        return Memory(batch.environments, history, alone.optimizer), alone.parameters - state.parameters

    def advance(self, state: AgentState, own: Array, aggregated: Array, large: Array | bool) -> AgentState:
        if not self.ppo.normalize_observations:
            return self._moved(state, own, aggregated, large)
        size = self.blocks[STATISTICS]
        moved = self._moved(state, own, aggregated.at[:, -size:].set(0), large)
        moved = jax.tree.map(partial(where_agents, self._normalizes(state.parameters)), moved, state)
        return replace(moved, parameters=moved.parameters.at[:, -size:].add(aggregated[:, -size:]))

    def _moved(self, state: AgentState, own: Array, aggregated: Array, large: Array | bool) -> AgentState:
        if not self._steps_alone:
            return super().advance(state, own, aggregated, large)
        return replace(state, parameters=state.parameters + aggregated, previous=state.parameters, direction=aggregated)

    def _gradient(self, parameters: Array, batch: Batch, update: Array | int) -> Array:
        """The gradient [agent, d] of one update, by policy and critic cut to the largest norm."""
        code, numbers = self._separated(len(parameters))
        size = self.ppo.num_steps // self.ppo.minibatches
        epoch, part = jnp.divmod(jnp.asarray(update), self.ppo.minibatches)

        def of_agent(numbers: tuple[Array, ...], parameters: Array, steps: Steps, orders: Array | None) -> Array:
            agent = with_numbers(code, numbers)
            steps = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), steps)
            if orders is not None:
                chosen = lax.dynamic_slice(orders, (epoch, part * size), (1, size))[0]
                steps = jax.tree.map(lambda leaf: leaf[chosen], steps)
            whole = partial(objective, agent.policy, agent.critic, steps=steps, options=agent.ppo)
            gradients = self.parts(jax.grad(whole)(parameters))
            return jnp.concatenate([shortened(each, agent.ppo.largest_norm) for each in gradients])

        return jax.vmap(of_agent)(numbers, parameters, batch.steps, batch.orders)

    def _separated(self, num_agents: int) -> tuple["PPOAgent", tuple[Array, ...]]:
        """The agents' code, and their numbers [agent]."""
        code, numbers = without_numbers(self)
        return code, tuple(jnp.broadcast_to(jnp.asarray(each), num_agents) for each in numbers)
