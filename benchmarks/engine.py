"""The speed of whole training iterations: rollouts, gradients, exchange and update together.

    python benchmarks/engine.py steps         # environment steps per second, full-length episodes, K = 13
    python benchmarks/engine.py growth        # seconds per iteration and their shares for K = 13, 26, 52, 104
    python benchmarks/engine.py federations   # 100 federations of 13 agents × 4,000 trajectories, compilation included
    python benchmarks/engine.py numbers       # federations that differ in numbers: seconds until their first block ends
    python benchmarks/engine.py critic        # seconds per update of agents with a critic, by rule
    python benchmarks/engine.py coins         # trajectories that ten seeds compute while they wait for each other
    python benchmarks/engine.py train         # `byzpg train` as a newcomer runs it, from the start to the first return

Baseline of `steps`: rollouts alone, as they are usually written: Gymnasium's CartPole and a NumPy network, one step at
a time. `growth` has the first row, K = 13, as its baseline, `numbers` has one federation, `critic` has plain averaging,
and `coins` has the shared coin, with which nobody waits. Times are the best of several runs after compilation, where
nothing else is said.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from byzpg import Config, train
from byzpg.config import REPORTED_SEED
from byzpg.envs.cartpole import CartPole, State
from byzpg.federation.agents import PAGEAgent
from byzpg.federation.algorithms import Federation
from byzpg.federation.simulator import LARGE, SMALL, Simulation
from byzpg.learning.advantages import PPO
from byzpg.learning.gradients import gradient
from byzpg.learning.policies import Numbers
from byzpg.learning.rollouts import Clock, Episodes
from byzpg.robust.exchange import Phase, exchange
from byzpg.robust.rules import Rule


class EndlessCartPole(CartPole):
    """CartPole that does not end when the pole falls, so that every episode has full length."""

    def step(self, state: State, action: Numbers, noise: Numbers) -> tuple[State, jax.Array, jax.Array]:
        following, reward, fallen = super().step(state, action, noise)
        return following, reward, jnp.zeros_like(fallen)


def best(function: Callable[[], object], repetitions: int = 5) -> float:
    """The seconds of the fastest run, after one run that compiles."""
    jax.block_until_ready(function())
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - started)
    return min(times)


# Both batch sizes occur, whatever the presets say.
SETTING: dict[str, Any] = {"large_batch": 30, "small_batch": 4, "switch_probability": 0.2, "step_size": 5e-3}
SETTING |= {"coins": "shared"}  # so that all seeds do the same amount of work


def endless(**options: Any) -> Federation:
    federation = Config(**SETTING, **options).resolved().federation()
    return replace(federation, agent=replace(federation.agent, env=EndlessCartPole()))


def seconds_per_iteration(federation: Federation, num_seeds: int, batch: int) -> float:
    simulation = Simulation((federation,), tuple(range(num_seeds)))
    state = simulation.start()

    def block() -> None:
        nonlocal state
        state, _ = simulation.run(state, [batch] * 4, 0)

    return best(block, 3) / 4


def gymnasium_steps_per_second() -> float:
    """The baseline: one step at a time, with a NumPy network of the same size."""
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
    """Floating-point operations of the network per environment step: 2 per weight forward, 4 per weight backward."""
    policy = federation.agent.policy
    weights = sum(matrix.size for matrix, _ in policy.unflatten(jnp.zeros(policy.dimension)))
    # A large batch needs play and a gradient; a small one also log-probabilities and a gradient at θ_{t−1}.
    return weights * (2 + 6 if batch == LARGE else 2 + 6 + 2 + 6)


def matrix_peak() -> float:
    """The single-precision operations per second of a large matrix product."""
    size = 2048
    matrix = jnp.ones((size, size))
    product = jax.jit(lambda a: jnp.dot(a, a, precision=jax.lax.Precision.HIGHEST))
    return 2 * size**3 / best(lambda: product(matrix))


def steps() -> None:
    baseline, peak = gymnasium_steps_per_second(), matrix_peak()
    print(f"baseline: Gymnasium and NumPy, rollouts alone: {baseline:,.0f} steps/s")
    print(f"single-precision matrix peak: {peak / 1e9:,.0f} GFLOP/s; devices: {jax.local_devices()}\n")
    print("| batch | attack | seeds | ms per iteration | million steps/s | of the peak | × baseline |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for attack in ("AvgZero", "LargeNoise"):
        federation = endless(attack=attack)
        agent = federation.agent
        assert isinstance(agent, PAGEAgent)
        for name, batch, episodes in (("large", LARGE, agent.large_batch), ("small", SMALL, agent.small_batch)):
            for num_seeds in (1, 10):
                seconds = seconds_per_iteration(federation, num_seeds, batch)
                rate = num_seeds * federation.num_agents * episodes * federation.agent.horizon / seconds
                share = rate * operations_per_step(federation, batch) / peak
                print(
                    f"| {name} | {attack} | {num_seeds} | {seconds * 1e3:.1f} | {rate / 1e6:.2f} | {share:.1%} "
                    f"| {rate / baseline:,.0f} |",
                    flush=True,
                )


def growth() -> None:
    print("| K | f | large, s | small, s | rollouts | gradients | aggregation | agreement |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for num_agents in (13, 26, 52, 104):
        federation = endless(num_agents=num_agents, attack="LargeNoise")
        large, small = (seconds_per_iteration(federation, 1, batch) for batch in (LARGE, SMALL))
        parts = seconds_per_part(federation)
        shares = " | ".join(f"{part / sum(parts):.1%}" for part in parts)
        print(f"| {num_agents} | {federation.num_byzantine} | {large:.3f} | {small:.3f} | {shares} |", flush=True)


def seconds_per_part(federation: Federation) -> list[float]:
    """The seconds of rollouts, gradients, aggregation and agreement of a large batch, each as its own program."""
    agent = federation.agent
    assert isinstance(agent, PAGEAgent)
    keys = jax.random.split(jax.random.key(0), federation.num_agents)
    parameters = jax.vmap(agent.policy.initial)(keys)

    @jax.jit
    def play(parameters: jax.Array, keys: jax.Array) -> Episodes:
        return agent.play(parameters[:, None], keys, True)

    @jax.jit
    def estimate(parameters: jax.Array, episodes: Episodes) -> jax.Array:
        clock = Clock(agent.horizon)
        return gradient(agent.policy, parameters, episodes, agent.estimator, agent.discount, clock)

    def send(rule: Rule | None, phase: Phase) -> object:
        assert rule is not None
        return exchange(
            rule,
            parameters,
            byzantine=jnp.arange(federation.num_agents - federation.num_byzantine, federation.num_agents),
            attack=federation.attack,
            num_byzantine=federation.num_byzantine,
            phase=phase,
            key=jax.random.key(1),
            diagnose=True,
        )

    episodes = play(parameters, keys)
    return [
        best(lambda: play(parameters, keys)),
        best(lambda: estimate(parameters, episodes)),
        best(lambda: send(federation.aggregator, "gradients")),
        best(lambda: send(federation.agreement, "parameters")) * federation.rounds,
    ]


def critic() -> None:
    rules = ("Mean()", "NNM(TrimmedMean())", "CAF()", "Remember(NNM(TrimmedMean()))", "Remember(CAF())")
    ppo = PPO(environments=4, segment=128, epochs=4, minibatches=4)
    print("Milliseconds per update, play included, and how many times those of plain averaging:\n")
    print("| algorithm | network | " + " | ".join(rules) + " |")
    print("|---|---|" + "---:|" * len(rules), flush=True)
    for algorithm, width in (("ByzPPO", 64), ("ByzPPO", 256), ("DecByzPPO", 64)):
        options: dict[str, Any] = {"algorithm": algorithm, "hidden": (width, width), "attack": "AvgZero", "ppo": ppo}
        found = []
        for rule in rules:
            federation = Config(aggregator=rule, **options).resolved().federation()
            found.append(seconds_per_iteration(federation, 1, LARGE) / ppo.num_updates)
        cells = " | ".join(f"{each * 1e3:.1f} ({each / found[0]:.1f}×)" for each in found)
        print(f"| {algorithm} | {width} × {width} | {cells} |", flush=True)


def federations(number: int, trajectories: int) -> None:
    started = time.perf_counter()
    marks = []
    run = train(
        Config(attack="AvgZero", num_seeds=number, trajectories=trajectories, **SETTING),
        on_progress=lambda progress: marks.append(time.perf_counter()),
    )
    seconds, steps = time.perf_counter() - started, np.sum(run.metrics["environment_steps"])
    print(
        f"{number} federations × 13 agents × {np.max(run.trajectories):,} trajectories "
        f"on {jax.devices()[0].device_kind}: "
        f"{seconds:.1f} s in total, {marks[0] - started:.1f} s until the first block ended (compilation included); "
        f"{steps / 1e6:,.0f} M environment steps, {steps / seconds / 1e6:.1f} M/s; "
        f"last return {run.returns[:, -1].mean():.0f}"
    )


def numbers() -> None:
    """Every row in a new process: programs are compiled from scratch."""
    sweep = {"attack": ["AvgZero"], "step_size": list(np.geomspace(1e-4, 1e-1, 64)), "gate": [1.0]}
    both = {"attack": ["AvgZero", "ALIE", "LargeNoise"], "step_size": [1e-3, 3e-3, 1e-2, 3e-2], "gate": [0.5, 1.0]}
    alone = {option: choices[:1] for option, choices in sweep.items()}
    print("| federations, each with 4 seeds | number | first block, s | × one federation | next block, s | × one |")
    print("|---|---:|---:|---:|---:|---:|")
    baseline: tuple[float, ...] = ()
    for name, options in (("one", alone), ("64 step sizes", sweep), ("3 attacks × 4 step sizes × 2 gates", both)):
        command = [sys.executable, __file__, "numbers", "--options", json.dumps(options)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        first, following = map(float, output.split())
        baseline = baseline or (first, following)
        ratios = first / baseline[0], following / baseline[1]
        number = len(list(product(*options.values())))
        print(f"| {name} | {number} | {first:.1f} | {ratios[0]:.1f} | {following:.2f} | {ratios[1]:.1f} |", flush=True)


def first_blocks(options: dict[str, list[Any]]) -> None:
    """Print the seconds of two blocks of eight iterations, from the start of the first one's compilation."""
    chosen = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
    federations = tuple(Config(**SETTING | each).resolved().federation() for each in chosen)
    started = time.perf_counter()
    simulation = Simulation(federations, (0, 1, 2, 3))
    states = simulation.start()
    for _ in range(2):
        states, _ = simulation.run(states, [LARGE] + [SMALL] * 7, 0)
        print(time.perf_counter() - started)
        started = time.perf_counter()


