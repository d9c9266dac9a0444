"""Episodes on a GPU: a block of one agent's episodes stays in registers for many steps of one launch.

As a plain program, every step of a rollout is a dozen launches of microseconds each, whatever their work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from byzpg.envs import Environment
from byzpg.envs.spaces import Discrete
from byzpg.learning.policies import ACTIVATIONS, Numbers, Policy, Weights
from byzpg.robust.attacks import Attack

# Episodes per block: a product of matrices wants at least 16 rows.
LEAST_BLOCK, LARGEST_BLOCK = 16, 32
LARGEST_HIDDEN = 64  # beyond, a layer's matrix takes too many registers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Playing:
    """Episodes under way; all arrays have the shape of the batch."""

    state: Any
    alive: Array
    lengths: Array

    def moved(
        self, env: Environment, action: Numbers, noise: Numbers, time: Array, horizon: int
    ) -> tuple["Playing", Array]:
        """One step further, and its reward."""
        # An episode that has ended stays where it ended: stepping on could overflow.
        following, reward, terminated = env.step(self.state, action, noise)
        state = jax.tree.map(lambda new, old: jnp.where(self.alive, new, old), following, self.state)
        alive = self.alive & ~terminated & (time + 1 < horizon)
        return Playing(state, alive, self.lengths + self.alive.astype(self.lengths.dtype)), reward


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Played:
    """What happened in some steps: [agent, episode, time, ...]."""

    seen: Array
    action: Array
    outputs: Array
    reward: Array


def fits_kernel(env: Environment, policy: Policy) -> bool:
    """Whether the kernel is of use: steps with loops, such as LunarLander's, are too large and have their own."""
    return not env.has_loops and max(policy.hidden, default=0) <= LARGEST_HIDDEN


