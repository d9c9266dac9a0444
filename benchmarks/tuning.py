"""The choice of the tuned presets: step sizes and batch sizes, on seeds that no figure uses.

    python benchmarks/tuning.py cartpole --output tuned       # 20 seeds from 0, 2,000 trajectories: minutes on a GPU
    python benchmarks/tuning.py lunarlander --output tuned    # 4 seeds from 100, 5,400 trajectories: GPUs only
    python benchmarks/tuning.py cartpole --settings 2 --seeds 1 --trajectories 60    # a quick check

ByzPG represents both methods: with large batches alone, they differ in who computes the average, not in its value. For
each setting, the table gives the trajectories per agent at which the mean over seeds reaches two levels, and the mean
of the last four cells, over all seeds and for the worst seed. Baseline: the first row of each table, whose batch and
step size are nearest to the paper's.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import jax
import numpy as np

from byzpg import Config, training
from byzpg.experiments.statistics import smooth_on_grid
from byzpg.runs import RunDirectory

LEVELS = {"cartpole": (450, 475), "lunarlander": (200, 250)}
CELL = {"cartpole": 50, "lunarlander": 100}


def settings(task: str) -> Iterator[tuple[str, Config]]:
    """The settings to compare, each a name and a configuration."""
    attacked = Config(algorithm="ByzPG", num_byzantine=3)
    if task == "cartpole":
        for large_batch in (15, 8, 4):
            shared = replace(attacked, num_seeds=20, seed=0, trajectories=2000, large_batch=large_batch)
            for step_size in (3e-3, 5e-3, 1e-2, 2e-2):
                each, name = replace(shared, step_size=step_size), f"N = {large_batch}, η = {step_size:g}"
                yield f"{name}, RandomAction", replace(each, attack="RandomAction")
                yield f"{name}, AvgZero", replace(each, attack="AvgZero")
                yield f"{name}, honest, K = 13", replace(each, num_byzantine=0)
                yield f"{name}, honest, K = 5", replace(each, num_agents=5, num_byzantine=0)
                yield f"{name}, K = 1", replace(each, algorithm="PAGE-PG", num_byzantine=None)
    else:
        shared = replace(attacked, env="LunarLander-v3", attack="AvgZero", num_seeds=4, seed=100, trajectories=5400)
        for step_size in (3e-3, 4e-3, 5e-3, 7e-3):
            for rule in ("NNM(TrimmedMean())", "RFA()"):
                yield f"η = {step_size:g}, {rule}, AvgZero", replace(shared, step_size=step_size, aggregator=rule)


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
        mean, ends = np.mean(cells, axis=0), np.mean(cells[:, -4:], axis=1)
        reached = [grid[np.argmax(mean >= level)] if np.any(mean >= level) else None for level in levels]
        shown = " | ".join("never" if each is None else f"{each:,}" for each in reached)
        print(f"| {name} | {shown} | {ends.mean():.0f} | {ends.min():.0f} |")


if __name__ == "__main__":
    main()
