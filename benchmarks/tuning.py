"""The choice of the tuned presets, and of the settings of experiments, on seeds that no figure uses.

    python benchmarks/tuning.py cartpole                # momentum, batch, step size and its decay under five attacks
    python benchmarks/tuning.py variance                # batch and step size of every way to lower the variance
    python benchmarks/tuning.py cartpole-peers          # SVRPG, FedPG-BR and N-PG-IGT
    python benchmarks/tuning.py lunarlander             # GPUs only, as the next one
    python benchmarks/tuning.py lunarlander-peers
    python benchmarks/tuning.py cartpole --tables 1 --seeds 1 --trajectories 60    # a quick check

Each table has a row per setting and a column per case: an attack, or a number of honest agents. A cell says after how
many trajectories per agent the mean over seeds reaches two levels, and the mean and the worst seed's return of the last
tenth. The last columns repeat the slowest case and the worst seed of all. With large batches alone, ByzPG represents
both methods: they differ in who computes the average, not in its value. Baseline: the rows without momentum.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from math import inf
from pathlib import Path

import jax
import numpy as np

from byzpg import Config, Run, training
from byzpg.config import ADAM_AT_AGENTS, ADAM_BEHIND_RULE
from byzpg.experiments.paper import FIVE_ATTACKS, PAPER_ATTACKS, UNDECAYED
from byzpg.experiments.statistics import smooth_on_grid
from byzpg.learning.gradients import GPOMDP
from byzpg.runs import RunDirectory, provenance

LEVELS = {"CartPole-v1": (450, 475), "LunarLander-v3": (200, 250)}
CELL = {"CartPole-v1": 20, "LunarLander-v3": 50}

Table = dict[str, dict[str, Config]]  # settings by row and column; the runs of a table share one program


def under(config: Config, attacks: tuple[str, ...]) -> dict[str, Config]:
    """One case per attack, with 3 of 13 agents attacking."""
    return {attack: replace(config, num_byzantine=3, attack=attack) for attack in attacks}


def cartpole() -> Iterator[Table]:
    shared = Config(algorithm="ByzPG", num_seeds=10, seed=100, trajectories=600, **ADAM_AT_AGENTS)
    for large_batch in (6, 10, 15):
        yield _poles(replace(shared, large_batch=large_batch), product((0.0, 0.8), (1e-2, 2e-2, 4e-2), (0.0, 0.9)))


def _poles(shared: Config, choices: Iterable[tuple[float, ...]]) -> Table:
    table = {}
    for momentum, step_size, decay in choices:
        each = replace(shared, momentum=momentum, step_size=step_size, decay=decay)
        cases = under(each, FIVE_ATTACKS) | {"honest, K = 5": replace(each, num_agents=5, num_byzantine=0)}
        table[f"N = {shared.large_batch}, β = {momentum:g}, η = {step_size:g}, decay {decay:g}"] = cases
    return table


def variance() -> Iterator[Table]:
    """Nine settings of every way. PAGE corrects sums of gradients, so that its agents cannot scale them."""
    shared = Config(num_seeds=10, seed=100, trajectories=600, **ADAM_BEHIND_RULE)
    page = replace(shared, switch_probability=0.25, small_batch=4)
    large, small, larger = (15, 10, 6), (24, 15, 10), (1e-2, 2e-2, 4e-2)
    ways: dict[str, tuple[Config, tuple[int, ...], tuple[float, ...]]] = {
        "no momentum": (shared, large, (5e-3, 1e-2, 2e-2)),
        "momentum": (replace(shared, momentum=0.8), large, (5e-3, 1e-2, 2e-2)),
        "momentum, transport": (replace(shared, momentum=0.8, transport=True), large, (5e-3, 1e-2, 2e-2)),
        "no momentum, Adam at the agents": (replace(shared, **ADAM_AT_AGENTS), large, larger),
        "momentum, Adam at the agents": (replace(shared, momentum=0.8, **ADAM_AT_AGENTS), large, larger),
        "PAGE, per decision": (
            replace(page, importance="ImportanceWeights(mode='per-decision')"),
            small,
            (5e-3, 1e-2, 2e-2),
        ),
        "PAGE, defensive": (
            replace(page, importance="DefensiveSampling(mode='per-decision')"),
            small,
            (5e-3, 1e-2, 2e-2),
        ),
        "PAGE, Hessian": (replace(page, importance="HessianVector()"), small, (5e-3, 1e-2, 2e-2)),
    }
    for name, (way, large_batches, steps) in ways.items():
        yield {
            f"{name}, N = {large_batch}, η = {step_size:g}": under(
                replace(way, large_batch=large_batch, step_size=step_size), ("AvgZero", "RandomAction")
            )
            for large_batch, step_size in product(large_batches, steps)
        }


def lunarlander() -> Iterator[Table]:
    options = ADAM_AT_AGENTS | UNDECAYED
    shared = Config(env="LunarLander-v3", algorithm="ByzPG", num_seeds=4, seed=100, trajectories=2000, **options)

    def table(shared: Config, choices: Iterable[tuple[float, ...]]) -> Table:
        return {
            f"N = {shared.large_batch}, β = {momentum:g}, η = {step_size:g}, decay {decay:g}": under(
                replace(shared, momentum=momentum, step_size=step_size, decay=decay), ("AvgZero", "RandomAction")
            )
            for momentum, step_size, decay in choices
        }

    for large_batch in (20, 30, 45):
        choices = product((0.0, 0.8), (1e-2, 2e-2, 3e-2), (0.7, 0.95))
        yield table(replace(shared, large_batch=large_batch), choices)
    # The best of those, and what lies between them, with more seeds: do they lose one?
    more = replace(shared, num_seeds=12)
    yield table(
        replace(more, large_batch=45), ((0.8, 3e-2, 0.7), (0.8, 3e-2, 0.95), (0.9, 3e-2, 0.7), (0.8, 2e-2, 0.7))
    )
    yield table(
        replace(more, large_batch=30), ((0.8, 2e-2, 0.7), (0.9, 2e-2, 0.7), (0.9, 3e-2, 0.7), (0.8, 1.5e-2, 0.5))
    )
    # Smaller batches, and another rule, under all of the paper's attacks.
    yield {
        f"{rule}, N = {large_batch}, η = {step_size:g}": under(
            replace(more, aggregator=rule, large_batch=large_batch, momentum=0.8, step_size=step_size, decay=0.7),
            PAPER_ATTACKS,
        )
        for rule, (large_batch, step_size) in product(
            ("NNM(TrimmedMean())", "CAF"), ((30, 2e-2), (20, 1.5e-2), (20, 2e-2))
        )
    }
    # Traces that decay, with the best of those.
    best = replace(more, large_batch=20, momentum=0.8, decay=0.7)
    choices = [*product((0.98, 0.99, 0.995), (0.999, 0.9999), (2e-2,)), (0.97, 0.9999, 2e-2)]
    yield {
        f"λ = {trace:g}, γ = {discount:g}, η = {step_size:g}": under(
            replace(
                best,
                estimator=GPOMDP(baseline="leave-one-out", trace_decay=trace),
                discount=discount,
                step_size=step_size,
            ),
            ("AvgZero", "RandomAction"),
        )
        for trace, discount, step_size in [*choices, (0.99, 0.9999, 1.5e-2), (0.99, 0.9999, 3e-2)]
    }
    lone = replace(shared, algorithm="PAGE-PG", num_seeds=6, trajectories=5000, large_batch=45, **ADAM_BEHIND_RULE)
    yield {
        f"one agent, λ = {trace}, η = {step_size:g}": {
            "PAGE-PG": replace(lone, estimator=GPOMDP(baseline="leave-one-out", trace_decay=trace), step_size=step_size)
        }
        for trace, step_size in product((None, 0.995), (5e-3, 1e-2))
    }


def peers(shared: Config, batches: tuple[tuple[int, int], ...], steps: tuple[float, ...]) -> Iterator[Table]:
    """SVRPG and FedPG-BR, in one program per pair of batches (N, B)."""
    shared = replace(shared, switch_probability=0.2, **ADAM_BEHIND_RULE)
    weights = ("ImportanceWeights(cap=1.0)", "ImportanceWeights(mode='per-decision')")
    for large_batch, small_batch in batches:
        each = replace(shared, large_batch=large_batch, small_batch=small_batch)
        table = {}
        for importance, step_size in product(weights, steps):
            svrpg = replace(each, algorithm="SVRPG", importance=importance, step_size=step_size)
            fedpg = replace(svrpg, algorithm="FedPG-BR")
            name = f"N = {large_batch}, B = {small_batch}, {importance}, η = {step_size:g}"
            table[name] = {"SVRPG": svrpg} | under(fedpg, PAPER_ATTACKS)
        yield table


def radii(shared: Config) -> Table:
    """FedPG-BR's filter with a radius of its own, next to the one that follows from the messages."""
    shared = replace(shared, algorithm="FedPG-BR", switch_probability=0.2, **ADAM_BEHIND_RULE)
    filters = ("FedPGFilter()", *(f"FedPGFilter(radius={radius})" for radius in (3.0, 10.0, 30.0, 100.0)))
    return {
        f"{rule}, η = {step_size:g}": under(replace(shared, aggregator=rule, step_size=step_size), PAPER_ATTACKS)
        for rule, step_size in product(filters, (5e-3, 1e-2))
    }


