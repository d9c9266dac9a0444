"""The choice of the tuned presets, and of the settings of experiments, on seeds that no figure uses.

    python benchmarks/tuning.py cartpole            # batch, step size and momentum under five attacks
    python benchmarks/tuning.py variance            # batch and step size of every way to lower the variance
    python benchmarks/tuning.py lunarlander         # GPUs only
    python benchmarks/tuning.py cartpole --settings 2 --seeds 1 --trajectories 60    # a quick check

On CartPole and LunarLander, ByzPG represents both methods: with large batches alone, they differ in who computes the
average, not in its value. For each setting, the table gives the trajectories per agent at which the mean over seeds
reaches two levels, and the mean of the last tenth, over all seeds and for the worst seed. Baseline: the first rows of
each table, without momentum.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import jax
import numpy as np

from byzpg import Config, training
from byzpg.experiments.statistics import smooth_on_grid
from byzpg.runs import RunDirectory

CELL = {"cartpole": 25, "variance": 25, "lunarlander": 50}
LEVELS = {"cartpole": (450, 475), "variance": (450, 475), "lunarlander": (200, 250)}


def settings(task: str) -> Iterator[tuple[str, Config]]:
    """The settings to compare, each a name and a configuration."""
    attacked = Config(algorithm="ByzPG", num_byzantine=3)
    if task == "cartpole":
        shared = replace(attacked, num_seeds=6, seed=100, trajectories=600)
        choices = [(0.0, 15, 2e-2), (0.0, 8, 2e-2), (0.8, 6, 1e-2), (0.9, 6, 1e-2), (0.9, 6, 7e-3)]
        choices += [(0.8, 8, 1e-2), (0.9, 8, 1e-2), (0.9, 8, 1.4e-2)]
        for momentum, large_batch, step_size in choices:
            each = replace(shared, momentum=momentum, large_batch=large_batch, step_size=step_size)
            name = f"β = {momentum:g}, N = {large_batch}, η = {step_size:g}"
            for attack in ("RandomAction", "LargeNoise", "AvgZero", "ALIE", "Normalized"):
                yield f"{name}, {attack}", replace(each, attack=attack)
            yield f"{name}, honest, K = 5", replace(each, num_agents=5, num_byzantine=0)
            yield f"{name}, K = 1", replace(each, algorithm="PAGE-PG", num_byzantine=None)
    elif task == "variance":
        shared = Config(num_byzantine=3, attack="AvgZero", num_seeds=4, seed=100, trajectories=500, momentum=0.0)
        small = replace(shared, switch_probability=0.25, small_batch=4)
        ways = {
            "no momentum": (shared, (15, 8, 6)),
            "momentum 0.8": (replace(shared, momentum=0.8), (8, 6, 5)),
            "momentum 0.9": (replace(shared, momentum=0.9), (8, 6, 5)),
            "momentum 0.8, transport": (replace(shared, momentum=0.8, transport=True), (8, 6, 5)),
            "momentum 0.9, transport": (replace(shared, momentum=0.9, transport=True), (8, 6, 5)),
            "PAGE, per decision": (replace(small, importance="ImportanceWeights(mode='per-decision')"), (24, 15, 10)),
            "PAGE, defensive": (replace(small, importance="DefensiveSampling(mode='per-decision')"), (24, 15, 10)),
            "PAGE, Hessian": (replace(small, importance="HessianVector()"), (24, 15, 10)),
        }
        for name, (way, large_batches) in ways.items():
            for large_batch, step_size in product(large_batches, (5e-3, 1e-2, 2e-2)):
                each = replace(way, large_batch=large_batch, step_size=step_size)
                yield f"{name}, N = {large_batch}, η = {step_size:g}", each
    else:
        shared = replace(attacked, env="LunarLander-v3", attack="AvgZero", num_seeds=4, seed=100, trajectories=2000)
        choices = [(0.0, 45, 5e-3), (0.8, 15, 2e-3), (0.9, 15, 2e-3), (0.9, 15, 3e-3), (0.9, 10, 2e-3)]
        for momentum, large_batch, step_size in choices:
            each = replace(shared, momentum=momentum, large_batch=large_batch, step_size=step_size)
            yield f"β = {momentum:g}, N = {large_batch}, η = {step_size:g}", each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=LEVELS)
    parser.add_argument("--trajectories", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--settings", type=int, help="how many settings to compare; default: all")
    parser.add_argument("--output", type=Path, help="folder for the runs; by default they are not kept")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

    def say(progress: training.Progress) -> None:
        print(f"{progress.seconds:5.0f} s: {progress.done:.0%} done, {progress.label}", file=sys.stderr, flush=True)

    levels, cell = LEVELS[arguments.task], CELL[arguments.task]
    with tempfile.TemporaryDirectory() as folder:
        directories = {}
        for index, (name, config) in enumerate(islice(settings(arguments.task), arguments.settings)):
            directories[name] = (arguments.output or Path(folder)) / f"{arguments.task}-{index}"
            trajectories, seeds = arguments.trajectories or config.trajectories, arguments.seeds or config.num_seeds
            asked = replace(config, trajectories=trajectories, num_seeds=seeds)
            RunDirectory.create(directories[name], asked.resolved())
        training.resume_all(list(directories.values()), say)
        runs = {name: training.load(directory) for name, directory in directories.items()}
    print(f"| setting | {levels[0]} at | {levels[1]} at | end | worst seed's end |\n|---|---:|---:|---:|---:|")
    for name, run in runs.items():
        grid = np.arange(cell, np.min(run.trajectories[:, -1]) + 1, cell)
        cells = smooth_on_grid(run.trajectories, run.returns, grid)
        mean, ends = np.mean(cells, axis=0), np.mean(cells[:, grid > 0.9 * grid[-1]], axis=1)
        reached = [grid[np.argmax(mean >= level)] if np.any(mean >= level) else None for level in levels]
        shown = " | ".join("never" if each is None else f"{each:,}" for each in reached)
        print(f"| {name} | {shown} | {ends.mean():.0f} | {ends.min():.0f} |")


if __name__ == "__main__":
    main()
