"""Continuous control: does DecByzPG learn with Gaussian policies beside Byzantine agents?

    python benchmarks/continuous.py                                     # about six minutes on two cores
    python benchmarks/continuous.py --trajectories 40 --results /tmp    # a quick check

It trains on Pendulum-v1 (in JAX) and on a MuJoCo task of EnvPool, prints the table of docs/results/landers.md and
writes its pictures. Baseline: the return of the first iteration, that is, of the untrained policy.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from byzpg import Config, train
from byzpg.experiments import figures

RESULTS = Path(__file__).parent.parent / "docs" / "results"
RUNS = {
    "Pendulum-v1, 13 agents, 3 Byzantine (AvgZero)": Config(
        env="Pendulum-v1", attack="AvgZero", num_seeds=3, seed=200, trajectories=4000
    ),
    "envpool:InvertedPendulum-v5, 5 agents, 1 Byzantine (LargeNoise)": Config(
        env="envpool:InvertedPendulum-v5",
        num_agents=5,
        num_byzantine=1,
        attack="LargeNoise",
        num_seeds=3,
        seed=200,
        trajectories=1000,
        large_batch=20,
        switch_probability=1.0,
        step_size=1e-2,
        hidden=(32, 32),
        activation="tanh",
        discount=0.99,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, help="per agent, instead of 4,000 and 1,000")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the pictures")
    arguments = parser.parse_args()
    print("| run | first return | last tenth | trajectories per agent | seconds |")
    print("|---|---:|---:|---:|---:|")
    for name, config in RUNS.items():
        started = time.perf_counter()
        run = train(replace(config, trajectories=arguments.trajectories or config.trajectories))
        late = run.returns[:, run.trajectories[0] > 0.9 * np.max(run.trajectories)].mean(axis=1)  # p = 1
        print(
            f"| {name} | {run.returns[:, 0].mean():.0f} | {late.mean():.0f} ± {np.std(late, ddof=1):.0f} "
            f"| {np.max(run.trajectories):,} | {time.perf_counter() - started:.0f} |",
            flush=True,
        )
        picture = figures.learning_curves([figures.Curve("DecByzPG", run.trajectories, run.returns)], name)
        figures.save(picture, arguments.results / f"continuous-{run.settings.env.rpartition(':')[2]}.png")


if __name__ == "__main__":
    main()