def lone_transport(shared: Config, batches: tuple[int, ...], steps: tuple[float, ...]) -> Iterator[Table]:
    for large_batch in batches:
        each = replace(shared, algorithm="N-PG-IGT", large_batch=large_batch)
        yield {
            f"N = {large_batch}, β = {momentum:g}, η = {step_size:g}": {
                "N-PG-IGT": replace(each, momentum=momentum, step_size=step_size)
            }
            for momentum, step_size in product((0.8, 0.9), steps)
        }


def cartpole_peers() -> Iterator[Table]:
    shared = Config(num_seeds=8, seed=100, trajectories=2000, coins="shared")
    yield from peers(shared, ((15, 4), (24, 8)), (2e-3, 5e-3, 1e-2, 2e-2))
    yield from lone_transport(shared, (15, 6), (0.03, 0.06, 0.12, 0.25, 0.5))
    yield radii(replace(shared, large_batch=15, small_batch=4))


def lunarlander_peers() -> Iterator[Table]:
    shared = Config(env="LunarLander-v3", num_seeds=3, seed=100, trajectories=2500, coins="shared", **UNDECAYED)
    yield from peers(shared, ((45, 15),), (1e-3, 2e-3, 5e-3))
    yield from lone_transport(shared, (30,), (0.03, 0.06, 0.12, 0.25, 0.5))
    # With another discount, and next to it the plain agent.
    nearer = replace(shared, discount=0.99)
    yield from peers(nearer, ((45, 15),), (2e-3, 5e-3))
    yield from lone_transport(nearer, (30,), (0.03, 0.06))
    lone = replace(shared, algorithm="PAGE-PG", large_batch=45, momentum=0.0, num_seeds=6)
    yield {
        f"N = 45, η = {step_size:g}, γ = {discount:g}": {
            "PAGE-PG": replace(lone, step_size=step_size, discount=discount)
        }
        for step_size, discount in product((5e-3,), (0.999, 0.99))
    }


