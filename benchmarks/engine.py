"""How fast whole training iterations are: rollouts, gradients, exchange and update together.

    python benchmarks/engine.py steps         # environment steps per second, full-length episodes, K = 13
    python benchmarks/engine.py growth        # seconds per iteration and their shares for K = 13, 26, 52, 104
    python benchmarks/engine.py federations   # 100 federations of 13 agents × 4,000 trajectories, compilation included
    python benchmarks/engine.py train         # `byzpg train` as a newcomer runs it

Baseline of `steps`: one agent's rollouts alone as they are usually written, Gymnasium's CartPole and a NumPy network, one
step at a time. Times are the best of several, after compilation.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
import jax.numpy as jnp
import numpy as np

from byzpg import Config, exchange, train
from byzpg.algorithms import Federation
from byzpg.envs.cartpole import CartPole, State
from byzpg.gradients import gradient
from byzpg.rollouts import Clock, rollout
from byzpg.simulate import LARGE, SMALL, Simulation


class EndlessCartPole(CartPole):
    """CartPole whose pole may fall: every episode has full length."""

    def step(self, state: State, action: jax.Array, noise: jax.Array) -> tuple[State, jax.Array, jax.Array]:
        following, reward, fallen = super().step(state, action, noise)
        return following, reward, jnp.zeros_like(fallen)


def best(function: Callable[[], object], repetitions: int = 5) -> float:
    """Seconds of the fastest run, after one that compiles."""
    jax.block_until_ready(function())
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - started)
    return min(times)


def endless(**options: object) -> Federation:
    federation = Config(**options).resolved().simulation().federation  # pyright: ignore[reportArgumentType]
    return replace(federation, agent=replace(federation.agent, env=EndlessCartPole()))


def seconds_per_iteration(federation: Federation, num_seeds: int, batch: int) -> float:
    simulation = Simulation(federation, tuple(range(num_seeds)))
    state = simulation.start()

    def block() -> None:
        nonlocal state
        state, _ = simulation.run(state, [batch] * 4, 0)

    return best(block, 3) / 4


def gymnasium_steps_per_second() -> float:
    """Rollouts one step at a time, with a NumPy network of the same size."""
    import gymnasium

    env, rng = gymnasium.make("CartPole-v1"), np.random.default_rng(0)
    layers = [rng.normal(size=shape) for shape in ((4, 16), (16, 16), (16, 2))]
    started, steps = time.perf_counter(), 0
    while steps < 20_000:
        values, _ = env.reset(seed=steps)
        ended = False
        while not ended:
            for matrix in layers[:-1]:
                values = np.maximum(values @ matrix, 0)
            outputs = np.exp(values @ layers[-1])
            action = int(rng.random() < outputs[1] / outputs.sum())
            values, _, terminated, truncated, _ = env.step(action)
            ended, steps = terminated or truncated, steps + 1
    return steps / (time.perf_counter() - started)


def operations_per_step(federation: Federation, batch: int) -> int:
    """Floating-point operations of the network in one environment step: forward passes 2, backward passes 4 per weight."""
    weights = sum(
        matrix.size for matrix, _ in federation.agent.policy.unflatten(jnp.zeros(federation.agent.policy.dimension))
    )
    # Large: play, gradient. Small: play, gradient at θ_t, log-probabilities and gradient at θ_{t−1}.
    return weights * (2 + 6 if batch == LARGE else 2 + 6 + 2 + 6)


def matrix_peak() -> float:
    """Single-precision operations per second of a large matrix product."""
    size = 2048
    matrix = jnp.ones((size, size))
    product = jax.jit(lambda a: jnp.dot(a, a, precision=jax.lax.Precision.HIGHEST))
    return 2 * size**3 / best(lambda: product(matrix))


def steps() -> None:
    baseline, peak = gymnasium_steps_per_second(), matrix_peak()
    print(f"baseline: Gymnasium and NumPy, rollouts alone: {baseline:,.0f} steps/s")
    print(f"single-precision matrix peak: {peak / 1e9:,.0f} GFLOP/s; devices: {jax.local_devices()}\n")
    print(
        f"{'batch':6} {'attack':12} {'seeds':>5} {'ms/iteration':>13} {'M steps/s':>10} {'of peak':>8} {'× baseline':>11}"
    )
    for attack in ("AvgZero", "LargeNoise"):
        federation = endless(attack=attack)
        for name, batch, episodes in (
            ("large", LARGE, federation.agent.large_batch),
            ("small", SMALL, federation.agent.small_batch),
        ):
            for num_seeds in (1, 10):
                seconds = seconds_per_iteration(federation, num_seeds, batch)
                rate = num_seeds * federation.num_agents * episodes * federation.agent.horizon / seconds
                share = rate * operations_per_step(federation, batch) / peak
                print(
                    f"{name:6} {attack:12} {num_seeds:5} {seconds * 1e3:13.1f} {rate / 1e6:10.2f} {share:8.1%} "
                    f"{rate / baseline:11,.0f}",
                    flush=True,
                )


def growth() -> None:
    print(
        f"{'K':>4} {'f':>3} {'large, s':>9} {'small, s':>9}   share of: rollouts, gradients, aggregation, agreement (large)"
    )
    for num_agents in (13, 26, 52, 104):
        federation = endless(num_agents=num_agents, attack="LargeNoise")
        agent, rule = federation.agent, federation.agreement
        assert rule is not None
        large = seconds_per_iteration(federation, 1, LARGE)
        small = seconds_per_iteration(federation, 1, SMALL)
        keys = jax.random.split(jax.random.key(0), num_agents)
        parameters = jax.vmap(agent.policy.initial)(keys)
        byzantine = jnp.arange(num_agents - federation.num_byzantine, num_agents)
        play = jax.jit(
            lambda parameters, keys, agent=agent: rollout(
                agent.env, agent.policy, parameters, keys, num_episodes=agent.large_batch, horizon=agent.horizon
            )
        )
        episodes = play(parameters, keys)
        estimate = jax.jit(
            lambda parameters, episodes, agent=agent: gradient(
                agent.policy, parameters, episodes, agent.estimator, agent.discount, Clock(agent.horizon)
            )
        )

        def send(
            phase: str, federation: Federation = federation, byzantine: jax.Array = byzantine
        ) -> Callable[..., object]:
            rule = federation.aggregator if phase == "gradients" else federation.agreement
            return partial(
                exchange,
                rule,
                byzantine=byzantine,
                attack=federation.attack,
                num_byzantine=federation.num_byzantine,
                phase=phase,
                key=jax.random.key(1),
                diagnose=True,
            )

        parts = [
            best(lambda: play(parameters, keys)),
            best(lambda: estimate(parameters, episodes)),
            best(lambda: send("gradients")(parameters)),
            best(lambda: send("parameters")(parameters)) * federation.rounds,
        ]
        shares = "  ".join(f"{part / sum(parts):5.1%}" for part in parts)
        print(f"{num_agents:4} {federation.num_byzantine:3} {large:9.3f} {small:9.3f}   {shares}", flush=True)


def federations(number: int, trajectories: int) -> None:
    started = time.perf_counter()
    marks = []
    run = train(
        Config(attack="AvgZero", num_seeds=number, trajectories=trajectories),
        on_progress=lambda progress: marks.append(time.perf_counter()),
    )
    seconds, steps = time.perf_counter() - started, np.sum(run.metrics["environment_steps"])
    print(
        f"{number} federations × 13 agents × {run.trajectories[-1]:,} trajectories on {jax.devices()[0].device_kind}: "
        f"{seconds:.1f} s in all, {marks[0] - started:.1f} s to the end of the first block (compilation included); "
        f"{steps / 1e6:,.0f} M environment steps, {steps / seconds / 1e6:.1f} M/s; last return {run.returns[:, -1].mean():.0f}"
    )


def newcomer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [sys.executable, "-c", "from byzpg.cli import main; main()", "train"]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        print(f"byzpg train: {time.perf_counter() - started:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "growth", "federations", "train"))
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--trajectories", type=int, default=4000)
    arguments = parser.parse_args()
    if arguments.what == "federations":
        federations(arguments.number, arguments.trajectories)
    else:
        {"steps": steps, "growth": growth, "train": newcomer}[arguments.what]()


if __name__ == "__main__":
    main()
