"""Use a trained policy: load a run, or train one, and act with it in Gymnasium's own CartPole.

    python examples/use_policy.py
    python examples/use_policy.py --run runs/CartPole-v1-DecByzPPO-AvgZero-1 --output plots

Needs `pip install '.[gymnasium]'` in the clone. `run.policy()` is an ordinary object: `act` takes an observation as an
array and returns an action, drawn as in training, and needs no federation around it. The script keeps the run that it
trains in the output folder, so that a second call loads it. It plays ten episodes and writes an animation of the first.
"""

import argparse
import os
from pathlib import Path

import gymnasium
import numpy as np

import byzpg
from byzpg.experiments import figures
from byzpg.runs import TrainedPolicy

EPISODES = 10


def trained(directory: Path) -> byzpg.Run:
    """The run in this directory; it is trained first if it does not exist."""
    if not directory.exists():
        config = byzpg.Config(num_agents=5, num_byzantine=1, attack="AvgZero", num_seeds=1, trajectories=750)
        byzpg.train(config, directory)
    return byzpg.load(directory)


def play(policy: TrainedPolicy | None, episodes: int, *, greedy: bool = False) -> tuple[np.ndarray, list[np.ndarray]]:
    """The returns of some episodes, and frames of the first 200 steps. Without a policy, actions are random."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # Gymnasium draws without a screen
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    env.action_space.seed(0)
    returns, frames = np.zeros(episodes), []
    for episode in range(episodes):
        observation, _ = env.reset(seed=episode)
        ended = False
        while not ended:
            if policy is not None and episode == 0 and len(frames) < 200:
                frames.append(env.render())
            action = env.action_space.sample() if policy is None else int(policy.act(observation, greedy=greedy))
            observation, reward, terminated, truncated, _ = env.step(action)
            returns[episode] += float(reward)
            ended = terminated or truncated
    env.close()
    return returns, frames


def main(directory: Path, output: Path) -> None:
    run = trained(directory)
    print(
        f"Run: {directory}, return {run.returns[0, 0]:.0f} in the first iteration, {run.returns[0, -1]:.0f} in the last"
    )
    at_random, _ = play(None, EPISODES)
    print(f"Random actions in Gymnasium: mean return {at_random.mean():.0f} over {EPISODES} episodes")
    returns, frames = play(run.policy(), EPISODES)
    print(f"The policy in Gymnasium: mean return {returns.mean():.0f} over {EPISODES} episodes")
    greedy, _ = play(run.policy(), EPISODES, greedy=True)
    print(f"Its most likely actions: mean return {greedy.mean():.0f} over {EPISODES} episodes")
    figures.save_animation(frames, output / "use-policy.gif")
    print(f"Animation: {output / 'use-policy.gif'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="directory of a run on CartPole-v1; default: OUTPUT/cartpole")
    parser.add_argument("--output", type=Path, default=Path("runs/examples"), help="folder of the animation")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    main(given.run or given.output / "cartpole", given.output)
