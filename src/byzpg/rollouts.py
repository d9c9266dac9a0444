"""Whole episodes of many agents at once, stopping when the last one has ended.

Every array leads with [agent, episode]; agents may be those of one federation or of many: seeds are just more of them.
They are a plain axis and not a `vmap` around the loop, which would turn the loop's writes into scatters.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.attacks import Attack
from byzpg.envs import Environment
from byzpg.kernels import Played, Playing, fits_kernel, play_in_kernel
from byzpg.policies import Policy

# Addresses of random numbers: fold_in(agent's key, purpose, piece or time step).
NOISE, MISCHIEF, ACT, RECORD, RESET = range(5)

# Gradients are taken about this many time steps at once: fewer waste time between products, more the processor's cache.
SPAN = 100
# A span is played in this many pieces: random numbers are drawn for a piece, and between pieces a rollout may stop.
PIECES = 4


@dataclass(frozen=True)
class Clock:
    """A horizon cut into equal spans, and these into equal pieces; the last may reach past it."""

    horizon: int

    @property
    def num_spans(self) -> int:
        return -(-self.horizon // SPAN)

    @property
    def piece(self) -> int:
        return -(-self.horizon // (self.num_spans * PIECES))

    @property
    def span(self) -> int:
        return PIECES * self.piece

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
    keys_of = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(RESET + 1)))(keys)
    poisoned = attack if attack is not None and attack.poisons_play and byzantine is not None else None
    acting = poisoned if poisoned is not None and poisoned.changes_actions else None

    def draws(purpose: int, piece: Array, size: int) -> Array:
        """Uniform draws [time, agent, episode, size] for one piece, by address: agent, purpose, piece."""

        def of_agent(key: Array) -> Array:
            return jax.random.uniform(jax.random.fold_in(key, piece), (clock.piece, num_episodes, size))

        return jax.vmap(of_agent, out_axes=1)(keys_of[:, purpose])

    def keys_at(keys_of: Array, purpose: int, when: Array) -> Array:
        return jax.vmap(jax.random.fold_in, (0, None))(keys_of[:, purpose], when)

    agents = (weights, keys_of, byzantine) if acting else (weights, None, None)

    def step(agents: tuple[Any, ...], playing: Playing, given: tuple[Array, ...]) -> tuple[Playing, Played]:
        (weights, keys_of, byzantine), (time, noise, mischief) = agents, given
        seen = jnp.stack(env.observe(playing.state), axis=-1)
        outputs = jax.vmap(policy.outputs)(weights, seen)
        action = jax.vmap(policy.choose)(weights, outputs, noise[..., : policy.noise_size])
        if acting is not None:
            mixed = env.action_space.uniform(mischief)
            action = where_agents(byzantine, jax.vmap(acting.act)(action, mixed, keys_at(keys_of, ACT, time)), action)
        chance = tuple(noise[..., i] for i in range(policy.noise_size, noise.shape[-1]))
        playing, reward = playing.moved(env, env.action_space.numbers(action), chance, time, horizon)
        return playing, Played(seen, action, outputs, reward)

    def in_a_loop(
        agents: tuple[Any, ...], playing: Playing, times: Array, noise: Array, mischief: Array
    ) -> tuple[Playing, Played]:
        playing, played = lax.scan(partial(step, agents), playing, (times, noise, mischief))
        return playing, jax.tree.map(lambda each: jnp.moveaxis(each, 0, 2), played)

    def in_a_kernel(
        agents: tuple[Any, ...], playing: Playing, times: Array, noise: Array, mischief: Array
    ) -> tuple[Playing, Played]:
        return play_in_kernel(env, policy, weights, playing, times, noise, horizon)

    def play_piece(carry: tuple[Array, Playing, Episodes]) -> tuple[Array, Playing, Episodes]:
        piece, playing, episodes = carry
        times = piece * clock.piece + jnp.arange(clock.piece)
        mischief = draws(MISCHIEF, piece, env.action_space.size if acting else 0)
        mine, chance = jnp.split(draws(NOISE, piece, policy.noise_size + env.noise_size), [policy.noise_size], axis=-1)
        noise = jnp.concatenate([policy.deviates(mine), chance], axis=-1)
        playing, played = lax.platform_dependent(
            *(agents, playing, times, noise, mischief),
            # Attacks are written for whole arrays.
            cuda=in_a_loop if acting or not fits_kernel(env, policy) else in_a_kernel,
            default=in_a_loop,
        )
        alive = times < playing.lengths[..., None]
        noted = played.reward
        if poisoned is not None and byzantine is not None:
            noted = where_agents(byzantine, jax.vmap(poisoned.record)(noted, keys_at(keys_of, RECORD, piece)), noted)
        log_probability = jax.vmap(policy.log_probability)(weights, played.outputs, played.action)

        def write(buffer: Array, values: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(buffer, values.astype(buffer.dtype), times[0], axis=2)

        episodes = Episodes(
            observations=write(episodes.observations, played.seen),
            actions=write(episodes.actions, played.action),
            rewards=write(episodes.rewards, jnp.where(alive, noted, 0)),
            log_probabilities=write(episodes.log_probabilities, jnp.where(alive, log_probability, 0)),
            lengths=playing.lengths,
            returns=episodes.returns + jnp.sum(jnp.where(alive, played.reward, 0), axis=2),
            steps=episodes.steps,
        )
        return piece + 1, playing, episodes

    def any_left(carry: tuple[Array, Playing, Episodes]) -> Array:
        piece, playing, _ = carry
        return (piece < clock.num_spans * PIECES) & jnp.any(playing.alive)

    def reset(key: Array) -> Any:
        return jax.vmap(env.reset)(jax.random.split(key, num_episodes))

    outputs = jax.ShapeDtypeStruct((*shape, policy.num_outputs), parameters.dtype)
    action = jax.eval_shape(jax.vmap(policy.mode), weights, outputs)
    blank = jnp.zeros((*shape, clock.padded))
    episodes = Episodes(
        observations=jnp.zeros((*shape, clock.padded, env.observation_size)),
        actions=jnp.zeros((*shape, clock.padded, *action.shape[2:]), action.dtype),
        rewards=blank,
        log_probabilities=blank,
        lengths=jnp.zeros(shape, int),
        returns=jnp.zeros(shape),
        steps=jnp.asarray(0),
    )
    start = Playing(jax.vmap(reset)(keys_of[:, RESET]), jnp.ones(shape, bool), episodes.lengths)
    _, _, episodes = lax.while_loop(any_left, play_piece, (jnp.asarray(0), start, episodes))
    return replace(episodes, steps=jnp.max(episodes.lengths))


def where_agents(mask: Array, changed: Array, unchanged: Array) -> Array:
    """jnp.where with a mask over the leading axes."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (unchanged.ndim - mask.ndim)), changed, unchanged)
