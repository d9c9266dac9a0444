"""Rollouts: whole episodes of many agents at once. A rollout stops when the last episode has ended.

Every array leads with [agent, episode]. The agents may belong to one federation or to many: more seeds are just more
agents. They are a plain array axis rather than a `vmap` around the loop, because `vmap` would turn the loop's writes
into scatters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.envs import Environment
from byzpg.envs.loops import computed_once
from byzpg.learning.policies import Policy
from byzpg.learning.rollout_kernel import (
    Agents,
    Ongoing,
    Setup,
    StepInputs,
    Transitions,
    fits_kernel,
    play_in_kernel,
    where_agents,
)
from byzpg.robust.attacks import Attack
from byzpg.robust.components import by_platform

# Purposes in the addresses of random numbers: fold_in(fold_in(agent's key, purpose), piece).
NOISE, ATTACK_ACTIONS, ATTACK_REWARDS, RESET = 0, 1, 3, 4

# Gradients are computed for about this many time steps at once. Shorter spans waste time between matrix products, and
# longer ones do not fit into the processor's cache.
SPAN = 100
# A span is played in this many pieces. Random numbers are drawn piece by piece, and a rollout may stop between pieces.
PIECES = 4
# On CPUs, the running episodes of a piece are played in groups, and the others cost nothing. A group has rows of this
# many episodes of one agent, so that the policy's matrix products stay products of matrices.
ROW = 8
# The number of episodes per group: more for environments whose steps take long, so that they share the loops inside.
GROUP, GROUP_WITH_LOOPS = 128, 256
# On CPUs, agents play in turns of about this many episodes, and a turn ends when its last episode has ended, because
# federations that share a program may play for very different times.
TURN = 400


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
    attacks, masks = [attack for attack, _ in attackers], [jnp.asarray(mask) for _, mask in attackers]

    def play(agents: _Given) -> Episodes:
        weights = jax.vmap(policy.unflatten)(agents.parameters)
        keys = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(RESET + 1)))(agents.keys)
        attackers = [*zip(attacks, agents.masks, strict=True)]
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

    number = len(keys)
    num_turns = 1 if env.has_loops else min(number, max(1, round(number * num_episodes / TURN)))
    size = -(-number // num_turns)
    num_turns = -(-number // size)

    def in_turns(agents: _Given) -> Episodes:
        each = jnp.minimum(jnp.arange(num_turns * size), number - 1).reshape(num_turns, size)
        episodes = lax.map(play, jax.tree.map(lambda leaf: leaf[each], agents))
        longest = jnp.max(episodes.steps)
        episodes = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:number], episodes)
        return replace(episodes, steps=longest)

    given = _Given(parameters, keys, masks)
    return play(given) if num_turns == 1 else by_platform(given, cuda=play, default=in_turns)


class _Given(NamedTuple):
    """What `rollout` gets for each agent: arrays [agent, ...]."""

    parameters: Array
    keys: Array
    masks: list[Array]  # for each attack, the agents that commit it


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
        outputs = jax.ShapeDtypeStruct((*shape, policy.num_outputs), jax.tree.leaves(self.agents.weights)[0].dtype)
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
        ongoing, played = by_platform(piece, ongoing, cuda=self.play_all, default=self.play_running)
        times = self.times(piece)
        alive = times < ongoing.lengths[..., None]
        recorded = self.recorded_rewards(piece, played)

        def write(buffer: Array, values: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(buffer, values.astype(buffer.dtype), times[0], axis=2)

        episodes = Episodes(
            observations=write(episodes.observations, played.observations),
            actions=write(episodes.actions, played.actions),
            rewards=write(episodes.rewards, jnp.where(alive, recorded, 0)),
            log_probabilities=write(episodes.log_probabilities, jnp.where(alive, played.log_probabilities, 0)),
            lengths=ongoing.lengths,
            returns=episodes.returns + jnp.sum(jnp.where(alive, played.rewards, 0), axis=2),
            steps=episodes.steps,
        )
        return _Progress(piece + 1, ongoing, episodes)

    def play_all(self, piece: Array, ongoing: Ongoing) -> tuple[Ongoing, "_Played"]:
        """Play a piece of all episodes, also of those that have ended."""
        fits = fits_kernel(self.setup)
        every = jnp.broadcast_to(jnp.arange(self.num_episodes), ongoing.alive.shape)
        return self.play(piece, self.agents, self.keys, every, ongoing, kernel=fits)

    def play_running(self, piece: Array, ongoing: Ongoing) -> tuple[Ongoing, "_Played"]:
        """Play a piece of the episodes that have not ended, in groups, if that is less work than to play all."""
        number, with_loops = ongoing.alive.size, self.setup.env.has_loops
        size = GROUP_WITH_LOOPS if with_loops else GROUP
        if number <= size:
            return self.play_all(piece, ongoing)
        rows = _Rows.of(ongoing.alive)
        in_groups = partial(self.play_groups, size // ROW, rows)
        if with_loops:
            return in_groups(piece, ongoing)
        return lax.cond(2 * ROW * rows.ends[-1] <= number, in_groups, self.play_all, piece, ongoing)

    def play_groups(self, num_rows: int, rows: "_Rows", piece: Array, ongoing: Ongoing) -> tuple[Ongoing, "_Played"]:
        """Play a piece of the running episodes, `num_rows` rows at a time."""
        num_lanes = num_rows * ROW
        packing = _Packing.of(ongoing.state if self.setup.env.has_loops else ())
        packed = packing.pack(ongoing.state)

        @jax.jit  # so that it is traced once: its shapes are asked for below
        def play_group(first: Array) -> tuple[Ongoing, "_Played"]:
            agent, episode, present = rows.at(first + jnp.arange(num_rows))
            lane = agent[:, None] * self.num_episodes + episode

            def gathered(leaf: Array) -> Array:
                return leaf.reshape(-1, *leaf.shape[2:])[lane]

            def chosen(leaf: Array) -> Array:
                # A lane without an episode holds ones: in a state that says whether its episode has ended, it has.
                return where_agents(present, leaf, jnp.ones_like(leaf))

            state = jax.tree.map(lambda leaf: chosen(gathered(leaf)), packed)
            there = Ongoing(packing.unpack(state), present, gathered(ongoing.lengths))
            agents = jax.tree.map(lambda leaf: leaf[agent], self.agents)
            after, played = self.play(piece, agents, self.keys[agent], episode, there)
            results = replace(after, state=packing.pack(after.state)), played
            return jax.tree.map(lambda leaf: leaf.reshape(num_lanes, *leaf.shape[2:]), results)

        def turn(carry: tuple[Array, Any]) -> tuple[Array, Any]:
            first, written = carry
            write = partial(lax.dynamic_update_slice_in_dim, start_index=first * ROW, axis=0)
            return first + num_rows, jax.tree.map(write, written, play_group(first))

        most = -(-rows.most // num_rows) * num_lanes
        shapes = jax.eval_shape(play_group, rows.ends[-1])
        blank = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape[1:]), leaf.dtype), shapes)
        start = jnp.zeros_like(rows.ends[-1]), blank
        _, written = lax.while_loop(lambda carry: carry[0] < rows.ends[-1], turn, start)
        after, played = jax.tree.map(lambda leaf: leaf[rows.places], written)
        after = jax.tree.map(partial(where_agents, ongoing.alive), after, replace(ongoing, state=packed))
        after = replace(after, state=packing.unpack(after.state))
        stays = jnp.stack(self.setup.env.observe(ongoing.state), axis=-1)[:, :, None]
        observations = jnp.where(ongoing.alive[..., None, None], played.observations, stays)
        return after, replace(played, observations=observations)

    def play(
        self, piece: Array, agents: Agents, keys: Array, episodes: Array, ongoing: Ongoing, *, kernel: bool = False
    ) -> tuple[Ongoing, "_Played"]:
        """Play a piece of the episodes with the given numbers [agent, episode]; keys are [agent, purpose]."""
        inputs = self.inputs(piece, keys, episodes)
        in_loop, in_kernel = (partial(way, self.setup) for way in (play_in_loop, play_in_kernel))
        ongoing, steps = by_platform(agents, ongoing, inputs, cuda=in_kernel if kernel else in_loop, default=in_loop)
        log_probabilities = jax.vmap(self.setup.policy.log_probability)(agents.weights, steps.outputs, steps.actions)
        return ongoing, _Played(steps.observations, steps.actions, steps.rewards, log_probabilities)

    def times(self, piece: Array) -> Array:
        """The time steps of a piece."""
        return piece * self.clock.piece + jnp.arange(self.clock.piece)

    def inputs(self, piece: Array, keys: Array, episodes: Array) -> StepInputs:
        """The time steps of a piece, and the random numbers of the episodes with the given numbers."""
        env, policy = self.setup.env, self.setup.policy
        uniform_actions = None
        if self.setup.action_attacks:
            draws = self.draws(keys[:, ATTACK_ACTIONS], piece, episodes, env.action_space.size)
            uniform_actions = env.action_space.uniform(draws)
        draws = self.draws(keys[:, NOISE], piece, episodes, policy.noise_size + env.noise_size)
        for_policy, for_env = jnp.split(draws, [policy.noise_size], axis=-1)
        noise = jnp.concatenate([policy.deviates(for_policy), for_env], axis=-1)
        return StepInputs(self.times(piece), noise, uniform_actions)

    def draws(self, keys: Array, piece: Array, episodes: Array, size: int) -> Array:
        """Uniform draws [time, agent, episode, size] of one piece: those of an agent's episodes with given numbers.

        All draws of an agent would be `uniform(fold_in(key, piece), (time, num_episodes, size))`. Draw number i of such
        an array takes its bits from `fold_in(key, i)`, so that any draws can be computed alone.
        """

        def of_agent(key: Array, episodes: Array) -> Array:
            times = jnp.arange(self.clock.piece)[:, None, None]
            places = (times * self.num_episodes + episodes[:, None]) * size + jnp.arange(size)
            return _uniform(_bits(jax.random.key_data(jax.random.fold_in(key, piece)), places))

        return jax.vmap(of_agent, out_axes=1)(keys, episodes)

    def recorded_rewards(self, piece: Array, played: "_Played") -> Array:
        """What the agents record of the environment's rewards [agent, episode, time] of one piece."""
        rewards = played.rewards
        for attack, mask in self.attackers:
            keys = jax.vmap(jax.random.fold_in, (0, None))(self.keys[:, ATTACK_REWARDS], piece)
            rewards = where_agents(mask, jax.vmap(attack.record_step)(rewards, played.actions, keys), rewards)
        return rewards


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Played:
    """A piece of all episodes: [agent, episode, time, ...]."""

    observations: Array
    actions: Array
    rewards: Array
    log_probabilities: Array


