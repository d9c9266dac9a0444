"""Whole episodes of any task: compiled where the task is made of arrays, else in lockstep on the host.

On the host the policies of all agents are one compiled call per time step. Random numbers have the addresses that they
have in `rollouts`, and so the same actions are drawn there and here.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg.envs import Task
from byzpg.envs.host import HostTask
from byzpg.envs.spaces import Discrete, Space
from byzpg.learning.policies import Policy, Weights
from byzpg.learning.rollouts import MISCHIEF, NOISE, RECORD, RESET, Clock, Episodes, PlayAttacks, rollout, where_agents
from byzpg.robust.attacks import Attack


def play(
    task: Task,
    policy: Policy,
    parameters: Array,
    keys: Array,
    *,
    num_episodes: int,
    horizon: int,
    attackers: PlayAttacks,
) -> Episodes:
    """As `rollout`, for any task; one on the host cannot be played inside a compiled program."""
    if isinstance(task, HostTask):
        return _play_on_host(task, policy, parameters, keys, num_episodes, Clock(horizon), attackers)
    return rollout(task, policy, parameters, keys, num_episodes=num_episodes, horizon=horizon, attackers=attackers)


def _play_on_host(
    task: HostTask,
    policy: Policy,
    parameters: Array,
    keys: Array,
    num_episodes: int,
    clock: Clock,
    attackers: PlayAttacks,
) -> Episodes:
    attacks, masks = tuple(attack for attack, _ in attackers), [who for _, who in attackers]
    shape = (len(parameters), num_episodes)
    num_rows = shape[0] * shape[1]  # one per episode of an agent
    weights = _weights(parameters, policy)
    observations = np.zeros((num_rows, clock.padded, task.observation_size), np.float32)
    of_action = () if isinstance(task.action_space, Discrete) else (task.action_space.size,)
    actions = np.zeros((num_rows, clock.padded, *of_action), np.float32 if of_action else np.int32)
    rewards, log_probabilities = np.zeros((2, num_rows, clock.padded), np.float32)
    lengths, live = np.zeros(num_rows, np.int32), np.arange(num_rows)

    def by_agent(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(*shape, *rows.shape[1:])

    with task.stage(num_rows) as stage:
        seen = _finite(task, "observation", stage.reset(np.asarray(_seeds(keys, num_episodes)).reshape(-1)))
        noise = mischief = None
        for time in range(clock.horizon):
            piece, within = divmod(time, clock.piece)
            if within == 0:
                noise = _draws(keys, piece, NOISE, (clock.piece, num_episodes, policy.noise_size))
                if any(attack.changes_actions for attack in attacks):
                    mischief = _draws(keys, piece, MISCHIEF, (clock.piece, num_episodes, task.action_space.size))
            taken = _act(weights, by_agent(seen), noise, mischief, within, masks, policy, task.action_space, attacks)
            action, log_probability = (np.asarray(each).reshape(num_rows, *each.shape[2:])[live] for each in taken)
            observations[live, time], actions[live, time], log_probabilities[live, time] = (
                seen[live],
                action,
                log_probability,
            )
            outcome = stage.step(live, action)
            seen[live] = _finite(task, "observation", outcome.observations)
            rewards[live, time] = _finite(task, "reward", outcome.rewards)
            lengths[live] += 1
            live = live[~(outcome.terminated | outcome.truncated)]
            if not len(live):
                break
    paid = jnp.asarray(by_agent(rewards))
    return Episodes(
        observations=jnp.asarray(by_agent(observations)),
        actions=jnp.asarray(by_agent(actions)),
        rewards=_noted(paid, by_agent(lengths), masks, keys, attacks, clock),
        log_probabilities=jnp.asarray(by_agent(log_probabilities)),
        lengths=jnp.asarray(by_agent(lengths)),
        returns=jnp.sum(paid, axis=2),
        steps=jnp.asarray(np.max(lengths)),
    )


def _finite(task: HostTask, what: str, values: np.ndarray) -> np.ndarray:
    """The same; one number that is none would spoil every gradient after it."""
    if not np.all(np.isfinite(values)):
        raise ValueError(
            f"{task.name} gave the {what} {values[~np.isfinite(values)][0]}: every number must be finite. Mend the "
            "task, or put a wrapper around it that replaces such numbers."
        )
    return values


@partial(jax.jit, static_argnames="policy")
def _weights(parameters: Array, policy: Policy) -> Weights:
    return jax.vmap(policy.unflatten)(parameters)


@partial(jax.jit, static_argnames="num_episodes")
def _seeds(keys: Array, num_episodes: int) -> Array:
    """Of every agent's episodes [agent, episode]; EnvPool's go to 2³¹ − 2."""
    return jax.vmap(lambda key: jax.random.randint(key, (num_episodes,), 0, 2**31 - 1))(_keys_at(keys, RESET))


@partial(jax.jit, static_argnames=("purpose", "shape"))
def _draws(keys: Array, piece: int, purpose: int, shape: tuple[int, int, int]) -> Array:
    """Uniform draws [time, agent, episode, size] for one piece."""
    return jax.vmap(lambda key: jax.random.uniform(key, shape), out_axes=1)(_keys_at(keys, purpose, piece))


@partial(jax.jit, static_argnames=("policy", "space", "attacks"))
def _act(
    weights: Weights,
    seen: Array,
    noise: Array,
    mischief: Array | None,
    within: int,
    masks: list[Array],
    policy: Policy,
    space: Space,
    attacks: tuple[Attack, ...],
) -> tuple[Array, Array]:
    """The actions taken [agent, episode, ...] where `seen` [agent, episode, feature], and log π of them."""
    outputs = jax.vmap(policy.outputs)(weights, seen)
    action = jax.vmap(policy.draw)(weights, outputs, noise[within])
    if mischief is not None:
        uniform = space.uniform(mischief[within])
        for attack, who in zip(attacks, masks, strict=True):
            action = where_agents(who, attack.act(action, uniform), action)
    return action, jax.vmap(policy.log_probability)(weights, outputs, action)


@partial(jax.jit, static_argnames=("attacks", "clock"))
def _noted(
    rewards: Array, lengths: Array, masks: list[Array], keys: Array, attacks: tuple[Attack, ...], clock: Clock
) -> Array:
    """What agents note down [agent, episode, time] where the environment paid `rewards`."""
    alive = jnp.arange(clock.padded) < lengths[..., None]
    for attack, who in zip(attacks, masks, strict=True):
        pieces = rewards.reshape(*lengths.shape, -1, clock.piece)

        def of_piece(paid: Array, piece: Array, attack: Attack = attack) -> Array:
            return jax.vmap(attack.record)(paid, _keys_at(keys, RECORD, piece))

        changed = jax.vmap(of_piece, (2, 0), 2)(pieces, jnp.arange(pieces.shape[2])).reshape(rewards.shape)
        rewards = jnp.where(who[:, None, None] & alive, changed, rewards)
    return rewards


def _keys_at(keys: Array, *address: Array | int) -> Array:
    """fold_in of each agent's key along the address."""
    for part in address:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, part)
    return keys
