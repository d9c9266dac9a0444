"""Does DecByzPG learn on our lander as it learns on EnvPool's?

    python benchmarks/landers.py train --env LunarLander-v3 --trajectories 8000            # on a GPU
    python benchmarks/landers.py train --env envpool:LunarLander-v3 --trajectories 2250    # on two cores
    python benchmarks/landers.py compare                                                   # the table and the picture

The federation has 13 agents, of which 3 attack (AvgZero), and three seeds. Baseline: the same training on EnvPool,
which uses Box2D. `train` writes docs/results/landers-….npz with returns [seed, iteration]; `--results FOLDER` (before
the command) writes elsewhere.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from byzpg import Config, train
from byzpg._files import write_atomically
from byzpg.config import ADAM_BEHIND_RULE
from byzpg.experiments.paper import UNDECAYED

RESULTS = Path(__file__).parent.parent / "docs" / "results"
ENVS = ("LunarLander-v3", "envpool:LunarLander-v3")
NUM_SEEDS, FIRST_SEED = 3, 100


def kept_at(results: Path, env: str) -> Path:
    return results / f"landers-{'envpool' if ':' in env else 'jax'}.npz"


def run(env: str, trajectories: int, results: Path) -> None:
    started = time.perf_counter()

    def say(progress) -> None:
        print(
            f"{progress.progress} trajectories per agent, return {progress.mean_return:.0f}, "
            f"{time.perf_counter() - started:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    settings = ADAM_BEHIND_RULE | UNDECAYED | {"large_batch": 45, "step_size": 3e-3}
    shared = Config(attack="AvgZero", num_seeds=NUM_SEEDS, seed=FIRST_SEED, **settings)
    config = replace(shared, env=env, trajectories=trajectories)
    done = train(config, on_progress=say)
    arrays = {
        "trajectories": done.trajectories[0],  # p = 1
        "returns": done.returns.astype(np.float32),
        "seconds": np.float32(time.perf_counter() - started),
        "steps": np.sum(done.metrics["environment_steps"], dtype=np.float64),
        "device": np.array(jax.devices()[0].device_kind),
    }
    write_atomically(kept_at(results, env), lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))


def compare(results: Path) -> None:
    from byzpg.experiments import figures

    curves, last = [], 10**9
    for env in ENVS:
        with np.load(kept_at(results, env)) as arrays:
            curves.append(figures.Curve(env, arrays["trajectories"], arrays["returns"]))
            last = min(last, int(arrays["trajectories"][-1]))
            print(
                f"{env}: {arrays['trajectories'][-1]:,} trajectories per agent, {arrays['steps'] / 1e6:.0f} M steps, "
                f"{arrays['seconds']:.0f} s on {arrays['device']}\n"
            )
    print("| trajectories per agent | ours in JAX | EnvPool (Box2D) | apart, in standard deviations of a seed |")
    print("|---:|---:|---:|---:|")
    for share in np.linspace(0.1, 1.0, 10):
        at, cells = share * last, []
        for curve in curves:
            near = (curve.trajectories > at - 0.1 * last) & (curve.trajectories <= at + 1e-9)
            cells.append(curve.returns[:, near].mean(axis=1))
        means, stds = zip(*((cell.mean(), cell.std(ddof=1)) for cell in cells), strict=True)
        apart = abs(means[0] - means[1]) / np.sqrt((stds[0] ** 2 + stds[1] ** 2) / 2)
        texts = (f"{mean:.0f} ± {std:.0f}" for mean, std in zip(means, stds, strict=True))
        print(f"| {at - 0.1 * last:,.0f}–{at:,.0f} | {' | '.join(texts)} | {apart:.1f} |")
    title = "DecByzPG, 13 agents, 3 of them Byzantine (AvgZero)"
    picture = figures.learning_curves(curves, title, reference_level=200.0, reference_name="solved")
    figures.save(picture, results / "landers.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    commands = parser.add_subparsers(dest="command", required=True)
    trained = commands.add_parser("train")
    trained.add_argument("--env", choices=ENVS, required=True)
    trained.add_argument("--trajectories", type=int, required=True)
    commands.add_parser("compare")
    arguments = parser.parse_args()
    if arguments.command == "train":
        run(arguments.env, arguments.trajectories, arguments.results)
    else:
        compare(arguments.results)


if __name__ == "__main__":
    main()