def play_in_kernel(
    env: Environment,
    policy: Policy,
    weights: Weights,
    playing: Playing,
    times: Array,
    noise: Array,
    mischief: Array | None,
    horizon: int,
    attackers: Sequence[tuple[Attack, Array]] = (),
    interpret: bool = False,
) -> tuple[Playing, Played]:
    """Play the steps at `times` with weights [agent, ...].

    `noise` [time, agent, episode, size]: the policy's deviates, then the environment's draws. `mischief` [time, agent,
    episode, ...]: uniform actions, for the attacks in `attackers`, whose masks [agent] tell who acts by them.
    """
    from jax.experimental import pallas as pl  # slow to import, and only GPUs need it
    from jax.experimental.pallas import triton

    num_agents, num_episodes = playing.alive.shape
    num_steps = len(times)
    block = min(max(_next_power_of_2(num_episodes), LEAST_BLOCK), LARGEST_BLOCK)
    num_blocks = pl.cdiv(num_episodes, block)
    missing = num_blocks * block - num_episodes

    def widened(array: Array) -> Array:
        """Episodes, the last axis, filled up to whole blocks."""
        return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])

    leaves, structure = jax.tree.flatten(playing.state)
    layers, log_std = _padded(policy, weights)
    inputs = (
        times[:1],
        [widened(leaf) for leaf in leaves],
        widened(playing.alive.astype(jnp.int32)),
        widened(playing.lengths),
        widened(jnp.moveaxis(noise, (1, 3), (0, 1))),  # [agent, size, time, episode]
        [] if mischief is None else [widened(jnp.swapaxes(x, 0, 1)) for x in env.action_space.numbers(mischief)],
        [who.astype(jnp.int32)[:, None] for _, who in attackers],
        layers,
        log_std,
    )
    action_type = jnp.int32 if isinstance(env.action_space, Discrete) else jnp.float32

    def of_episodes(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_agents, *shape, num_blocks * block), dtype)

    outputs = (
        [of_episodes(dtype=leaf.dtype) for leaf in leaves],
        of_episodes(dtype=jnp.int32),
        of_episodes(dtype=playing.lengths.dtype),
        of_episodes(env.observation_size, num_steps),
        of_episodes(env.action_space.size, num_steps, dtype=action_type),
        of_episodes(policy.num_outputs, num_steps),
        of_episodes(num_steps),
    )

    def by_block(array: Any) -> pl.BlockSpec:
        middle = array.ndim - 2
        return pl.BlockSpec((None, *array.shape[1:-1], block), lambda agent, part: (agent, *[0] * middle, part))

    def by_agent(array: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *array.shape[1:]), lambda agent, part: (agent, *[0] * (array.ndim - 1)))

    whole = pl.BlockSpec((1,), lambda agent, part: (0,))
    in_specs = (whole, *jax.tree.map(by_block, inputs[1:6]), *jax.tree.map(by_agent, inputs[6:]))

    def kernel(*refs: Any) -> None:
        first, state, alive, lengths, noise, mischief, masks, layers, log_std, *results = refs
        state_after, alive_after, lengths_after, seen, action, scores, reward = results
        begun = Playing(jax.tree.unflatten(structure, [leaf[...] for leaf in state]), alive[...] != 0, lengths[...])

        def step(index: Array, playing: Playing) -> Playing:
            observed = env.observe(playing.state)
            outputs = _outputs(policy, layers, observed)
            units = tuple(noise[i, index, :] for i in range(noise.shape[0]))
            spread = tuple(log_std[i] for i in range(log_std.shape[0]))
            chosen = policy.choose_numbers(((spread,),), outputs, units[: policy.noise_size])
            for (attack, _), who in zip(attackers, masks, strict=True):
                uniform = (each[index, :] for each in mischief)
                changed = (attack.act(*pair) for pair in zip(chosen, uniform, strict=True))
                pairs = zip(changed, chosen, strict=True)
                chosen = tuple(jnp.where(who[0] != 0, new, old) for new, old in pairs)
            playing, paid = playing.moved(env, chosen, units[policy.noise_size :], first[0] + index, horizon)
            for ref, values in ((seen, observed), (action, chosen), (scores, outputs)):
                for i, value in enumerate(values):
                    ref[i, index, :] = value
            reward[index, :] = paid
            return playing

        ended = lax.fori_loop(0, num_steps, step, begun)
        for ref, leaf in zip(state_after, jax.tree.leaves(ended.state), strict=True):
            ref[...] = leaf
        alive_after[...] = ended.alive.astype(jnp.int32)
        lengths_after[...] = ended.lengths

    state, alive, lengths, seen, action, scores, reward = pl.pallas_call(
        kernel,
        grid=(num_agents, num_blocks),
        in_specs=in_specs,
        out_specs=tuple(jax.tree.map(by_block, outputs)),
        out_shape=outputs,
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(*inputs)

    def cut(array: Array) -> Array:
        return array[..., :num_episodes]

    def ordered(array: Array) -> Array:
        """[agent, number, time, episode] → [agent, episode, time, number]."""
        return jnp.swapaxes(cut(array), 1, 3)

    played = Played(
        ordered(seen),
        policy.actions(tuple(jnp.moveaxis(ordered(action), 3, 0))),
        ordered(scores),
        jnp.swapaxes(cut(reward), 1, 2),
    )
    return Playing(jax.tree.unflatten(structure, [cut(leaf) for leaf in state]), cut(alive) != 0, cut(lengths)), played


def _padded(policy: Policy, weights: Weights) -> tuple[list[tuple[Array, Array]], Array]:
    """Layers whose hidden sizes are powers of 2, the last one's matrix as [out, in]; and log standard deviations.

    A hidden unit more, with weights 0, is 0 after every activation there is.
    """
    *hidden, (last, last_bias) = weights[: len(policy.hidden) + 1]
    layers, extra = [], 0
    for matrix, bias in hidden:
        size = matrix.shape[-1]
        more = max(_next_power_of_2(size), LEAST_BLOCK) - size
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
