"""Whole episodes of many agents at once, stopping when the last one has ended.

Every array leads with [agent, episode]; agents may be those of one federation or of many: seeds are just more of them.
They are a plain axis and not a `vmap` around the loop, which would turn the loop's writes into scatters.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.attacks import Attack
from byzpg.envs import Environment
from byzpg.policies import Policy

# Time is cut into spans of about this many steps: random numbers are drawn, and gradients taken, a span at a time.
SPAN = 100


@dataclass(frozen=True)
class Clock:
    """A horizon cut into equal spans; the last may reach past it."""

    horizon: int

    @property
    def num_spans(self) -> int:
        return -(-self.horizon // SPAN)

    @property
    def span(self) -> int:
        return -(-self.horizon // self.num_spans)

    @property
    def padded(self) -> int:
        return self.span * self.num_spans


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Episodes:
    """Episodes, padded in time: from `lengths` on, rewards and log-probabilities are 0."""

    observations: Array  # [agent, episode, time, feature]
    actions: Array  # [agent, episode, time, ...]
    rewards: Array  # [agent, episode, time], as noted down
    log_probabilities: Array  # [agent, episode, time], log π(a|s) of the policy that played
    lengths: Array  # [agent, episode]
    returns: Array  # [agent, episode], undiscounted, as the environment paid
    steps: Array  # how many time steps the longest episode took


def rollout(
    env: Environment,
    policy: Policy,
    parameters: Array,
    keys: Array,
    *,
    num_episodes: int,
    horizon: int,
    attack: Attack | None = None,
    byzantine: Array | None = None,
) -> Episodes:
    """Play `num_episodes` episodes with each agent's parameters [agent, d] and key [agent].

    Where `byzantine` [agent] is set, the attack's play hooks change actions and noted rewards.
    """
    num_agents, clock = len(parameters), Clock(horizon)
    shape = (num_agents, num_episodes)
    weights = jax.vmap(policy.unflatten)(parameters)
    poisoned = attack if attack is not None and attack.poisons_play and byzantine is not None else None

    def uniform(purpose: int, span: Array | int, size: int) -> Array:
        """Draws [agent, episode, span, size], from the address (agent, purpose, span)."""

        def draw(key: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(key, purpose), span)
            return jax.random.uniform(key, (num_episodes, clock.span, size))

        return jax.vmap(draw)(keys)

    def write(buffer: Array, value: Array, time: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(buffer, value[:, :, None].astype(buffer.dtype), time, axis=2)

    def play_span(carry: tuple[Array, tuple]) -> tuple[Array, tuple]:
        span, played = carry
        noise = uniform(0, span, policy.noise_size + env.noise_size)
        mischief = uniform(1, span, env.action_space.noise_size) if poisoned else None

        def step(carry: tuple[Array, tuple]) -> tuple[Array, tuple]:
            time, (state, alive, lengths, returns, observations, actions, rewards, log_probabilities) = carry
            here = lax.dynamic_index_in_dim(noise, time, axis=2, keepdims=False)
            seen = env.observe(state)
            outputs = jax.vmap(policy.outputs)(weights, seen)
            action = jax.vmap(policy.draw)(weights, outputs, here[..., : policy.noise_size])
            if poisoned is not None and byzantine is not None and mischief is not None:
                mixed = env.action_space.uniform(lax.dynamic_index_in_dim(mischief, time, axis=2, keepdims=False))
                lie = jax.vmap(poisoned.act)(action, mixed, attack_keys(span, time, 2))
                action = _where(byzantine, lie, action)
            log_probability = jax.vmap(policy.log_probability)(weights, outputs, action)
            moved, reward, terminated = env.step(state, action, here[..., policy.noise_size :])
            # An episode that has ended stays where it ended: stepping on could overflow.
            state = jax.tree.map(lambda new, old: _where(alive, new, old), moved, state)
            reward = jnp.where(alive, reward, 0)
            noted = reward
            if poisoned is not None and byzantine is not None:
                lie = jax.vmap(poisoned.record)(reward, attack_keys(span, time, 3))
                noted = _where(byzantine, jnp.where(alive, lie, 0), reward)
            now = span * clock.span + time
            played = (
                state,
                alive & ~terminated,
                lengths + alive,
                returns + reward,
                write(observations, seen, now),
                write(actions, action, now),
                write(rewards, noted, now),
                write(log_probabilities, jnp.where(alive, log_probability, 0), now),
            )
            return time + 1, played

        def goes_on(carry: tuple[Array, tuple]) -> Array:
            time, (_, alive, *_) = carry
            return (time < clock.span) & (span * clock.span + time < horizon) & jnp.any(alive)

        _, played = lax.while_loop(goes_on, step, (jnp.asarray(0), played))
        return span + 1, played

    def attack_keys(span: Array, time: Array, purpose: int) -> Array:
        address = span * clock.span + time
        return jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, purpose), address))(keys)

    def any_left(carry: tuple[Array, tuple]) -> Array:
        span, (_, alive, *_) = carry
        return (span < clock.num_spans) & jnp.any(alive)

    def reset(key: Array) -> object:
        return jax.vmap(env.reset)(jax.random.split(jax.random.fold_in(key, 4), num_episodes))

    state = jax.vmap(reset)(keys)
    outputs = jax.ShapeDtypeStruct((*shape, policy.num_outputs), parameters.dtype)
    example = jax.eval_shape(jax.vmap(policy.mode), weights, outputs)
    blank = jnp.zeros((*shape, clock.padded))
    played = (
        state,
        jnp.ones(shape, bool),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape),
        jnp.zeros((*shape, clock.padded, env.observation_size)),
        jnp.zeros((*shape, clock.padded, *example.shape[2:]), example.dtype),
        blank,
        blank,
    )
    _, played = lax.while_loop(any_left, play_span, (jnp.asarray(0), played))
    _, _, lengths, returns, observations, actions, rewards, log_probabilities = played
    return Episodes(observations, actions, rewards, log_probabilities, lengths, returns, jnp.max(lengths))


def _where(mask: Array, changed: Array, unchanged: Array) -> Array:
    """jnp.where with a mask over the leading axes."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (unchanged.ndim - mask.ndim)), changed, unchanged)
