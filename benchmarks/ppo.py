"""How many steps of its own a member needs until a task is learned, with a critic and attackers.

    python benchmarks/ppo.py CartPole-v1                         # DecByzPPO, 3 of 13 agents attacking, 10 seeds
    python benchmarks/ppo.py Pendulum-v1 --algorithm ByzPPO
    python benchmarks/ppo.py CartPole-v1 --algorithm PPO         # one agent alone
    python benchmarks/ppo.py envpool:Walker2d-v4 --seeds 5 --attacks AvgZero    # about ten minutes for each seed
    python benchmarks/ppo.py CartPole-v1 --steps 2048 --seeds 1 --attacks AvgZero    # a quick check
    python benchmarks/ppo.py Pendulum-v1 --against rejax         # speed of one agent; pip install '.[against]'

For each attack, the table gives the environment steps per agent at which the mean return over seeds reaches the level
(a mean over 4 % of the run), the return at the end over all seeds and of the worst one, and what is deployed:
the mean of 100 episodes of the final policy in Gymnasium (LunarLander: EnvPool), drawn from the policy and greedy, over
seeds. Baseline: the published return of one PPO agent (RL Baselines3 Zoo), in the last line. Seeds 2000 and up were not
used to choose options.

With --against rejax, the table compares PPO with rejax's on this machine, with the same numbers of environments, steps,
epochs and minibatches, and the same networks: seconds to compile, environment steps per second (the best of three runs
of one seed), and the steps and seconds of training until solved, median over three seeds; inf means never. Both are
solved after the first iteration whose policy has the level in 128 episodes, with actions drawn from it; the time of
evaluations is not counted.
"""

import argparse
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from byzpg import Config, training
from byzpg.experiments.paper import FIVE_ATTACKS
from byzpg.learning.advantages import PPO
from byzpg.play import evaluate
from byzpg.runs import Run, RunDirectory

# By task: the level, and the published return of PPO and the steps it took.
LEVELS = {
    "CartPole-v1": (475, "500 after 100,000 steps"),
    "LunarLander-v3": (200, "242 after 1,000,000 steps"),
    "Pendulum-v1": (-200, "-172 after 100,000 steps"),
    "Acrobot-v1": (-85, "-73.5 after 1,000,000 steps"),
    "envpool:HalfCheetah-v4": (5819, "5,819 after 1,000,000 steps (v3, greedy)"),
    "envpool:Hopper-v4": (2410, "2,410 after 1,000,000 steps (v3, greedy)"),
    "envpool:Walker2d-v4": (3479, "3,479 after 1,000,000 steps (v3, greedy)"),
}
PLAYED_IN = {"LunarLander-v3": "envpool:LunarLander-v3"}  # Gymnasium's lander needs Box2D, which many cannot install
WINDOW = 0.04  # share of a run over which returns are averaged
# Of the comparison with rejax, by task: what both have in common, and what each is called there.
COMMON: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"step_size": 1e-3, "discount": 0.99, "epochs": 8, "minibatches": 16, "entropy": 0.01},
    "Pendulum-v1": {"step_size": 1e-3, "discount": 0.9, "epochs": 10, "minibatches": 16, "entropy": 0.0},
}
NUM_ENVIRONMENTS, SEGMENT, HIDDEN = 64, 64, (64, 64)
EVALUATED = 128  # episodes, as in rejax


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=LEVELS)
    parser.add_argument("--algorithm", default="DecByzPPO")
    parser.add_argument("--attacks", nargs="*", default=FIVE_ATTACKS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--level", type=float, help="the return that is to be reached; default: what is published")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=100, help="of the deployed policy; 0: none")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory; if they are there, go on with them")
    parser.add_argument("--against", choices=["rejax"])
    arguments = parser.parse_args()
    if arguments.against:
        if arguments.task not in COMMON:
            parser.error(f"--against compares {' and '.join(COMMON)}, got {arguments.task}.")
        compare_with_rejax(arguments.task, arguments.steps or 2**18)
        return
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
    level = level if arguments.level is None else arguments.level
    with tempfile.TemporaryDirectory() if arguments.keep is None else nullcontext(arguments.keep) as folder:
        paths = {attack: Path(folder) / attack for attack in cells}
        for attack, config in cells.items():
            if not (paths[attack] / "config.json").exists():
                RunDirectory.create(paths[attack], config.resolved())
            elif RunDirectory.open(paths[attack]).settings() != config.resolved():
                parser.error(f"{paths[attack]} is a run with other options; name another directory, or remove it.")
        training.resume_all(list(paths.values()), say)
        print(f"| attack | {level:g} at | end | worst seed | drawn | greedy |\n|---|---:|---:|---:|---:|---:|")
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