class _Rows(NamedTuple):
    """The running episodes of all agents in rows of `ROW`: each agent's episodes fill its rows one after the other."""

    order: Array  # [agent, episode]: the numbers of the running episodes, then those of the others
    counts: Array  # [agent], running episodes
    ends: Array  # [agent], the number of rows of all agents up to this one
    places: Array  # [agent, episode], where each running episode stands when all rows are one after the other
    most: int  # rows, if all episodes are running

    @classmethod
    def of(cls, alive: Array) -> "_Rows":
        num_agents, num_episodes = alive.shape
        counts = jnp.sum(alive, axis=1)
        number = -(-counts // ROW)
        ends = jnp.cumsum(number)
        places = (ends - number)[:, None] * ROW + jnp.cumsum(alive, axis=1) - 1
        most = num_agents * -(-num_episodes // ROW)
        return cls(jnp.argsort(~alive, axis=1), counts, ends, places, most)

    def at(self, row: Array) -> tuple[Array, Array, Array]:
        """For rows of the given numbers [row]: their agents [row], and [row, ROW] their episodes, if there are any."""
        agent = jnp.minimum(jnp.searchsorted(self.ends, row, side="right"), len(self.ends) - 1)
        before = jnp.where(agent > 0, self.ends[agent - 1], 0)
        place = (row - before)[:, None] * ROW + jnp.arange(ROW)
        present = (place < self.counts[agent][:, None]) & (row < self.ends[-1])[:, None]
        return agent, self.order[agent[:, None], jnp.minimum(place, self.order.shape[1] - 1)], present


class _Packing(NamedTuple):
    """Which leaves of a state are numbers that become one array, so that choosing episodes is one operation for all.

    A lander has 82 of them: with operations on each, a rollout takes longer to compile.
    """

    numbers: tuple[bool, ...]  # of each leaf; none of a state of another structure
    structure: Any

    @classmethod
    def of(cls, state: Any) -> "_Packing":
        leaves, structure = jax.tree.flatten(state)
        return cls(tuple(leaf.ndim == 2 and leaf.dtype == jnp.float32 for leaf in leaves), structure)

    def pack(self, state: Any) -> Any:
        if not any(self.numbers):
            return state
        leaves = jax.tree.leaves(state)
        numbers = [leaf for leaf, is_number in zip(leaves, self.numbers, strict=True) if is_number]
        others = [leaf for leaf, is_number in zip(leaves, self.numbers, strict=True) if not is_number]
        return jnp.stack(numbers, axis=-1), others

    def unpack(self, packed: Any) -> Any:
        if not any(self.numbers):
            return packed
        # Otherwise, XLA would compute what leads to the array again for each of its numbers.
        numbers, others = iter(computed_once(jnp.moveaxis(packed[0], -1, 0))), iter(packed[1])
        leaves = [next(numbers) if is_number else next(others) for is_number in self.numbers]
        return jax.tree.unflatten(self.structure, leaves)


def _bits(key: Array, place: Array) -> Array:
    """The two halves of `key_data(fold_in(key, place))`, combined by XOR; `key` is a key's data.

    This is Threefry-2x32 (Salmon et al. 2011). On CPUs, JAX's own is a loop of small kernels and takes three times as
    long.
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    left, right = jnp.broadcast_to(key[0], place.shape), place.astype(jnp.uint32) + key[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            left = left + right
            right = ((right << rotation) | (right >> (32 - rotation))) ^ left
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return left ^ right


def _uniform(bits: Array) -> Array:
    """Numbers in [0, 1) from 32-bit integers, as `jax.random.uniform` computes them."""
    return lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1


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
