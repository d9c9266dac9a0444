"""Rollouts of any task: compiled if the task is written in JAX, else step by step on the host.

On the host, one compiled call per time step evaluates the policies of all agents. Random numbers have the same
addresses as in `rollouts`, so both ways draw the same actions.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg.envs import Task
from byzpg.envs.host import HostTask, Stage
from byzpg.envs.spaces import Discrete, Space
from byzpg.learning.policies import Policy, Weights
from byzpg.learning.rollout_kernel import where_agents
from byzpg.learning.rollouts import (
    ATTACK_ACTIONS,
    ATTACK_REWARDS,
    NOISE,
    RESET,
    Clock,
    Episodes,
    PlayAttacks,
    rollout,
)
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
    """Play episodes of any task, as `rollout` does.

    Tasks on the host cannot be played inside a compiled program: for them, this function must not be traced.

    Args:
        task: The task, the same for all agents.
        policy: The policy's architecture, the same for all agents.
        parameters: The parameters of each agent's policy [agent, d].
        keys: A random key for each agent [agent].
        num_episodes: The number of episodes that each agent plays.
        horizon: The number of time steps after which an episode is cut off.
        attackers: Attacks on play, as for `rollout`.
    """
    if not isinstance(task, HostTask):
        return rollout(task, policy, parameters, keys, num_episodes=num_episodes, horizon=horizon, attackers=attackers)
    clock = Clock(horizon)
    record = _Record(task, clock, len(parameters), num_episodes)
    actor = _Actor(
        policy=policy,
        action_space=task.action_space,
        clock=clock,
        num_episodes=num_episodes,
        keys=keys,
        weights=_weights(parameters, policy),
        attackers=attackers,
    )
    with task.stage(record.num_rows) as stage:
        _play_on_stage(stage, record, actor)
    returns = jnp.sum(jnp.asarray(record.by_agent(record.rewards)), axis=2)
    return record.episodes(actor.recorded_rewards(record), returns)


def _play_on_stage(stage: Stage, record: "_Record", actor: "_Actor") -> None:
    """Step all episodes together until the last one has ended."""
    observations = record.task.checked("observation", stage.reset(actor.seeds()))
    live = np.arange(record.num_rows)
    for time in range(record.clock.horizon):
        taken = actor.act(record.by_agent(observations), time)
        actions, log_probabilities = (
            np.asarray(each).reshape(record.num_rows, *each.shape[2:])[live] for each in taken
        )
        record.observations[live, time] = observations[live]
        record.actions[live, time] = actions
        record.log_probabilities[live, time] = log_probabilities
        outcome = stage.step(live, actions)
        observations[live] = record.task.checked("observation", outcome.observations)
        record.rewards[live, time] = record.task.checked("reward", outcome.rewards)
        record.lengths[live] += 1
        live = live[~(outcome.terminated | outcome.truncated)]
        if not len(live):
            break


@dataclass
class _Record:
    """Arrays on the host into which episodes are written: one row for each episode of each agent."""

    task: HostTask
    clock: Clock
    num_agents: int
    num_episodes: int

    def __post_init__(self) -> None:
        rows, padded, space = self.num_rows, self.clock.padded, self.task.action_space
        self.observations = np.zeros((rows, padded, self.task.observation_size), np.float32)
        if isinstance(space, Discrete):
            self.actions = np.zeros((rows, padded), np.int32)
        else:
            self.actions = np.zeros((rows, padded, space.size), np.float32)
        self.rewards = np.zeros((rows, padded), np.float32)  # as the environment paid them
        self.log_probabilities = np.zeros((rows, padded), np.float32)
        self.lengths = np.zeros(rows, np.int32)

    @property
    def num_rows(self) -> int:
        return self.num_agents * self.num_episodes

    def by_agent(self, rows: np.ndarray) -> np.ndarray:
        """[row, ...] → [agent, episode, ...]."""
        return rows.reshape(self.num_agents, self.num_episodes, *rows.shape[1:])

    def episodes(self, recorded_rewards: Array, returns: Array) -> Episodes:
        return Episodes(
            observations=jnp.asarray(self.by_agent(self.observations)),
            actions=jnp.asarray(self.by_agent(self.actions)),
            rewards=recorded_rewards,
            log_probabilities=jnp.asarray(self.by_agent(self.log_probabilities)),
            lengths=jnp.asarray(self.by_agent(self.lengths)),
            returns=returns,
            steps=jnp.asarray(np.max(self.lengths)),
        )


@dataclass(kw_only=True)
class _Actor:
    """All agents of a rollout: they choose actions and record rewards."""

    policy: Policy
    action_space: Space
    clock: Clock
    num_episodes: int
    keys: Array  # [agent]
    weights: Weights  # leaves [agent, ...]
    attackers: PlayAttacks
    # The draws [time, agent, episode, size] of the current piece, for the policies and for attacks on actions.
    noise: Array | None = field(default=None, init=False)
    attack_draws: Array | None = field(default=None, init=False)

    def seeds(self) -> np.ndarray:
        """The seeds of all episodes [row]."""
        return np.asarray(_seeds(self.keys, num_episodes=self.num_episodes)).reshape(-1)

    def act(self, observations: np.ndarray, time: int) -> tuple[Array, Array]:
        """The actions [agent, episode, ...] at observations [agent, episode, feature], and log π of them."""
        on_actions = [(attack, mask) for attack, mask in self.attackers if attack.changes_actions]
        piece, within = divmod(time, self.clock.piece)
        if within == 0:
            shape = self.clock.piece, self.num_episodes
            self.noise = _draws(self.keys, piece, purpose=NOISE, shape=(*shape, self.policy.noise_size))
            if on_actions:
                self.attack_draws = _draws(
                    self.keys, piece, purpose=ATTACK_ACTIONS, shape=(*shape, self.action_space.size)
                )
        return chosen_actions(
            self.weights,
            observations,
            self.noise,
            self.attack_draws,
            within,
            [mask for _, mask in on_actions],
            policy=self.policy,
            space=self.action_space,
            attacks=tuple(attack for attack, _ in on_actions),
        )

    def recorded_rewards(self, record: _Record) -> Array:
        """What the agents record [agent, episode, time] of the environment's rewards."""
        return _recorded_rewards(
            jnp.asarray(record.by_agent(record.rewards)),
            record.by_agent(record.actions),
            record.by_agent(record.lengths),
            self.keys,
            [mask for _, mask in self.attackers],
            attacks=tuple(attack for attack, _ in self.attackers),
            clock=self.clock,
        )


