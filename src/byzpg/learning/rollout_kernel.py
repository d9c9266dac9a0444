"""One step of a rollout as data, and many steps as one GPU kernel.

In the kernel, a block of one agent's episodes stays in registers for many steps. As a plain program, every step would
launch a dozen kernels, and a launch takes microseconds however little work it does.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.envs import Environment
from byzpg.envs.spaces import Discrete
from byzpg.learning.policies import ACTIVATIONS, Numbers, Policy, Weights
from byzpg.robust.attacks import Attack

# Episodes per block: a matrix product in a kernel needs at least 16 rows.
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 32
LARGEST_HIDDEN = 64  # the matrix of a wider layer takes too many registers


@dataclass(frozen=True)
class Setup:
    """What a rollout's agents have in common."""

    env: Environment
    policy: Policy
    horizon: int
    action_attacks: tuple[Attack, ...] = ()


class Agents(NamedTuple):
    """What a rollout's agents do not have in common."""

    weights: Weights  # leaves [agent, ...]
    action_attackers: list[Array]  # for each of `Setup.action_attacks` the agents that commit it [agent]


class StepInputs(NamedTuple):
    """The time steps to play, and their random numbers."""

    times: Array  # [time], consecutive
    noise: Array  # [time, agent, episode, size]: the policy's deviates, then the environment's draws
    uniform_actions: Array | None  # [time, agent, episode, ...]; None if no attack changes actions


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ongoing:
    """Where episodes stand. All arrays have the shape of the batch."""

    state: Any
    alive: Array
    lengths: Array

    def stepped(self, setup: Setup, action: Numbers, noise: Numbers, time: Array) -> tuple["Ongoing", Array]:
        """The episodes after one more step, and the step's rewards."""
        # The state of an episode that has ended does not change: stepping it further could overflow.
        following, rewards, terminated = setup.env.step(self.state, action, noise)
        state = jax.tree.map(lambda new, old: jnp.where(self.alive, new, old), following, self.state)
        alive = self.alive & ~terminated & (time + 1 < setup.horizon)
        return Ongoing(state, alive, self.lengths + self.alive.astype(self.lengths.dtype)), rewards


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transitions:
    """Some steps of all episodes: [agent, episode, time, ...]."""

    observations: Array
    actions: Array
    outputs: Array  # of the policy's network
    rewards: Array


def fits_kernel(setup: Setup) -> bool:
    """Whether `play_in_kernel` can be used.

    It cannot hold wide layers, nor environments with loops of their own. Such environments use smaller kernels.
    """
    return not setup.env.has_loops and max(setup.policy.hidden, default=0) <= LARGEST_HIDDEN


class _PerEpisode(NamedTuple):
    """What the kernel reads for each episode: arrays [agent, ..., episode]."""

    state: list[Any]  # the leaves of the environment's state
    alive: Any
    lengths: Any
    noise: Any  # [agent, size, time, episode]
    uniform_actions: list[Any]  # one array [agent, time, episode] per number of an action


class _PerAgent(NamedTuple):
    """What the kernel reads for each agent: arrays [agent, ...]."""

    action_attackers: list[Any]
    layers: list[tuple[Any, Any]]
    log_std: Any


class _Results(NamedTuple):
    """What the kernel writes: arrays [agent, ..., episode]."""

    state: list[Any]
    alive: Any
    lengths: Any
    observations: Any  # [agent, feature, time, episode]
    actions: Any  # [agent, number, time, episode]
    outputs: Any  # [agent, output, time, episode]
    rewards: Any  # [agent, time, episode]


@dataclass(frozen=True)
class _Blocks:
    """How the kernel divides the episodes of each agent, the last axis of its arrays, into blocks."""

    num_agents: int
    num_episodes: int

    @property
    def size(self) -> int:
        return min(max(_next_power_of_2(self.num_episodes), SMALLEST_BLOCK), LARGEST_BLOCK)

    @property
    def number(self) -> int:
        return -(-self.num_episodes // self.size)

    @property
    def padded(self) -> int:
        return self.number * self.size

    def pad(self, array: Array) -> Array:
        """Fill the last axis up to whole blocks."""
        return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, self.padded - self.num_episodes)])

    def cut(self, array: Array) -> Array:
        """Undo `pad`."""
        return array[..., : self.num_episodes]

    def shape(self, *middle: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.num_agents, *middle, self.padded), dtype)


