"""Does it learn? CartPole-v1, 13 agents, on fresh seeds: DecByzPG and plain averaging under the paper's three attacks.

    python benchmarks/learning.py                 # 10 seeds, 8,000 trajectories per agent: half an hour on two cores
    python benchmarks/learning.py --num-seeds 2 --trajectories 1500

Writes docs/results/learning.png and learning.npz (returns [seed, cell] of every run, in cells of 50 trajectories), and
prints the table of docs/results/learning.md. The tuned preset was chosen on other seeds: 0–3, 100–103, 300–339 and
5000–5199.
"""

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from byzpg import Config, figures, statistics, train
from byzpg.files import write_atomically

RESULTS = Path(__file__).parent.parent / "docs" / "results"
CELL = 50


def runs(num_seeds: int, seed: int, trajectories: int) -> dict[str, Config]:
    """Every curve and its training."""
    shared = Config(num_seeds=num_seeds, seed=seed, trajectories=trajectories)
    robust = {attack: replace(shared, attack=attack) for attack in ("RandomAction", "LargeNoise", "AvgZero")}
    plain = {attack: replace(robust[attack], algorithm="Dec-PAGE-PG") for attack in ("LargeNoise", "AvgZero")}
    honest = replace(shared, preset="script", num_byzantine=0)
    return {
        **{f"DecByzPG, {attack}": config for attack, config in robust.items()},
        **{f"Dec-PAGE-PG, {attack}": config for attack, config in plain.items()},
        "script preset, all honest": honest,
    }


def row(name: str, cells: np.ndarray, liars: float, seconds: float) -> str:
    """What the claims are about: the mean over seeds of returns [seed, cell]."""
    mean = cells.mean(axis=0)
    mean = mean[np.isfinite(mean)]

    def reaches(level: float) -> str:
        reached = np.flatnonzero(mean >= level)
        return f"{CELL * (reached[0] + 1):,}" if len(reached) else "never"

    late = mean[1500 // CELL :]
    least = f"{late.min():.0f}" if len(late) else "–"
    weight = f"{liars:.1%}" if np.isfinite(liars) else "–"
    return (
        f"| {name} | {reaches(400)} | {reaches(475)} | {least} | {mean.max():.0f} | {mean[-5:].mean():.0f} "
        f"| {weight} | {seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seeds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--trajectories", type=int, default=8000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    print("| run | 400 at | 475 at | least after 1,500 | best | last 250 | liars' weight | seconds |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    grid = np.arange(CELL, arguments.trajectories + 1, CELL)
    curves, kept = [], {"trajectories": grid}
    for name, config in runs(arguments.num_seeds, arguments.seed, arguments.trajectories).items():
        started = time.perf_counter()
        run = train(config)
        cells = statistics.smooth_on_grid(run.trajectories, run.returns, grid)
        liars = float(np.mean(run.metrics["byzantine_weight"])) if run.settings.num_byzantine else np.nan
        print(row(name, cells, liars, time.perf_counter() - started), flush=True)
        kept[name] = cells.astype(np.float32)
        known = np.all(np.isfinite(cells), axis=0)
        curves.append(figures.Curve(name, grid[known], cells[:, known]))
    write_atomically(arguments.results / "learning.npz", lambda file: np.savez_compressed(file, **kept))
    title = "CartPole-v1, 13 agents, 3 of them Byzantine (script preset: none)"
    figures.save(figures.learning_curves(curves, title, reference_level=475), arguments.results / "learning.png")


if __name__ == "__main__":
    main()
