"""Whole episodes of many agents at once, stopping when the last one has ended.

Every array leads with [agent, episode]; agents may be those of one federation or of many: seeds are just more of them.
They are a plain axis and not a `vmap` around the loop, which would turn the loop's writes into scatters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.envs import Environment
from byzpg.envs.loops import by_platform
from byzpg.learning.policies import Policy
from byzpg.learning.rollout_kernel import Played, Playing, fits_kernel, play_in_kernel
from byzpg.robust.attacks import Attack

# Addresses of random numbers: fold_in(agent's key, purpose, piece or time step).
NOISE, MISCHIEF, RECORD, RESET = 0, 1, 3, 4

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


# Attacks on play, each with the agents [agent] that commit it.
PlayAttacks = Sequence[tuple[Attack, Array]]


def rollout(
    env: Environment,
    policy: Policy,
    parameters: Array,
    keys: Array,
    *,
    num_episodes: int,
    horizon: int,
    attackers: PlayAttacks = (),
) -> Episodes:
    """Play `num_episodes` episodes with each agent's parameters [agent, d] and key [agent].

    Where the mask of an attack is set, its play hooks change actions and noted rewards.
    """
    num_agents, clock = len(parameters), Clock(horizon)
    shape = (num_agents, num_episodes)
    weights = jax.vmap(policy.unflatten)(parameters)
    keys_of = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(RESET + 1)))(keys)
    acting = [(attack, who) for attack, who in attackers if attack.changes_actions]

    def draws(purpose: int, piece: Array, size: int) -> Array:
        """Uniform draws [time, agent, episode, size] for one piece, by address: agent, purpose, piece."""

        def of_agent(key: Array) -> Array:
            return jax.random.uniform(jax.random.fold_in(key, piece), (clock.piece, num_episodes, size))

        return jax.vmap(of_agent, out_axes=1)(keys_of[:, purpose])

    agents = (weights, [who for _, who in acting])

    def step(agents: tuple[Any, ...], playing: Playing, given: tuple[Any, ...]) -> tuple[Playing, Played]:
        (weights, masks), (time, noise, mischief) = agents, given
        seen = jnp.stack(env.observe(playing.state), axis=-1)
        outputs = jax.vmap(policy.outputs)(weights, seen)
        action = jax.vmap(policy.choose)(weights, outputs, noise[..., : policy.noise_size])
        for (attack, _), who in zip(acting, masks, strict=True):
            action = where_agents(who, attack.act(action, mischief), action)
        chance = tuple(noise[..., i] for i in range(policy.noise_size, noise.shape[-1]))
        playing, reward = playing.moved(env, env.action_space.numbers(action), chance, time, horizon)
        return playing, Played(seen, action, outputs, reward)

    def in_a_loop(
        agents: tuple[Any, ...], playing: Playing, times: Array, noise: Array, mischief: Array | None
    ) -> tuple[Playing, Played]:
        playing, played = lax.scan(partial(step, agents), playing, (times, noise, mischief))
        return playing, jax.tree.map(lambda each: jnp.moveaxis(each, 0, 2), played)

    def in_a_kernel(
        agents: tuple[Any, ...], playing: Playing, times: Array, noise: Array, mischief: Array | None
    ) -> tuple[Playing, Played]:
        weights, masks = agents
        attackers = [(attack, who) for (attack, _), who in zip(acting, masks, strict=True)]
        return play_in_kernel(env, policy, weights, playing, times, noise, mischief, horizon, attackers)

    def play_piece(carry: tuple[Array, Playing, Episodes]) -> tuple[Array, Playing, Episodes]:
        piece, playing, episodes = carry
        times = piece * clock.piece + jnp.arange(clock.piece)
        mischief = None
        if acting:
            mischief = env.action_space.uniform(draws(MISCHIEF, piece, env.action_space.size))
        mine, chance = jnp.split(draws(NOISE, piece, policy.noise_size + env.noise_size), [policy.noise_size], axis=-1)
        noise = jnp.concatenate([policy.deviates(mine), chance], axis=-1)
        playing, played = by_platform(
            *(agents, playing, times, noise, mischief),
            cuda=in_a_kernel if fits_kernel(env, policy) else in_a_loop,
            default=in_a_loop,
        )
        alive = times < playing.lengths[..., None]
        noted = played.reward
        for attack, who in attackers:
            fresh = jax.vmap(jax.random.fold_in, (0, None))(keys_of[:, RECORD], piece)
            noted = where_agents(who, jax.vmap(attack.record)(noted, fresh), noted)
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
