"""How fast tasks are played: whole episodes of uniformly random actions.

    python benchmarks/tasks.py cpu     # ours, EnvPool and Gymnasium, on all cores of this machine
    python benchmarks/tasks.py gpu     # ours at 1,024, 13,000 and 100,000 environments

A step counts where an episode is still under way. Times are the best of several, after compilation.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from byzpg.envs import ENVIRONMENTS, Environment
from byzpg.policies import policy_for
from byzpg.rollouts import rollout

TASKS = ("CartPole-v1", "LunarLander-v3")
SECONDS = 5.0  # of play for each measurement of another library


def best_rate(play: Callable[[], float], repetitions: int = 3) -> float:
    """Steps per second of the fastest of several plays; each returns its number of steps."""
    rates = []
    for _ in range(repetitions):
        started = time.perf_counter()
        steps = play()
        rates.append(steps / (time.perf_counter() - started))
    return max(rates)


def ours(env: Environment, num_agents: int, num_episodes: int) -> tuple[Callable[[], float], float]:
    """A play of num_agents × num_episodes episodes, dealt to all devices; and the seconds its compilation took."""
    policy = policy_for("auto", env.observation_size, env.action_space, hidden=())
    devices = Mesh(np.asarray(jax.local_devices()), "agent")

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=devices,
        in_specs=PartitionSpec("agent"),
        out_specs=PartitionSpec("agent"),
        check_vma=False,
    )
    def lengths(keys: jax.Array) -> jax.Array:
        parameters = jnp.zeros((len(keys), policy.dimension))
        return rollout(env, policy, parameters, keys, num_episodes=num_episodes, horizon=env.horizon).lengths

    calls = iter(range(1_000_000))

    def play() -> float:
        keys = jax.random.split(jax.random.key(next(calls)), num_agents)
        return float(np.sum(lengths(keys)))

    started = time.perf_counter()
    play()
    return play, time.perf_counter() - started


def envpool_steps(name: str, num_envs: int) -> float:
    """EnvPool with all cores, in steps per second; its environments start anew by themselves."""
    import envpool

    pool = envpool.make_gymnasium(name, num_envs=num_envs, num_threads=os.cpu_count())
    pool.reset()
    actions = np.random.default_rng(0).integers(pool.action_space.n, size=(64, num_envs)).astype(np.int32)
    started, rounds = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        pool.step(actions[rounds % 64])
        rounds += 1
    return rounds * num_envs / (time.perf_counter() - started)


def gymnasium_steps(name: str) -> float:
    """One Gymnasium environment, in steps per second; NaN where what it needs, such as Box2D, is not installed."""
    import gymnasium

    try:
        env = gymnasium.make(name)
    except gymnasium.error.DependencyNotInstalled:
        return float("nan")
    env.reset(seed=0)
    started, steps = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        steps += 1
        if terminated or truncated:
            env.reset()
    return steps / (time.perf_counter() - started)


def on_cpu() -> None:
    print("| task | ours, steps/s | compile, s | EnvPool | Gymnasium | × EnvPool | × Gymnasium |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in TASKS:
        play, seconds = ours(ENVIRONMENTS[name](), 64, 64)
        rate = best_rate(play)
        pool = max(envpool_steps(name, num_envs) for num_envs in (64, 1024))
        plain = gymnasium_steps(name)
        print(
            f"| {name} | {rate:,.0f} | {seconds:.0f} | {pool:,.0f} | {plain:,.0f} | {rate / pool:.1f} "
            f"| {rate / plain:,.0f} |",
            flush=True,
        )


def on_gpu() -> None:
    print(f"{jax.devices()[0].device_kind}\n")
    print("| task | environments | million steps/s | compile, s |")
    print("|---|---:|---:|---:|")
    for name in TASKS:
        for num_agents in (32, 406, 3125):
            play, seconds = ours(ENVIRONMENTS[name](), num_agents, 32)
            print(f"| {name} | {num_agents * 32:,} | {best_rate(play) / 1e6:.2f} | {seconds:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=("cpu", "gpu"))
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    on_cpu() if arguments.where == "cpu" else on_gpu()


if __name__ == "__main__":
    main()
