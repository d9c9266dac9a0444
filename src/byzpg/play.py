"""A trained policy in the real Gymnasium environment."""

import os

import jax
import numpy as np

from byzpg.runs import TrainedPolicy


def evaluate(
    policy: TrainedPolicy, env: str, num_episodes: int, seed: int, sample: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns [episode] of play from seeds `seed`, `seed` + 1, ..., and the pictures of the first episode.

    Actions are the most likely ones or, with `sample`, drawn from the policy.
    """
    missing = "playing needs Gymnasium and what it draws with: pip install 'byzpg[gymnasium]'."
    try:
        import gymnasium  # an extra, and slow to import
    except ImportError:
        raise ValueError(missing) from None
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pictures stay in memory; looking for a screen, SDL complains
    environment = gymnasium.make(env, render_mode="rgb_array")
    returns, frames = [], []
    try:
        for episode in range(num_episodes):
            observation, _ = environment.reset(seed=seed + episode)
            total, step, ended = 0.0, 0, False
            while not ended:
                if episode == 0:
                    frames.append(np.asarray(environment.render()))
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), episode), step) if sample else None
                observation, reward, terminated, truncated, _ = environment.step(policy.act(observation, key))
                total, step, ended = total + float(reward), step + 1, terminated or truncated
            returns.append(total)
    except gymnasium.error.DependencyNotInstalled:
        raise ValueError(missing) from None
    finally:
        environment.close()
    return np.asarray(returns), frames