def coins() -> None:
    """Counts alone: the timetables of ten reported seeds."""
    print("| preset, task | p | N | B | trajectories | one coin per seed, × shared | both batches always, × shared |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    cases: list[tuple[Literal["paper", "theory"], str, int]] = [
        ("paper", "CartPole-v1", 8000),
        ("paper", "CartPole-v1", 2000),
        ("paper", "LunarLander-v3", 8000),
        ("theory", "CartPole-v1", 8000),
        ("theory", "LunarLander-v3", 8000),
    ]
    for preset, task, trajectories in cases:
        config = Config(env=task, preset=preset, num_seeds=10, seed=REPORTED_SEED, trajectories=trajectories)
        settings = replace(config, num_agents=1, num_byzantine=0).resolved()
        schedule = settings.schedule()
        timetable = schedule.timetable(Simulation((settings.federation(),), settings.seeds).initial_parameters())
        needed = np.mean([plan.progress[-1] for plan in timetable.plans])
        batches = settings.large_batch + settings.small_batch
        always = max(plan.num_iterations for plan in timetable.plans) * batches
        print(
            f"| {preset}, {task} | {settings.switch_probability:.2g} | {settings.large_batch} | {settings.small_batch} "
            f"| {trajectories:,} | {timetable.trajectories_computed(schedule) / needed:.2f} | {always / needed:.2f} |"
        )


