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
from byzpg.envs.kernels import BLOCK, Apart
from byzpg.envs.loops import any_true
from byzpg.envs.spaces import Discrete
from byzpg.learning.policies import ACTIVATIONS, MLP, Numbers, Policy, Weights
from byzpg.robust.attacks import Attack
from byzpg.robust.kernels import rows_needed

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


def where_agents(mask: Array, changed: Array, unchanged: Array) -> Array:
    """`jnp.where` with a mask over the leading axes."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (unchanged.ndim - mask.ndim)), changed, unchanged)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ongoing:
    """Where episodes stand. All arrays have the shape of the batch; those of a state may have further axes."""

    state: Any
    alive: Array
    lengths: Array

    def stepped(
        self, setup: Setup, action: Numbers, noise: Numbers, time: Array, *, in_kernel: bool = False
    ) -> tuple["Ongoing", Array]:
        """The episodes after one more step, and the step's rewards."""
        step = _step_of_kernel(setup.env) if in_kernel else setup.env.step
        # The state of an episode that has ended does not change: stepping it further could overflow.
        following, rewards, terminated = step(self.state, action, noise)
        choose = jnp.where if in_kernel else where_agents
        state = jax.tree.map(lambda new, old: choose(self.alive, new, old), following, self.state)
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

    It cannot hold wide layers, networks of the user's own, nor environments with loops that were not written for
    kernels.
    """
    is_small = isinstance(setup.policy, MLP) and max(setup.policy.hidden, default=0) <= LARGEST_HIDDEN
    return is_small and _step_of_kernel(setup.env) is not None


def _step_of_kernel(env: Environment) -> Any:
    """How an environment takes a step inside a kernel; None if it cannot."""
    return getattr(env, "step_in_kernel", None) if env.has_loops else env.step


class _PerEpisode(NamedTuple):
    """What the kernel reads for each episode: arrays [agent, ..., episode]."""

    state: list[Any]  # the leaves of the environment's state, [agent, 1, episode]
    alive: Any  # [agent, 1, episode]
    lengths: Any  # [agent, 1, episode]
    noise: Any  # [agent, size, time, episode]
    uniform_actions: list[Any]  # one array [agent, time, episode] per number of an action


class _PerAgent(NamedTuple):
    """What the kernel reads for each agent: arrays [agent, 1, ...].

    Numbers are vectors with equal entries, one for each episode of a block: see `Apart`.
    """

    action_attackers: list[Any]
    hidden: list[tuple[Any, Any]]  # matrix and bias of each layer, of padded size
    last: list[list[Any]]  # of the last layer, a number or, after a hidden layer, a vector by output and input
    last_bias: list[Any]
    log_std: list[Any]


class _Results(NamedTuple):
    """What the kernel writes: arrays [agent, ..., episode]."""

    state: list[Any]  # [agent, 1, episode]
    alive: Any  # [agent, 1, episode]
    lengths: Any  # [agent, 1, episode]
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
        return min(rows_needed(self.num_episodes), BLOCK)  # up to one warp

    @property
    def number(self) -> int:
        return -(-self.num_episodes // self.size)

    @property
    def padded(self) -> int:
        return self.number * self.size

    def pad(self, array: Array, fill: int = 0) -> Array:
        """Fill the last axis up to whole blocks."""
        widths = [(0, 0)] * (array.ndim - 1) + [(0, self.padded - self.num_episodes)]
        return jnp.pad(array, widths, constant_values=fill)

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
    agent = _per_agent(setup, blocks, agents)
    state_structure = jax.tree.structure(ongoing.state)

    def kernel(scalars: Any, episodes: _PerEpisode, agent: _PerAgent, results: _Results) -> None:
        apart = Apart(
            (scalars[1], scalars[2]) if setup.env.has_loops else None,
            wait=(lambda: None) if interpret else triton.debug_barrier,
        )
        first_time, refs = scalars[0], (episodes.state, episodes.alive, episodes.lengths)
        state, alive, lengths = apart.read(lambda i: jax.tree.map(lambda ref: ref[i, :], refs))
        start = Ongoing(jax.tree.unflatten(state_structure, state), alive != 0, lengths)

        def step(index: Array, ongoing: Ongoing) -> Ongoing:
            return _step_in_kernel(
                setup,
                index,
                ongoing,
                apart=apart,
                first_time=first_time,
                episodes=episodes,
                agent=agent,
                results=results,
            )

        end = apart.repeat(len(inputs.times), step, start, lambda ongoing: any_true(ongoing.alive))
        found = jax.tree.leaves(end.state), end.alive.astype(jnp.int32), end.lengths
        refs = results.state, results.alive, results.lengths

        def write(i: Array, values: Any) -> None:
            for ref, value in zip(jax.tree.leaves(refs), jax.tree.leaves(values), strict=True):
                ref[i, :] = value

        apart.write(write, found)

    def one_block(array: Any) -> pl.BlockSpec:
        middle = array.ndim - 2
        return pl.BlockSpec((None, *array.shape[1:-1], blocks.size), lambda agent, block: (agent, *[0] * middle, block))

    def one_agent(array: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *array.shape[1:]), lambda agent, block: (agent, *[0] * (array.ndim - 1)))

    (found,) = pl.pallas_call(
        kernel,
        grid=(blocks.num_agents, blocks.number),
        in_specs=(
            pl.BlockSpec((3,), lambda agent, block: (0,)),
            jax.tree.map(one_block, episodes),
            jax.tree.map(one_agent, agent),
        ),
        out_specs=(jax.tree.map(one_block, results),),
        out_shape=(results,),
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(jnp.stack([inputs.times[0], 1, 1]), episodes, agent)
    return _unpacked(setup, blocks, state_structure, inputs.times, found)


def _read(setup: Setup, blocks: _Blocks, ongoing: Ongoing, inputs: StepInputs) -> _PerEpisode:
    """The kernel's inputs, with the episodes as their last axis."""
    uniform_actions: Numbers = ()
    if inputs.uniform_actions is not None:
        uniform_actions = setup.env.action_space.numbers(inputs.uniform_actions)
    return _PerEpisode(
        # A place without an episode holds ones: in a state that says whether its episode has ended, it has.
        state=[blocks.pad(leaf, 1)[:, None] for leaf in jax.tree.leaves(ongoing.state)],
        alive=blocks.pad(ongoing.alive.astype(jnp.int32))[:, None],
        lengths=blocks.pad(ongoing.lengths)[:, None],
        noise=blocks.pad(jnp.moveaxis(inputs.noise, (1, 3), (0, 1))),
        uniform_actions=[blocks.pad(jnp.swapaxes(each, 0, 1)) for each in uniform_actions],
    )


