"""A trained policy in the real environment: Gymnasium's, where it has the task that was trained in JAX."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from byzpg import envs
from byzpg._install import install
from byzpg.config import Settings
from byzpg.envs import HostTask, host
from byzpg.runs import TrainedPolicy

AT_ONCE = 100  # episodes that are played side by side


def evaluate(
    policy: TrainedPolicy,
    settings: Settings,
    num_episodes: int,
    seed: int,
    *,
    greedy: bool = False,
    drawn: bool = True,
    on_step: Callable[[np.ndarray], object] | None = None,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Play whole episodes with a trained policy.

    Args:
        policy: The policy.
        settings: The settings of its run, which name the task.
        num_episodes: The number of episodes.
        seed: Seed of the environment; episode i starts from seed + i.
        greedy: Whether to take the most likely actions instead of drawing them from the policy, as in training.
        drawn: Whether to keep the frames of the first episode.
        on_step: Called in every step with the actions [episode, ...] of the episodes that are not over.

    Returns:
        The returns [episode], and the frames, if the task can be drawn.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # frames stay in memory; without this, SDL looks for a screen
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # nor is there sound
    task = _task(settings.env)
    returns, frames = np.zeros(num_episodes), []
    try:
        for first in range(0, num_episodes, AT_ONCE):
            of_these = range(first, min(first + AT_ONCE, num_episodes))
            with task.stage(len(of_these), drawn=drawn and first == 0) as stage:
                observations, live = stage.reset(seed + np.asarray(of_these)), np.arange(len(of_these))
                key = jax.random.fold_in(jax.random.key(seed), first)
                for step in range(task.horizon or settings.horizon):
                    if drawn and first == 0 and live[0] == 0 and (picture := stage.picture()) is not None:
                        frames.append(picture)
                    # Also for episodes that have ended, so that it is compiled once.
                    actions = policy.act(observations, None if greedy else jax.random.fold_in(key, step), greedy=greedy)
                    if on_step is not None:
                        on_step(actions[live])
                    outcome = stage.step(live, actions[live])
                    observations[live] = outcome.observations
                    returns[first + live] += outcome.rewards
                    live = live[~(outcome.terminated | outcome.truncated)]
                    if not len(live):
                        break
    except Exception as error:
        if type(error).__name__ != "DependencyNotInstalled":  # of Gymnasium, which is an extra
            raise
        raise ValueError(_missing()) from None
    return returns, frames


def _missing() -> str:
    return f"playing needs Gymnasium and its renderers: {install('gymnasium')}."


def _task(name: str) -> "HostTask | _InJax":
    """The task to play."""
    task = envs.make(name)
    if isinstance(task, HostTask):
        return task
    if name not in envs.ENVIRONMENTS:
        return _InJax(task)
    try:
        import gymnasium  # noqa: F401  (an extra)
    except ImportError:
        raise ValueError(_missing()) from None
    return host.describe(f"gymnasium:{name}") if host.in_gymnasium(name) else _InJax(task)


@dataclass(frozen=True)
class _InJax:
    """A task in JAX that Gymnasium does not have."""

    env: envs.Environment

    @property
    def horizon(self) -> int:
        return self.env.horizon

    @contextmanager
    def stage(self, num_episodes: int, drawn: bool) -> "Iterator[_JaxStage]":
        yield _JaxStage(self.env)


class _JaxStage:
    """Episodes of a task in JAX; each depends only on its seed and its actions."""

    def __init__(self, env: envs.Environment) -> None:
        self.env = env

    def reset(self, seeds: np.ndarray) -> np.ndarray:
        self.keys, self.state, observations = _begun(self.env, np.asarray(seeds, np.uint32))
        self.time = 0
        return np.array(observations)

    def step(self, episodes: np.ndarray, actions: np.ndarray) -> host.Outcome:
        # All episodes take the step, so that it is compiled once.
        every = np.zeros((len(self.keys), *actions.shape[1:]), actions.dtype)
        every[episodes] = actions
        self.state, *outcome = _stepped(self.env, self.state, every, self.keys, self.time)
        self.time += 1
        observations, rewards, terminated = (np.asarray(each)[episodes] for each in outcome)
        return host.Outcome(observations, rewards, terminated, np.zeros_like(terminated))

    def picture(self) -> None:
        return None


@partial(jax.jit, static_argnums=0)
def _begun(env: envs.Environment, seeds: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
    keys = jax.vmap(jax.random.key)(seeds)
    state = jax.vmap(env.reset)(keys)
    return keys, state, jnp.stack(env.observe(state), axis=-1)


@partial(jax.jit, static_argnums=0)
def _stepped(env: envs.Environment, state: Any, actions: jax.Array, keys: jax.Array, time: int) -> tuple[Any, ...]:
    draws = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, time), (env.noise_size,)))(keys)
    noise = tuple(draws[:, i] for i in range(env.noise_size))
    state, rewards, terminated = env.step(state, env.action_space.numbers(actions), noise)
    return state, jnp.stack(env.observe(state), axis=-1), rewards, terminated