def newcomer() -> None:
    """Two starts of each command: the first one with an empty cache of programs."""
    with tempfile.TemporaryDirectory() as folder:
        _marks(folder, ("--help",), True)  # leaves byte code, as an installation does
        for options, to_the_end in (((), True), (("--env", "LunarLander-v3", "--num-seeds", "1"), False)):
            for start in ("first", "second"):
                marks = _marks(folder, options, to_the_end)
                times = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in marks.items())
                print(f"{' '.join(('byzpg train', *options))}, {start} start: {times}", flush=True)


def _marks(folder: str, options: tuple[str, ...], to_the_end: bool) -> dict[str, float]:
    """Seconds until a command says something, shows a return and ends."""
    command = [sys.executable, "-u", "-c", "from byzpg.cli import main; main()", "train", *options]
    # Some machines forbid byte code on the disk, which an installation leaves there.
    dropped = ("JAX_COMPILATION_CACHE", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    marks: dict[str, float] = {}
    started = time.perf_counter()
    variables = kept | {"XDG_CACHE_HOME": folder}
    with subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            marks.setdefault("first output", time.perf_counter() - started)
            if "return" in line:
                marks.setdefault("first return", time.perf_counter() - started)
                if not to_the_end:
                    process.kill()
    if to_the_end:
        marks["end"] = time.perf_counter() - started
    return marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "growth", "federations", "numbers", "critic", "coins", "train"))
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--trajectories", type=int, default=4000)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)  # of one process of `numbers`
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    if arguments.what == "federations":
        federations(arguments.number, arguments.trajectories)
    elif arguments.options is not None:
        first_blocks(arguments.options)
    else:
        modes = {
            "steps": steps,
            "growth": growth,
            "numbers": numbers,
            "critic": critic,
            "coins": coins,
            "train": newcomer,
        }
        modes[arguments.what]()


if __name__ == "__main__":
    main()
