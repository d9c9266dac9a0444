"""A trained policy in the real environment: Gymnasium's, where the task was trained in JAX."""

import os

import jax
import numpy as np

from byzpg import envs
from byzpg.config import Settings
from byzpg.envs import host
from byzpg.runs import TrainedPolicy


def evaluate(
    policy: TrainedPolicy, settings: Settings, num_episodes: int, seed: int, *, sample: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Play whole episodes with a trained policy.

    Args:
        policy: The policy.
        settings: The settings of its run, which name the task.
        num_episodes: The number of episodes.
        seed: Seed of the environment; episode i starts from seed + i.
        sample: Whether to draw actions from the policy instead of taking the most likely ones.

    Returns:
        The returns [episode], and the frames of the first episode, if the task can be drawn.
    """
    missing = "playing needs Gymnasium and its renderers: pip install 'byzpg[gymnasium]'."
    try:
        import gymnasium  # an extra, and slow to import
    except ImportError:
        raise ValueError(missing) from None
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # frames stay in memory; without this, SDL looks for a screen
    task = host.describe(f"gymnasium:{settings.env}" if settings.env in envs.ENVIRONMENTS else settings.env)
    returns, frames = np.zeros(num_episodes), []
    only = np.zeros(1, int)
    try:
        with task.stage(1, drawn=True) as stage:
            for episode in range(num_episodes):
                observation = stage.reset(only + seed + episode)
                for step in range(task.horizon or settings.horizon):
                    if episode == 0 and (picture := stage.picture()) is not None:
                        frames.append(picture)
                    key = jax.random.fold_in(jax.random.key(seed), episode) if sample else None
                    action = policy.act(observation, key if key is None else jax.random.fold_in(key, step))
                    observation, reward, terminated, truncated = stage.step(only, action)
                    returns[episode] += reward[0]
                    if terminated[0] or truncated[0]:
                        break
    except gymnasium.error.DependencyNotInstalled:
        raise ValueError(missing) from None
    return returns, frames
