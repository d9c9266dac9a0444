"""Rollouts: whole episodes of many agents at once. A rollout stops when the last episode has ended.

Every array leads with [agent, episode]. The agents may belong to one federation or to many: more seeds are just more
agents. They are a plain array axis rather than a `vmap` around the loop, because `vmap` would turn the loop's writes
into scatters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.envs import Environment
from byzpg.envs.loops import by_platform
from byzpg.learning.policies import Policy
from byzpg.learning.rollout_kernel import Agents, Ongoing, Setup, StepInputs, Transitions, fits_kernel, play_in_kernel
from byzpg.robust.attacks import Attack

# Purposes in the addresses of random numbers: fold_in(fold_in(agent's key, purpose), piece).
NOISE, ATTACK_ACTIONS, ATTACK_REWARDS, RESET = 0, 1, 3, 4

# Gradients are computed for about this many time steps at once. Shorter spans waste time between matrix products, and
# longer ones do not fit into the processor's cache.
SPAN = 100
# A span is played in this many pieces. Random numbers are drawn piece by piece, and a rollout may stop between pieces.
PIECES = 4


@dataclass(frozen=True)
class Clock:
    """A horizon divided into equal spans, and each span into equal pieces; the last ones may reach past the horizon."""

    horizon: int

    @property
    def num_spans(self) -> int:
        return -(-self.horizon // SPAN)

    @property
    def num_pieces(self) -> int:
        return self.num_spans * PIECES

    @property
    def piece(self) -> int:
        """Time steps per piece."""
        return -(-self.horizon // self.num_pieces)

    @property
    def span(self) -> int:
        """Time steps per span."""
        return PIECES * self.piece

    @property
    def padded(self) -> int:
        """Time steps of all spans together, at least `horizon`."""
        return self.span * self.num_spans


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Episodes:
    """Episodes, padded in time: rewards and log-probabilities are 0 from `lengths` on."""

    observations: Array  # [agent, episode, time, feature]
    actions: Array  # [agent, episode, time, ...]
    rewards: Array  # [agent, episode, time], as the agent recorded them
    log_probabilities: Array  # [agent, episode, time], log π(a|s) of the policy that played
    lengths: Array  # [agent, episode]
    returns: Array  # [agent, episode], undiscounted sums of the environment's true rewards
    steps: Array  # the length of the longest episode


# Attacks on play, each with a mask [agent] of the agents that commit it.
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
    """Play episodes with every agent's policy.

    Args:
        env: The environment, the same for all agents.
        policy: The policy's architecture, the same for all agents.
        parameters: The parameters of each agent's policy [agent, d].
        keys: A random key for each agent [agent].
        num_episodes: The number of episodes that each agent plays.
        horizon: The number of time steps after which an episode is cut off.
        attackers: Attacks on play. They change the actions and the recorded rewards of the agents in their masks.
    """
    weights = jax.vmap(policy.unflatten)(parameters)
    keys = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(RESET + 1)))(keys)
    on_actions = [(attack, mask) for attack, mask in attackers if attack.changes_actions]
    run = _Rollout(
        Setup(env, policy, horizon, tuple(attack for attack, _ in on_actions)),
        Agents(weights, [mask for _, mask in on_actions]),
        keys,
        attackers,
        num_episodes,
    )
    episodes = lax.while_loop(run.unfinished, run.play_piece, run.start()).episodes
    return replace(episodes, steps=jnp.max(episodes.lengths))


class _Progress(NamedTuple):
    """How far a rollout has come: the next piece, where its episodes stand, and what was written so far."""

    piece: Array
    ongoing: Ongoing
    episodes: Episodes


@dataclass(frozen=True)
class _Rollout:
    """Everything that a rollout's loop reads and never changes."""

    setup: Setup
    agents: Agents
    keys: Array  # [agent, purpose]
    attackers: PlayAttacks
    num_episodes: int

    @property
    def clock(self) -> Clock:
        return Clock(self.setup.horizon)

    def start(self) -> _Progress:
        """The first states of all episodes, and arrays of zeros to write into."""
        env, policy = self.setup.env, self.setup.policy
        shape, padded = (len(self.keys), self.num_episodes), self.clock.padded
        outputs = jax.ShapeDtypeStruct((*shape, policy.num_outputs), self.agents.weights[0][0].dtype)
        action = jax.eval_shape(jax.vmap(policy.mode), self.agents.weights, outputs)
        blank = jnp.zeros((*shape, padded))
        episodes = Episodes(
            observations=jnp.zeros((*shape, padded, env.observation_size)),
            actions=jnp.zeros((*shape, padded, *action.shape[2:]), action.dtype),
            rewards=blank,
            log_probabilities=blank,
            lengths=jnp.zeros(shape, int),
            returns=jnp.zeros(shape),
            steps=jnp.asarray(0),
        )

        def first_states(key: Array) -> Array:
            return jax.vmap(env.reset)(jax.random.split(key, self.num_episodes))

        states = jax.vmap(first_states)(self.keys[:, RESET])
        return _Progress(jnp.asarray(0), Ongoing(states, jnp.ones(shape, bool), episodes.lengths), episodes)

    def unfinished(self, progress: _Progress) -> Array:
        return (progress.piece < self.clock.num_pieces) & jnp.any(progress.ongoing.alive)

    def play_piece(self, progress: _Progress) -> _Progress:
        """Play the next piece and write it into the episodes."""
        piece, ongoing, episodes = progress
        inputs = self.inputs(piece)
        in_loop, in_kernel = (partial(way, self.setup) for way in (play_in_loop, play_in_kernel))
        ongoing, played = by_platform(
            self.agents,
            ongoing,
            inputs,
            cuda=in_kernel if fits_kernel(self.setup) else in_loop,
            default=in_loop,
        )
        alive = inputs.times < ongoing.lengths[..., None]
        recorded = self.recorded_rewards(piece, played.rewards)
        log_probabilities = jax.vmap(self.setup.policy.log_probability)(
            self.agents.weights, played.outputs, played.actions
        )

        def write(buffer: Array, values: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(buffer, values.astype(buffer.dtype), inputs.times[0], axis=2)

        episodes = Episodes(
            observations=write(episodes.observations, played.observations),
            actions=write(episodes.actions, played.actions),
            rewards=write(episodes.rewards, jnp.where(alive, recorded, 0)),
            log_probabilities=write(episodes.log_probabilities, jnp.where(alive, log_probabilities, 0)),
            lengths=ongoing.lengths,
            returns=episodes.returns + jnp.sum(jnp.where(alive, played.rewards, 0), axis=2),
            steps=episodes.steps,
        )
        return _Progress(piece + 1, ongoing, episodes)

    def inputs(self, piece: Array) -> StepInputs:
        """The time steps of a piece, and their random numbers."""
        env, policy = self.setup.env, self.setup.policy
        times = piece * self.clock.piece + jnp.arange(self.clock.piece)
        uniform_actions = None
        if self.setup.action_attacks:
            uniform_actions = env.action_space.uniform(self.draws(ATTACK_ACTIONS, piece, env.action_space.size))
        draws = self.draws(NOISE, piece, policy.noise_size + env.noise_size)
        for_policy, for_env = jnp.split(draws, [policy.noise_size], axis=-1)
        noise = jnp.concatenate([policy.deviates(for_policy), for_env], axis=-1)
        return StepInputs(times, noise, uniform_actions)

    def draws(self, purpose: int, piece: Array, size: int) -> Array:
        """Uniform draws [time, agent, episode, size] for one piece."""

        def of_agent(key: Array) -> Array:
            return jax.random.uniform(jax.random.fold_in(key, piece), (self.clock.piece, self.num_episodes, size))

        return jax.vmap(of_agent, out_axes=1)(self.keys[:, purpose])

    def recorded_rewards(self, piece: Array, rewards: Array) -> Array:
        """What the agents record of the environment's rewards [agent, episode, time] of one piece."""
        for attack, mask in self.attackers:
            keys = jax.vmap(jax.random.fold_in, (0, None))(self.keys[:, ATTACK_REWARDS], piece)
            rewards = where_agents(mask, jax.vmap(attack.record)(rewards, keys), rewards)
        return rewards


def play_in_loop(setup: Setup, agents: Agents, ongoing: Ongoing, inputs: StepInputs) -> tuple[Ongoing, Transitions]:
    """Play the steps of `inputs` one after the other, on arrays of all agents and episodes."""

    def step(ongoing: Ongoing, given: StepInputs) -> tuple[Ongoing, Transitions]:
        env, policy = setup.env, setup.policy
        time, noise, uniform_actions = given
        observations = jnp.stack(env.observe(ongoing.state), axis=-1)
        outputs = jax.vmap(policy.outputs)(agents.weights, observations)
        actions = jax.vmap(policy.choose)(agents.weights, outputs, noise[..., : policy.noise_size])
        if uniform_actions is not None:
            for attack, mask in zip(setup.action_attacks, agents.action_attackers, strict=True):
                actions = where_agents(mask, attack.act(actions, uniform_actions), actions)
        for_env = tuple(noise[..., i] for i in range(policy.noise_size, noise.shape[-1]))
        ongoing, rewards = ongoing.stepped(setup, env.action_space.numbers(actions), for_env, time)
        return ongoing, Transitions(observations, actions, outputs, rewards)

    ongoing, played = lax.scan(step, ongoing, inputs)
    return ongoing, jax.tree.map(lambda each: jnp.moveaxis(each, 0, 2), played)


def where_agents(mask: Array, changed: Array, unchanged: Array) -> Array:
    """`jnp.where` with a mask over the leading axes."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (unchanged.ndim - mask.ndim)), changed, unchanged)