@partial(jax.jit, static_argnames="policy")
def _weights(parameters: Array, policy: Policy) -> Weights:
    return jax.vmap(policy.unflatten)(parameters)


@partial(jax.jit, static_argnames="num_episodes")
def _seeds(keys: Array, *, num_episodes: int) -> Array:
    """Seeds [agent, episode], at most 2³¹ − 2: EnvPool takes no larger ones."""
    return jax.vmap(lambda key: jax.random.randint(key, (num_episodes,), 0, 2**31 - 1))(_keys_at(keys, RESET))


@partial(jax.jit, static_argnames=("purpose", "shape"))
def _draws(keys: Array, piece: int, *, purpose: int, shape: tuple[int, int, int]) -> Array:
    """Uniform draws [time, agent, episode, size] for one piece."""
    return jax.vmap(lambda key: jax.random.uniform(key, shape), out_axes=1)(_keys_at(keys, purpose, piece))


@partial(jax.jit, static_argnames=("policy", "space", "attacks"))
def chosen_actions(
    weights: Weights,
    observations: Array,
    noise: Array,
    attack_draws: Array | None,
    within: int,
    masks: list[Array],
    *,
    policy: Policy,
    space: Space,
    attacks: tuple[Attack, ...],
) -> tuple[Array, Array]:
    """The actions [agent, episode, ...] at observations [agent, episode, feature], and log π of them.

    `noise` and `attack_draws` are draws [time, agent, episode, size], of which those of time step `within` are used.
    """
    outputs = jax.vmap(policy.outputs)(weights, observations)
    action = jax.vmap(policy.draw)(weights, outputs, noise[within])
    if attack_draws is not None:
        uniform = space.uniform(attack_draws[within])
        for attack, mask in zip(attacks, masks, strict=True):
            action = where_agents(mask, attack.act(action, uniform), action)
    return action, jax.vmap(policy.log_probability)(weights, outputs, action)


@partial(jax.jit, static_argnames=("attacks", "clock"))
def _recorded_rewards(
    rewards: Array,
    actions: Array,
    lengths: Array,
    keys: Array,
    masks: list[Array],
    *,
    attacks: tuple[Attack, ...],
    clock: Clock,
) -> Array:
    """`_Actor.recorded_rewards`, for rewards [agent, episode, time] of episodes of these lengths [agent, episode]."""
    alive = jnp.arange(clock.padded) < lengths[..., None]
    for attack, mask in zip(attacks, masks, strict=True):
        pieces, taken = (each.reshape(*lengths.shape, -1, clock.piece, *each.shape[3:]) for each in (rewards, actions))

        def of_piece(rewards: Array, actions: Array, piece: Array, attack: Attack = attack) -> Array:
            return jax.vmap(attack.record_step)(rewards, actions, _keys_at(keys, ATTACK_REWARDS, piece))

        changed = jax.vmap(of_piece, (2, 2, 0), 2)(pieces, taken, jnp.arange(pieces.shape[2])).reshape(rewards.shape)
        rewards = jnp.where(mask[:, None, None] & alive, changed, rewards)
    return rewards


def _keys_at(keys: Array, *address: Array | int) -> Array:
    """Fold an address into each agent's key [agent], part by part."""
    for part in address:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, part)
    return keys
