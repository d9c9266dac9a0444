"""How many steps of its own a member needs until a task is learned, with a critic and attackers.

    python benchmarks/ppo.py CartPole-v1                         # DecByzPPO, 3 of 13 agents attacking, 10 seeds
    python benchmarks/ppo.py Pendulum-v1 --algorithm ByzPPO
    python benchmarks/ppo.py CartPole-v1 --algorithm PPO         # one agent alone
    python benchmarks/ppo.py CartPole-v1 --steps 2048 --seeds 1 --attacks AvgZero    # a quick check

For each attack, the table gives the environment steps per agent at which the mean return over seeds reaches the level
(a mean over 4 % of the run), the return at the end over all seeds and of the worst one, and what is deployed:
the mean of 100 episodes of the final policy in Gymnasium, drawn from the policy and greedy, over seeds. Baseline: the
published return of one PPO agent (RL Baselines3 Zoo), in the last line. Seeds 2000 and up were not used to choose
options.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from byzpg import Config, training
from byzpg.experiments.paper import FIVE_ATTACKS
from byzpg.play import evaluate
from byzpg.runs import Run, RunDirectory

# By task: the level, and the published return of PPO and the steps it took.
LEVELS = {
    "CartPole-v1": (475, "500 after 100,000 steps"),
    "LunarLander-v3": (200, "242 after 1,000,000 steps"),
    "Pendulum-v1": (-200, "-172 after 100,000 steps"),
}
WINDOW = 0.04  # share of a run over which returns are averaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=LEVELS)
    parser.add_argument("--algorithm", default="DecByzPPO")
    parser.add_argument("--attacks", nargs="*", default=FIVE_ATTACKS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=100, help="of the deployed policy; 0: none")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

    def say(progress: training.Progress) -> None:
        print(f"{progress.seconds:5.0f} s: {progress.done:.0%} done", file=sys.stderr, flush=True)

    shared = Config(
        env=arguments.task,
        algorithm=arguments.algorithm,
        steps=arguments.steps,
        num_seeds=arguments.seeds,
        seed=arguments.seed,
    )
    cells = {attack: Config(**(vars(shared) | {"attack": attack})) for attack in arguments.attacks}
    if shared.resolved().num_attackers == 0:
        cells = {"nobody": shared}
    level, published = LEVELS[arguments.task]
    with tempfile.TemporaryDirectory() as folder:
        paths = {attack: Path(folder) / attack for attack in cells}
        for attack, config in cells.items():
            RunDirectory.create(paths[attack], config.resolved())
        training.resume_all(list(paths.values()), say)
        print(f"| attack | {level} at | end | worst seed | drawn | greedy |\n|---|---:|---:|---:|---:|---:|")
        for attack, path in paths.items():
            run = training.load(path)
            reached, end, worst = _learned(run, level)
            drawn, greedy = _deployed(run, arguments.episodes)
            print(f"| {attack} | {reached} | {end:.0f} | {worst:.0f} | {drawn} | {greedy} |", flush=True)
    settings = shared.resolved()
    print(
        f"{settings.algorithm}, {settings.num_agents} agents, {arguments.seeds} seeds from {arguments.seed}, "
        f"{settings.length:,} steps per agent, {settings.ppo}, η = {settings.step_size:g}, β = {settings.momentum:g}; "
        f"baseline: one agent, published {published}"
    )


def _learned(run: Run, level: float) -> tuple[str, float, float]:
    """When the mean over seeds reached the level, and the end of all seeds and of the worst one."""
    width = max(1, round(WINDOW * run.returns.shape[1]))
    smoothed = np.stack([np.convolve(each, np.full(width, 1 / width), "valid") for each in run.returns])
    is_there = np.mean(smoothed, axis=0) >= level
    reached = f"{run.steps[0, width - 1 :][np.argmax(is_there)]:,}" if np.any(is_there) else "never"
    return reached, float(np.mean(smoothed[:, -1])), float(np.min(smoothed[:, -1]))


def _deployed(run: Run, num_episodes: int) -> list[str]:
    """The mean return of the final policies in Gymnasium, drawn from the policy and greedy."""
    if not num_episodes:
        return ["-", "-"]
    found = []
    for sample in (True, False):
        means = [
            np.mean(evaluate(run.policy(index), run.settings, num_episodes, 10_000, sample=sample)[0])
            for index in range(run.settings.num_seeds)
        ]
        found.append(f"{np.mean(means):.0f} (worst {np.min(means):.0f})")
    return found


if __name__ == "__main__":
    main()