def play_in_kernel(
    setup: Setup, agents: Agents, ongoing: Ongoing, inputs: StepInputs, *, interpret: bool = False
) -> tuple[Ongoing, Transitions]:
    """Play the steps of `inputs` in one GPU kernel; `interpret` runs the kernel on any device, slowly."""
    from jax.experimental import pallas as pl  # slow to import, and only GPUs need it
    from jax.experimental.pallas import triton

    blocks = _Blocks(*ongoing.alive.shape)
    episodes, results = _read(setup, blocks, ongoing, inputs), _written(setup, blocks, ongoing, len(inputs.times))
    layers, log_std = _padded_layers(setup.policy, agents.weights)
    masks = [mask.astype(jnp.int32)[:, None] for mask in agents.action_attackers]
    state_structure = jax.tree.structure(ongoing.state)

    def kernel(first_time: Any, episodes: _PerEpisode, agent: _PerAgent, results: _Results) -> None:
        state = jax.tree.unflatten(state_structure, [leaf[...] for leaf in episodes.state])
        start = Ongoing(state, episodes.alive[...] != 0, episodes.lengths[...])

        def step(index: Array, ongoing: Ongoing) -> Ongoing:
            return _step_in_kernel(
                setup,
                index,
                ongoing,
                first_time=first_time,
                episodes=episodes,
                agent=agent,
                results=results,
            )

        end = lax.fori_loop(0, len(inputs.times), step, start)
        for ref, leaf in zip(results.state, jax.tree.leaves(end.state), strict=True):
            ref[...] = leaf
        results.alive[...] = end.alive.astype(jnp.int32)
        results.lengths[...] = end.lengths

    def one_block(array: Any) -> pl.BlockSpec:
        middle = array.ndim - 2
        return pl.BlockSpec((None, *array.shape[1:-1], blocks.size), lambda agent, block: (agent, *[0] * middle, block))

    def one_agent(array: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *array.shape[1:]), lambda agent, block: (agent, *[0] * (array.ndim - 1)))

    agent = _PerAgent(masks, layers, log_std)
    (found,) = pl.pallas_call(
        kernel,
        grid=(blocks.num_agents, blocks.number),
        in_specs=(
            pl.BlockSpec((1,), lambda agent, block: (0,)),
            jax.tree.map(one_block, episodes),
            jax.tree.map(one_agent, agent),
        ),
        out_specs=(jax.tree.map(one_block, results),),
        out_shape=(results,),
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(inputs.times[:1], episodes, agent)
    return _unpacked(setup, blocks, state_structure, found)


def _read(setup: Setup, blocks: _Blocks, ongoing: Ongoing, inputs: StepInputs) -> _PerEpisode:
    """The kernel's inputs, with the episodes as their last axis."""
    uniform_actions: Numbers = ()
    if inputs.uniform_actions is not None:
        uniform_actions = setup.env.action_space.numbers(inputs.uniform_actions)
    return _PerEpisode(
        state=[blocks.pad(leaf) for leaf in jax.tree.leaves(ongoing.state)],
        alive=blocks.pad(ongoing.alive.astype(jnp.int32)),
        lengths=blocks.pad(ongoing.lengths),
        noise=blocks.pad(jnp.moveaxis(inputs.noise, (1, 3), (0, 1))),
        uniform_actions=[blocks.pad(jnp.swapaxes(each, 0, 1)) for each in uniform_actions],
    )


def _written(setup: Setup, blocks: _Blocks, ongoing: Ongoing, num_steps: int) -> _Results:
    """The shapes and types of the kernel's results."""
    space = setup.env.action_space
    return _Results(
        state=[blocks.shape(dtype=leaf.dtype) for leaf in jax.tree.leaves(ongoing.state)],
        alive=blocks.shape(dtype=jnp.int32),
        lengths=blocks.shape(dtype=ongoing.lengths.dtype),
        observations=blocks.shape(setup.env.observation_size, num_steps),
        actions=blocks.shape(space.size, num_steps, dtype=jnp.int32 if isinstance(space, Discrete) else jnp.float32),
        outputs=blocks.shape(setup.policy.num_outputs, num_steps),
        rewards=blocks.shape(num_steps),
    )


def _step_in_kernel(
    setup: Setup,
    index: Array,
    ongoing: Ongoing,
    *,
    first_time: Any,
    episodes: _PerEpisode,
    agent: _PerAgent,
    results: _Results,
) -> Ongoing:
    """Step number `index` of one block of episodes. What the kernel reads and writes is passed as references."""
    env, policy = setup.env, setup.policy
    observed = env.observe(ongoing.state)
    outputs = _outputs(policy, agent.layers, observed)
    noise = tuple(episodes.noise[i, index, :] for i in range(episodes.noise.shape[0]))
    log_std = tuple(agent.log_std[i] for i in range(agent.log_std.shape[0]))
    action = policy.choose_numbers(((log_std,),), outputs, noise[: policy.noise_size])
    for attack, mask in zip(setup.action_attacks, agent.action_attackers, strict=True):
        uniform = (each[index, :] for each in episodes.uniform_actions)
        changed = (attack.act(*pair) for pair in zip(action, uniform, strict=True))
        pairs = zip(changed, action, strict=True)
        action = tuple(jnp.where(mask[0] != 0, new, old) for new, old in pairs)
    ongoing, rewards = ongoing.stepped(setup, action, noise[policy.noise_size :], first_time[0] + index)
    for ref, values in ((results.observations, observed), (results.actions, action), (results.outputs, outputs)):
        for i, value in enumerate(values):
            ref[i, index, :] = value
    results.rewards[index, :] = rewards
    return ongoing


def _unpacked(setup: Setup, blocks: _Blocks, state_structure: Any, results: _Results) -> tuple[Ongoing, Transitions]:
    """The kernel's results in the order of axes that the rest of the package uses."""

    def by_episode(array: Array) -> Array:
        """[agent, number, time, episode] → [agent, episode, time, number]."""
        return jnp.swapaxes(blocks.cut(array), 1, 3)

    played = Transitions(
        by_episode(results.observations),
        setup.policy.actions(tuple(jnp.moveaxis(by_episode(results.actions), 3, 0))),
        by_episode(results.outputs),
        jnp.swapaxes(blocks.cut(results.rewards), 1, 2),
    )
    state = jax.tree.unflatten(state_structure, [blocks.cut(leaf) for leaf in results.state])
    return Ongoing(state, blocks.cut(results.alive) != 0, blocks.cut(results.lengths)), played


def _padded_layers(policy: Policy, weights: Weights) -> tuple[list[tuple[Array, Array]], Array]:
    """The layers with hidden sizes padded to powers of 2, and the log standard deviations.

    The padding changes no output: hidden units whose weights are 0 stay 0 under every activation in `ACTIVATIONS`. The
    last layer's matrix is transposed to [out, in].
    """
    *hidden, (last, last_bias) = weights[: len(policy.hidden) + 1]
    layers, extra = [], 0
    for matrix, bias in hidden:
        size = matrix.shape[-1]
        more = max(_next_power_of_2(size), SMALLEST_BLOCK) - size
        layers.append((jnp.pad(matrix, ((0, 0), (0, extra), (0, more))), jnp.pad(bias, ((0, 0), (0, more)))))
        extra = more
    layers.append((jnp.pad(jnp.swapaxes(last, 1, 2), ((0, 0), (0, 0), (0, extra))), last_bias))
    log_std = weights[-1][0] if len(weights) > len(policy.hidden) + 1 else jnp.zeros((len(last), 1))
    return layers, log_std


def _outputs(policy: Policy, layers: list[tuple[Any, Any]], observed: Numbers) -> Numbers:
    """The network's outputs, one array [episode] per number; `layers` are references to padded weights."""
    *hidden, (last, last_bias) = layers
    if not hidden:
        outputs = tuple(
            reduce(jnp.add, (x * last[j, i] for i, x in enumerate(observed)), last_bias[j])
            for j in range(policy.num_outputs)
        )
    else:
        activation = ACTIVATIONS[policy.activation]
        first, bias = hidden[0]
        values = bias[...][None, :]
        for i, x in enumerate(observed):
            values += x[:, None] * first[i, :][None, :]
        values = activation(values)
        for matrix, bias in hidden[1:]:
            product = jnp.dot(values, matrix[...], precision=lax.Precision.HIGHEST)
            values = activation(product + bias[...][None, :])
        outputs = tuple(jnp.sum(values * last[j, :][None, :], axis=1) + last_bias[j] for j in range(policy.num_outputs))
    return tuple(jnp.tanh(output) for output in outputs) if policy.output_tanh else outputs


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
