"""The speed of the tasks under uniformly random actions.

    python benchmarks/tasks.py cpu                        # ours, EnvPool and Gymnasium, on all cores of this machine
    python benchmarks/tasks.py cpu --tasks CartPole-v1    # one task only
    python benchmarks/tasks.py gpu                        # ours with 1,024, 12,992 and 100,000 environments
    python benchmarks/tasks.py gpu --hidden 64 64         # whole episodes of a policy with two hidden layers

Baselines: EnvPool on all cores, and one Gymnasium environment. "Stepping": an environment whose episode ends starts
again (ours: from its own first state), so that every step counts; a warm-up first lets the episodes get out of phase.
"Whole episodes": a rollout, which continues until the last episode has ended; a step counts while its episode is
running. Rates are the best of several runs; "compile" is the time from the function to its program. Both are compiled
as `byzpg train` does.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from byzpg.envs import ENVIRONMENTS, Environment
from byzpg.federation.devices import QUICK_COMPILATION
from byzpg.learning.policies import policy_for
from byzpg.learning.rollouts import rollout

TASKS = ("CartPole-v1", "LunarLander-v3")
STEPS, WARM_UP = 50, 400
SECONDS = 5.0  # per measurement of another library


def best_rate(play: Callable[[], float], repetitions: int = 3) -> float:
    """The steps per second of the fastest of several calls; each returns its number of steps."""
    rates = []
    for _ in range(repetitions):
        started = time.perf_counter()
        steps = play()
        rates.append(steps / (time.perf_counter() - started))
    return max(rates)


def compiled(function: Callable[..., Any], *arguments: Any) -> tuple[Callable[..., Any], float]:
    """The function compiled for all devices, each with its share of the leading axis, and the seconds it took."""
    devices, share = Mesh(np.asarray(jax.local_devices()), "agent"), PartitionSpec("agent")
    on_all_devices = jax.shard_map(function, mesh=devices, in_specs=share, out_specs=share, check_vma=False)
    started = time.perf_counter()
    program = jax.jit(on_all_devices, compiler_options=QUICK_COMPILATION).lower(*arguments).compile()
    return program, time.perf_counter() - started


def whole_episodes(
    env: Environment, num_agents: int, num_episodes: int, hidden: Sequence[int]
) -> tuple[Callable[[], float], float]:
    """A function that plays num_agents × num_episodes episodes, and the seconds of its compilation."""
    policy = policy_for("auto", env.observation_size, env.action_space, hidden=tuple(hidden))

    def lengths(keys: jax.Array) -> jax.Array:
        parameters = jnp.zeros((len(keys), policy.dimension))
        return rollout(env, policy, parameters, keys, num_episodes=num_episodes, horizon=env.horizon).lengths

    batches = (jax.random.split(jax.random.key(seed), num_agents) for seed in count())
    program, seconds = compiled(lengths, next(batches))
    return lambda: float(np.sum(program(next(batches)))), seconds


def stepping(env: Environment, num_envs: int) -> tuple[Callable[[], float], float]:
    """A function that plays STEPS steps of num_envs environments, and the seconds of its compilation."""

    def go_on(first: Any, state: Any, keys: jax.Array) -> Any:
        def step(state: Any, key: jax.Array) -> tuple[Any, None]:
            action_key, noise_key = jax.random.split(key)
            size = jax.tree.leaves(state)[0].shape
            action = env.action_space.uniform(jax.random.uniform(action_key, (*size, env.action_space.size)))
            noise = tuple(jax.random.uniform(noise_key, (env.noise_size, *size)))
            following, _, ended = env.step(state, env.action_space.numbers(action), noise)
            return jax.tree.map(partial(jnp.where, ended), first, following), None

        return lax.scan(step, state, jax.random.split(keys[0], STEPS))[0]

    def keys(seed: int, number: int) -> jax.Array:
        return jax.random.split(jax.random.key(seed), number)

    start = compiled(jax.vmap(env.reset), keys(0, num_envs))[0](keys(0, num_envs))
    program, seconds = compiled(go_on, start, start, keys(0, jax.local_device_count()))
    kept = {"state": start, "seed": 0}

    def play() -> float:
        kept["seed"] += 1
        kept["state"] = program(start, kept["state"], keys(kept["seed"], jax.local_device_count()))
        jax.block_until_ready(kept["state"])
        return float(STEPS * num_envs)

    for _ in range(WARM_UP // STEPS):
        play()
    return play, seconds


def envpool_steps(name: str, num_envs: int) -> float:
    """The steps per second of EnvPool on all cores; its environments restart by themselves."""
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
    """The steps per second of one Gymnasium environment; NaN if a dependency such as Box2D is not installed."""
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


def on_cpu(tasks: Sequence[str], hidden: Sequence[int]) -> None:
    print(
        "| task | stepping, steps/s | compile, s | × EnvPool | × Gymnasium | whole episodes, steps/s | compile, s "
        "| × EnvPool | EnvPool, steps/s | Gymnasium, steps/s |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name in tasks:
        play, seconds = stepping(ENVIRONMENTS[name](), 4096)
        rate = best_rate(play)
        play, seconds_of_episodes = whole_episodes(ENVIRONMENTS[name](), 64, 64, hidden)
        episodes = best_rate(play)
        pool = max(envpool_steps(name, num_envs) for num_envs in (64, 1024))
        plain = gymnasium_steps(name)
        print(
            f"| {name} | {rate:,.0f} | {seconds:.0f} | {rate / pool:.1f} | {rate / plain:,.0f} | {episodes:,.0f} "
            f"| {seconds_of_episodes:.0f} | {episodes / pool:.1f} | {pool:,.0f} | {plain:,.0f} |",
            flush=True,
        )


def on_gpu(tasks: Sequence[str], hidden: Sequence[int]) -> None:
    print(f"{jax.devices()[0].device_kind}\n")
    print("| task | environments | stepping, million steps/s | compile, s | whole episodes, million | compile, s |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in tasks:
        for num_agents in (32, 406, 3125):
            play, seconds = stepping(ENVIRONMENTS[name](), num_agents * 32)
            rate = best_rate(play)
            play, seconds_of_episodes = whole_episodes(ENVIRONMENTS[name](), num_agents, 32, hidden)
            episodes = best_rate(play)
            print(
                f"| {name} | {num_agents * 32:,} | {rate / 1e6:.2f} | {seconds:.0f} | {episodes / 1e6:.2f} "
                f"| {seconds_of_episodes:.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=("cpu", "gpu"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--hidden", nargs="*", type=int, default=(), help="sizes of the policy's hidden layers")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    (on_cpu if arguments.where == "cpu" else on_gpu)(arguments.tasks, arguments.hidden)


if __name__ == "__main__":
    main()