TABLES = {
    "cartpole": cartpole,
    "variance": variance,
    "cartpole-peers": cartpole_peers,
    "lunarlander": lunarlander,
    "lunarlander-peers": lunarlander_peers,
}


def summary(run: Run) -> tuple[list[float], float, float]:
    """When the mean over seeds reaches the levels of the task, and the mean and the worst seed of the last tenth."""
    env = run.settings.env
    grid = np.arange(CELL[env], np.min(run.trajectories[:, -1]) + 1, CELL[env])
    cells = smooth_on_grid(run.trajectories, run.returns, grid)
    mean, ends = np.mean(cells, axis=0), np.mean(cells[:, grid > 0.9 * grid[-1]], axis=1)
    return [float(min(grid[mean >= level], default=inf)) for level in LEVELS[env]], ends.mean(), ends.min()


class _TimeIsUp(Exception):
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choice", choices=TABLES)
    parser.add_argument("--trajectories", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--tables", type=int, help="how many tables to compute; default: all")
    parser.add_argument("--skip", type=int, default=0, help="how many tables to leave out before")
    parser.add_argument("--seconds", type=float, default=inf, help="show a table as far as it is after this time")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

    def say(progress: training.Progress) -> None:
        print(f"{progress.seconds:5.0f} s: {progress.done:.0%} of a table, {progress.label}", file=sys.stderr)
        if progress.seconds > arguments.seconds:
            raise _TimeIsUp

    def when(time: float) -> str:
        return "never" if time == inf else f"{time:,.0f}"

    about = provenance()
    end = None if arguments.tables is None else arguments.skip + arguments.tables
    for table in islice(TABLES[arguments.choice](), arguments.skip, end):
        cells = {(setting, case): config for setting, cases in table.items() for case, config in cases.items()}
        with tempfile.TemporaryDirectory() as folder:
            directories = {}
            for index, (place, config) in enumerate(cells.items()):
                trajectories, seeds = arguments.trajectories or config.trajectories, arguments.seeds or config.num_seeds
                asked = replace(config, trajectories=trajectories, num_seeds=seeds).resolved()
                directories[place] = RunDirectory.create(Path(folder) / str(index), asked, about).path
            with suppress(_TimeIsUp):
                training.resume_all(list(directories.values()), say)
            found = {place: summary(training.load(directory)) for place, directory in directories.items()}
        cases = list(dict.fromkeys(case for _, case in found))
        print("| setting |", " | ".join(cases), "| slowest | worst seed |")
        print("|---" * (1 + len(cases)) + "|---:|---:|")
        for setting in table:
            row = {case: found[setting, case] for case in cases if (setting, case) in found}
            texts = [
                f"{when(times[0])}, {when(times[1])}: {end:.0f} ({worst:.0f})" for times, end, worst in row.values()
            ]
            slowest, lowest = max(times[1] for times, _, _ in row.values()), min(worst for _, _, worst in row.values())
            print(f"| {setting} |", " | ".join(texts), f"| {when(slowest)} | {lowest:.0f} |", flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