def _written(setup: Setup, blocks: _Blocks, ongoing: Ongoing, num_steps: int) -> _Results:
    """The shapes and types of the kernel's results."""
    space = setup.env.action_space
    return _Results(
        state=[blocks.shape(1, dtype=leaf.dtype) for leaf in jax.tree.leaves(ongoing.state)],
        alive=blocks.shape(1, dtype=jnp.int32),
        lengths=blocks.shape(1, dtype=ongoing.lengths.dtype),
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
    apart: Apart,
    first_time: Array,
    episodes: _PerEpisode,
    agent: _PerAgent,
    results: _Results,
) -> Ongoing:
    """Step number `index` of one block of episodes. What the kernel reads and writes is passed as references."""
    env, policy = setup.env, setup.policy

    def read(i: Array) -> Any:
        noise = tuple(episodes.noise[j, index + i, :] for j in range(episodes.noise.shape[0]))
        uniform_actions = tuple(each[index + i, :] for each in episodes.uniform_actions)
        masks, log_std = jax.tree.map(lambda ref: ref[i, :], (agent.action_attackers, agent.log_std))
        return noise, uniform_actions, masks, tuple(log_std)

    noise, uniform_actions, masks, log_std = apart.read(read)
    observed = env.observe(ongoing.state)
    outputs = apart.through_memory(
        lambda i, observed: _outputs(policy, agent, i, observed), observed, index, results.observations, results.outputs
    )
    action = policy.choose_numbers(((log_std,),), outputs, noise[: policy.noise_size])
    for attack, mask in zip(setup.action_attacks, masks, strict=True):
        changed = (attack.act(*pair) for pair in zip(action, uniform_actions, strict=True))
        pairs = zip(changed, action, strict=True)
        action = tuple(jnp.where(mask != 0, new, old) for new, old in pairs)
    ongoing, rewards = ongoing.stepped(setup, action, noise[policy.noise_size :], first_time + index, in_kernel=True)

    def write(i: Array, values: Any) -> None:
        for ref, group in zip((results.observations, results.actions, results.outputs), values[:-1], strict=True):
            for j, value in enumerate(group):
                ref[j, index + i, :] = value
        results.rewards[index + i, :] = values[-1]

    apart.write(write, (observed, action, outputs, rewards))
    return ongoing