def compare_with_rejax(task: str, steps: int) -> None:
    """Print compile time, steps per second and time until solved of both."""
    found = {"byzpg": _time_ours(task, steps), "rejax": _time_rejax(task, steps)}
    print("| | compile, s | steps/s | solved after, steps | solved after, s |\n|---|---:|---:|---:|---:|")
    for name, (compiling, rate, solved) in found.items():
        print(f"| {name} | {compiling:.1f} | {rate:,.0f} | {solved:,.0f} | {solved / rate:.1f} |")
    (_, ours, our_steps), (_, theirs, their_steps) = found.values()
    print(
        f"{task} to {LEVELS[task][0]}: {ours / theirs:.2f} × the steps/s of rejax, "
        f"{their_steps / theirs / (our_steps / ours):.2f} × as soon; {steps:,} steps, {NUM_ENVIRONMENTS} × {SEGMENT} "
        f"per iteration, {COMMON[task]['epochs']} epochs × {COMMON[task]['minibatches']} minibatches, on "
        f"{jax.devices()[0].device_kind} ({os.cpu_count()} cores)"
    )


def _time_ours(task: str, steps: int) -> tuple[float, float, float]:
    """Seconds to compile, steps per second, and steps until solved."""
    common = COMMON[task]
    learner = PPO(
        NUM_ENVIRONMENTS, SEGMENT, common["epochs"], common["minibatches"], entropy=common["entropy"], reward_scale=0.1
    )

    def train(seed: int, steps: int = steps) -> tuple[float, Run]:
        config = Config(
            env=task,
            algorithm="PPO",
            num_seeds=1,
            seed=seed,
            steps=steps,
            step_size=common["step_size"],
            decay=0.0,  # rejax's steps are constant
            discount=common["discount"],
            momentum=0.0,
            hidden=HIDDEN,
            activation="tanh",
            ppo=learner,
        )
        started = time.perf_counter()
        run = training.train(config)
        return time.perf_counter() - started, run

    def solved_after(seed: int) -> float:
        iteration = NUM_ENVIRONMENTS * SEGMENT
        for done in range(iteration, steps + 1, iteration):  # a shorter run is the beginning of a longer one
            _, run = train(seed, done)
            returns, _ = evaluate(run.policy(0), run.settings, EVALUATED, 10_000, drawn=False)
            if np.mean(returns) >= LEVELS[task][0]:
                return done
        return np.inf

    first, _ = train(2000)
    seconds = [train(seed)[0] for seed in range(2001, 2004)]
    solved = [solved_after(seed) for seed in range(2001, 2004)]
    return first - min(seconds), steps / min(seconds), float(np.median(solved))


def _time_rejax(task: str, steps: int) -> tuple[float, float, float]:
    """As `_time_ours`."""
    import rejax  # pyright: ignore[reportMissingImports]

    common, iteration = COMMON[task], NUM_ENVIRONMENTS * SEGMENT
    learner = rejax.PPO.create(
        env=task,
        num_envs=NUM_ENVIRONMENTS,
        num_steps=SEGMENT,
        num_epochs=common["epochs"],
        num_minibatches=common["minibatches"],
        learning_rate=common["step_size"],
        gamma=common["discount"],
        ent_coef=common["entropy"],
        max_grad_norm=0.5,
        normalize_rewards=True,  # which ours scales
        total_timesteps=steps,
        eval_freq=iteration,
        skip_initial_evaluation=True,
        agent_kwargs={"hidden_layer_sizes": HIDDEN, "activation": "tanh"},
    )
    silent = learner.replace(eval_callback=lambda learner, state, key: ())
    started = time.perf_counter()
    train = jax.jit(silent.train).lower(jax.random.key(0)).compile()
    compiling = time.perf_counter() - started
    seconds, solved = [], []
    evaluated = jax.jit(learner.train)
    for seed in range(2001, 2004):
        started = time.perf_counter()
        jax.block_until_ready(train(jax.random.key(seed)))
        seconds.append(time.perf_counter() - started)
        _, (_, returns) = evaluated(jax.random.key(seed))
        there = np.mean(returns, axis=1) >= LEVELS[task][0]
        solved.append(iteration * (1 + np.argmax(there)) if any(there) else np.inf)
    return compiling, steps / min(seconds), float(np.median(solved))


def _learned(run: Run, level: float) -> tuple[str, float, float]:
    """When the mean over seeds reached the level, and the end of all seeds and of the worst one."""
    width = max(1, round(WINDOW * run.returns.shape[1]))
    smoothed = np.stack([np.convolve(each, np.full(width, 1 / width), "valid") for each in run.returns])
    is_there = np.mean(smoothed, axis=0) >= level
    reached = f"{run.steps[0, width - 1 :][np.argmax(is_there)]:,}" if np.any(is_there) else "never"
    return reached, float(np.mean(smoothed[:, -1])), float(np.min(smoothed[:, -1]))


def _deployed(run: Run, num_episodes: int) -> list[str]:
    """The mean return of the final policies in Gymnasium or EnvPool, drawn from the policy and greedy."""
    if not num_episodes:
        return ["-", "-"]
    found = []
    settings = replace(run.settings, env=PLAYED_IN.get(run.settings.env, run.settings.env))
    for greedy in (False, True):
        means = [
            np.mean(evaluate(run.policy(index), settings, num_episodes, 10_000, greedy=greedy, drawn=False)[0])
            for index in range(run.settings.num_seeds)
        ]
        found.append(f"{np.mean(means):.0f} (worst {np.min(means):.0f})")
    return found


if __name__ == "__main__":
    main()
