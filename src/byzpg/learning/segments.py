"""Segments: a fixed number of steps in environments that go on from one iteration to the next.

Every array leads with [agent, environment]. An episode that ends is followed by the next one in the same step, so that
every environment takes all steps of a segment. A new episode starts from a state that was drawn when the segment began:
an environment has a few of them, and where it needs more, it takes those of the next environment. So the start of every
episode has the task's distribution, though two episodes of one segment may start alike.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.envs import Environment, HostTask, Task
from byzpg.learning.policies import Policy
from byzpg.learning.rollout_kernel import where_agents
from byzpg.learning.rollouts import ATTACK_ACTIONS, ATTACK_REWARDS, NOISE, RESET, PlayAttacks

# An environment has one fresh start for so many steps of a segment, and at least one.
STEPS_PER_START = 32

NOT_STARTED = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Environments:
    """Where environments stand between two segments; arrays are [agent, environment]."""

    state: Any
    elapsed: Array  # steps of the current episode; NOT_STARTED before the first one
    gained: Array  # undiscounted return of the current episode so far
    latest: Array  # return of the last episode that ended; until there is one, `gained`
    ended: Array  # number of episodes that ended

    @property
    def returns(self) -> Array:
        """The return of the last episode that ended in each environment.

        Where none has ended, it is the mean over the agent's other environments; where none has in any, the return so
        far.
        """
        known = self.ended > 0
        number = jnp.sum(known, axis=1, keepdims=True)
        mean = jnp.sum(jnp.where(known, self.latest, 0), axis=1, keepdims=True) / jnp.maximum(number, 1)
        return jnp.where(known | (number == 0), self.latest, mean)

    @classmethod
    def initial(cls, env: Task, num_agents: int, num_environments: int) -> "Environments":
        """Environments that have not been started; those of a host task are elsewhere, and have no state here."""
        shape = num_agents, num_environments
        first = () if isinstance(env, HostTask) else jax.eval_shape(env.reset, jax.random.key(0))
        state = jax.tree.map(lambda leaf: jnp.zeros((*shape, *leaf.shape), leaf.dtype), first)
        blank, none = jnp.zeros(shape), jnp.zeros(shape, jnp.int32)
        return cls(state, jnp.full(shape, NOT_STARTED, jnp.int32), blank, blank, none)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segment:
    """Steps of all environments: [agent, environment, time, ...]."""

    observations: Array
    following: Array  # what the agent saw after the step, before a new episode began
    actions: Array
    rewards: Array  # as the agent recorded them
    log_probabilities: Array  # log π(a|s) of the policy that played
    terminated: Array  # whether the task ended the episode with this step
    ended: Array  # whether the episode ended with this step, by the task or at the horizon


def play_segment(
    env: Environment,
    policy: Policy,
    parameters: Array,
    environments: Environments,
    keys: Array,
    *,
    num_steps: int,
    horizon: int,
    attackers: PlayAttacks = (),
) -> tuple[Environments, Segment]:
    """Take steps in all environments with every agent's policy.

    Args:
        env: The environment, the same for all agents.
        policy: The policy's architecture, the same for all agents.
        parameters: The parameters of each agent's policy [agent, d].
        environments: Where the environments stand.
        keys: A random key for each agent [agent].
        num_steps: The number of steps in each environment.
        horizon: The number of steps after which an episode is cut off.
        attackers: Attacks on play. They change the actions and the recorded rewards of the agents in their masks.
    """
    num_environments = environments.elapsed.shape[1]
    weights = jax.vmap(policy.unflatten)(parameters)
    shape = num_steps, num_environments
    noise = draws(keys, NOISE, (*shape, policy.noise_size + env.noise_size))
    on_actions = [(attack, mask) for attack, mask in attackers if attack.changes_actions]
    uniform = (
        env.action_space.uniform(draws(keys, ATTACK_ACTIONS, (*shape, env.action_space.size))) if on_actions else None
    )
    starts = _starts(env, keys_for(keys, RESET), num_environments * -(-num_steps // STEPS_PER_START))

    def step(carry: tuple[Environments, Array], given: tuple[Array, Array | None]) -> Any:
        (here, used), (noise, uniform) = carry, given
        observations = jnp.stack(env.observe(here.state), axis=-1)
        outputs = jax.vmap(policy.outputs)(weights, observations)
        actions = jax.vmap(policy.draw)(weights, outputs, noise[..., : policy.noise_size])
        for attack, mask in on_actions:
            assert uniform is not None
            actions = where_agents(mask, attack.act(actions, uniform), actions)
        log_probabilities = jax.vmap(policy.log_probability)(weights, outputs, actions)
        for_env = tuple(noise[..., i] for i in range(policy.noise_size, noise.shape[-1]))
        state, rewards, terminated = env.step(here.state, env.action_space.numbers(actions), for_env)
        ended = terminated | (here.elapsed + 1 >= horizon)
        played = Segment(
            observations,
            jnp.stack(env.observe(state), axis=-1),
            actions,
            rewards,
            log_probabilities,
            terminated,
            ended,
        )
        gained, is_first = here.gained + rewards, here.ended == 0
        there = Environments(
            state,
            here.elapsed + 1,
            gained,
            jnp.where(ended | is_first, gained, here.latest),
            here.ended + ended.astype(here.ended.dtype),
        )
        return _restarted(there, ended, starts, used), played

    before = _restarted(environments, environments.elapsed == NOT_STARTED, starts, jnp.zeros_like(environments.elapsed))
    (after, _), played = lax.scan(step, before, (noise, uniform))
    segment = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 2), played)
    return after, replace(segment, rewards=recorded_rewards(segment, keys, attackers))


def keys_for(keys: Array, purpose: int) -> Array:
    """The keys [agent] of a purpose."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, purpose)


def draws(keys: Array, purpose: int, shape: tuple[int, int, int]) -> Array:
    """Uniform draws [time, agent, environment, size], each agent's of a shape [time, environment, size]."""
    return jax.vmap(lambda key: jax.random.uniform(key, shape), out_axes=1)(keys_for(keys, purpose))


def recorded_rewards(segment: Segment, keys: Array, attackers: PlayAttacks) -> Array:
    """What the agents record of the environment's rewards [agent, environment, time]."""
    rewards = segment.rewards
    for attack, mask in attackers:
        changed = jax.vmap(attack.record_step)(rewards, segment.actions, keys_for(keys, ATTACK_REWARDS))
        rewards = where_agents(mask, changed, rewards)
    return rewards


def _starts(env: Environment, keys: Array, number: int) -> Any:
    """Fresh states of new episodes [agent, number]."""
    return jax.vmap(lambda key: jax.vmap(env.reset)(jax.random.split(key, number)))(keys)


def _restarted(environments: Environments, where: Array, starts: Any, used: Array) -> tuple[Environments, Array]:
    """The environments with a new episode in some places, and how many starts each has used."""
    number, num_environments = jax.tree.leaves(starts)[0].shape[1], where.shape[1]
    per_environment = number // num_environments
    places = (jnp.arange(num_environments) * per_environment + used) % number
    fresh = jax.vmap(lambda of_agent, place: jax.tree.map(lambda leaf: leaf[place], of_agent))(starts, places)
    restarted = replace(
        environments,
        state=jax.tree.map(partial(where_agents, where), fresh, environments.state),
        elapsed=jnp.where(where, 0, environments.elapsed),
        gained=jnp.where(where, 0, environments.gained),
    )
    return restarted, used + where.astype(used.dtype)