def _unpacked(
    setup: Setup, blocks: _Blocks, state_structure: Any, times: Array, results: _Results
) -> tuple[Ongoing, Transitions]:
    """The kernel's results in the order of axes that the rest of the package uses."""
    state, alive, lengths = jax.tree.map(
        lambda leaf: blocks.cut(leaf[:, 0]), (results.state, results.alive, results.lengths)
    )
    # A block stops after its last episode has ended, so that nothing is written for later steps.
    written = times < lengths[:, :, None]

    def by_episode(array: Array) -> Array:
        """[agent, number, time, episode] → [agent, episode, time, number]."""
        return jnp.where(written[..., None], jnp.swapaxes(blocks.cut(array), 1, 3), 0)

    played = Transitions(
        by_episode(results.observations),
        setup.policy.actions(tuple(jnp.moveaxis(by_episode(results.actions), 3, 0))),
        by_episode(results.outputs),
        jnp.where(written, jnp.swapaxes(blocks.cut(results.rewards), 1, 2), 0),
    )
    return Ongoing(jax.tree.unflatten(state_structure, state), alive != 0, lengths), played


def _per_agent(setup: Setup, blocks: _Blocks, agents: Agents) -> _PerAgent:
    """What the kernel reads for each agent. Hidden layers are padded to powers of 2.

    The padding changes no output: hidden units whose weights are 0 stay 0 under every activation in `ACTIVATIONS`.
    """

    def number(values: Array) -> Array:
        return jnp.broadcast_to(values.astype(jnp.float32)[:, None, None], (blocks.num_agents, 1, blocks.size))

    assert isinstance(setup.policy, MLP)
    num_hidden = len(setup.policy.hidden)
    *layers, (last, last_bias) = agents.weights[: num_hidden + 1]
    hidden, extra = [], 0
    for matrix, bias in layers:
        size = matrix.shape[-1]
        more = rows_needed(size) - size
        padded = jnp.pad(matrix, ((0, 0), (0, extra), (0, more))), jnp.pad(bias, ((0, 0), (0, more)))
        hidden.append(tuple(each[:, None] for each in padded))
        extra = more
    columns = jnp.moveaxis(jnp.pad(last, ((0, 0), (0, extra), (0, 0))), 2, 0)
    return _PerAgent(
        action_attackers=[number(mask) for mask in agents.action_attackers],
        hidden=hidden,
        last=[[column[:, None]] if num_hidden else [number(entry) for entry in column.T] for column in columns],
        last_bias=[number(bias) for bias in last_bias.T],
        log_std=[number(each) for layer in agents.weights[num_hidden + 1 :] for each in layer[0].T],
    )


def _outputs(policy: Policy, agent: _PerAgent, i: Array, observed: Numbers) -> Numbers:
    """The network's outputs, one array [episode] per number; `agent` holds references, read at place i = 0."""
    assert isinstance(policy, MLP)
    biases = [bias[i, :] for bias in agent.last_bias]
    if not agent.hidden:
        outputs = tuple(
            reduce(jnp.add, (x * factor[i, :] for x, factor in zip(observed, row, strict=True)), bias)
            for row, bias in zip(agent.last, biases, strict=True)
        )
    else:
        activation = ACTIVATIONS[policy.activation]
        (first, bias), *others = agent.hidden
        values = bias[i, :][None, :]
        for k, x in enumerate(observed):
            values += x[:, None] * first[i, k, :][None, :]
        values = activation(values)
        for matrix, bias in others:
            product = jnp.dot(values, matrix[i, :, :], precision=lax.Precision.HIGHEST)
            values = activation(product + bias[i, :][None, :])
        outputs = tuple(
            jnp.sum(values * row[i, :][None, :], axis=1) + bias for (row,), bias in zip(agent.last, biases, strict=True)
        )
    return tuple(jnp.tanh(output) for output in outputs) if policy.output_tanh else outputs
