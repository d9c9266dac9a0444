"""Agents with a critic, which learn by proximal policy optimization.

θ is the policy's parameters followed by the critic's. Their gradients are aggregated each by itself: the critic's is
longer, and would otherwise decide every distance.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from byzpg.envs import Environment, HostTask
from byzpg.federation.agents import Agent, AgentState, History, Sampled
from byzpg.learning.advantages import PPO, Steps, generalized_advantages, normalized, objective, shortened
from byzpg.learning.gradients import Health
from byzpg.learning.policies import Critic
from byzpg.learning.rollouts import PlayAttacks
from byzpg.learning.segments import Environments, Segment, play_segment
from byzpg.robust.components import with_numbers, without_numbers

# The factor of the policy's last layer in θ_0: so the first actions are almost uniform, whatever is observed.
FIRST_POLICY = 0.01
# The purpose of the keys of minibatches under an agent's key, beside those of play.
MINIBATCHES = 6


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
    orders: Array | None  # of the steps in each epoch [agent, epoch, step]; None if it has one minibatch


@dataclass(frozen=True)
class PPOAgent(Agent):
    """An agent that plays on in its environments, and learns from every step several times."""

    numbers: ClassVar[tuple[str, ...]] = ("discount", "momentum", "step_size", "adam_epsilon")
    unit: ClassVar[Literal["trajectories", "steps"]] = "steps"

    ppo: PPO

    @property
    def critic(self) -> Critic:
        return Critic(self.policy.observation_size, self.policy.hidden, self.policy.activation)

    @property
    def shared(self) -> tuple[Any, ...]:
        options = self.ppo
        counts = options.environments, options.segment, options.epochs, options.minibatches, options.exchange_every
        return self.env, self.policy, self.horizon, counts

    @property
    def num_exchanges(self) -> int:
        return self.ppo.num_exchanges

    @property
    def num_updates(self) -> int:
        return self.ppo.num_updates

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.policy.dimension, self.critic.dimension

    @property
    def _task(self) -> Environment:
        assert not isinstance(self.env, HostTask)
        return self.env

    @property
    def _steps_alone(self) -> bool:
        """Whether agents take steps of their own between exchanges, and exchange how far these led."""
        return self.ppo.exchange_every > 1

    def initial_parameters(self, key: Array) -> Array:
        for_policy, for_critic = jax.random.split(key)
        policy = self.policy.with_last_layer(self.policy.initial(for_policy), FIRST_POLICY)
        return jnp.concatenate([policy, self.critic.initial(for_critic)])

    def initial_memory(self, parameters: Array) -> Memory:
        return Memory(
            Environments.initial(self._task, len(parameters), self.ppo.environments),
            self.initial_history(parameters),
            jax.vmap(self._transform().init)(parameters) if self._steps_alone else None,
        )

    def recalled(self, direction: Array, count: Array) -> Memory:
        blank = self.initial_memory(direction)
        if self._steps_alone:  # `direction` is a change of parameters then, and no gradient
            return blank
        return Memory(blank.environments, self.recalled_history(direction, count * self.num_updates), None)

    def request(self, state: AgentState, memory: Memory, keys: Array, large: bool) -> tuple[Array, Environments]:
        """The parameters of the policies [agent, d], and where the environments stand."""
        return state.parameters[:, : self.policy.dimension], memory.environments

    def play(
        self, request: tuple[Array, Environments], keys: Array, large: bool, attackers: PlayAttacks = ()
    ) -> Played:
        """Play S steps in each of the agents' E environments."""
        return Played(
            *play_segment(
                self._task,
                self.policy,
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
            weights = agent.critic.unflatten(parameters[agent.policy.dimension :])
            values, following = (
                agent.critic.values(weights, seen) for seen in (segment.observations, segment.following)
            )
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
                segment.observations,
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
        return Batch(environments, steps, self._orders(keys)), sampled

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
        for_minibatches = jax.vmap(jax.random.fold_in, (0, None))(keys, MINIBATCHES)
        return jax.vmap(jax.vmap(of_epoch, (None, 0)), (0, None))(for_minibatches, jnp.arange(self.ppo.epochs))

    def message(self, state: AgentState, memory: Memory, batch: Batch, exchange: Array | int) -> tuple[Memory, Array]:
        """The gradient of the objective in one update or, with several updates, the change that they make."""
        if not self._steps_alone:
            estimate = self._gradient(state.parameters, batch, exchange)
            history, message = self.remember(memory.history, estimate)
            return Memory(batch.environments, history, None), message

        def update(carry: tuple[AgentState, History | None], number: Array) -> tuple[Any, None]:
            alone, history = carry
            history, message = self.remember(history, self._gradient(alone.parameters, batch, number))
            return (self.stepped(alone, message), history), None

        assert memory.optimizer is not None
        every = self.ppo.exchange_every
        first = replace(state, optimizer=memory.optimizer)
        numbers = exchange * every + jnp.arange(every)
        (alone, history), _ = lax.scan(update, (first, memory.history), numbers)
        return Memory(batch.environments, history, alone.optimizer), alone.parameters - state.parameters

    def advance(self, state: AgentState, own: Array, aggregated: Array, large: Array | bool) -> AgentState:
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
