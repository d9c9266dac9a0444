"""A trained policy in the real environment: Gymnasium's, where the task was trained in JAX."""

import os

import jax
import numpy as np

from byzpg import envs
from byzpg._install import install
from byzpg.config import Settings
from byzpg.envs import host
from byzpg.runs import TrainedPolicy

AT_ONCE = 100  # episodes that are played side by side


def evaluate(
    policy: TrainedPolicy, settings: Settings, num_episodes: int, seed: int, *, greedy: bool = False, drawn: bool = True
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Play whole episodes with a trained policy.

    Args:
        policy: The policy.
        settings: The settings of its run, which name the task.
        num_episodes: The number of episodes.
        seed: Seed of the environment; episode i starts from seed + i.
        greedy: Whether to take the most likely actions instead of drawing them from the policy, as in training.
        drawn: Whether to keep the frames of the first episode.

    Returns:
        The returns [episode], and the frames, if the task can be drawn.
    """
    missing = f"playing needs Gymnasium and its renderers: {install('gymnasium')}."
    try:
        import gymnasium  # an extra, and slow to import
    except ImportError:
        raise ValueError(missing) from None
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # frames stay in memory; without this, SDL looks for a screen
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # nor is there sound
    task = host.describe(f"gymnasium:{settings.env}" if settings.env in envs.ENVIRONMENTS else settings.env)
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
                    outcome = stage.step(live, actions[live])
                    observations[live] = outcome.observations
                    returns[first + live] += outcome.rewards
                    live = live[~(outcome.terminated | outcome.truncated)]
                    if not len(live):
                        break
    except gymnasium.error.DependencyNotInstalled:
        raise ValueError(missing) from None
    return returns, frames
