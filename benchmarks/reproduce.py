"""The time of whole grids of experiments, compilation included: `byzpg reproduce` without its pictures.

    python benchmarks/reproduce.py cartpole                      # 24 cells of 10 seeds
    python benchmarks/reproduce.py lunarlander --output results  # keeps lunarlander-tuned.npz for `byzpg report`
    python benchmarks/reproduce.py lunarlander --without SVRPG N-PG-IGT FedPG-BR  # the paper's 190 runs
    python benchmarks/reproduce.py cartpole --seeds 1 --trajectories 30    # a quick check

It prints one line: the number of runs (cells × seeds), the seconds in total and until the first block of iterations
ended, the environment steps per second, and the ratio to the baseline. Baseline: the upper bound that the paper's
appendix gives, 5 hours per experiment on CartPole and 15 on LunarLander on four cores of a Xeon E3-1284L v4; we count
one line of a figure as one experiment. With a preset other than `tuned`, and with all algorithms, it first prints how
far our curves are from the published ones.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from byzpg import training
from byzpg.experiments.paper import LUNARLANDER, Scope, create_runs, grid
from byzpg.experiments.results import Results
from byzpg.experiments.summaries import comparisons
from byzpg.runs import provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--task")
    parser.add_argument("--preset", default="tuned")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--seed", type=int, default=2000)
    parser.add_argument("--trajectories", type=int)
    parser.add_argument("--without", nargs="+", default=(), help="algorithms to leave out; no results are kept then")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.without and arguments.output is not None:
        parser.error("--without leaves gaps in the figures: leave out --output.")
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    started, marks = time.perf_counter(), []

    def on_progress(progress: training.Progress) -> None:
        now = time.perf_counter() - started
        if not marks or now - marks[-1] > 10 or progress.done == 1:
            marks.append(now)
            text = f"{now:6.1f} s: {progress.done:.1%} done, {progress.label}return {progress.mean_return:.0f}"
            print(text, file=sys.stderr, flush=True)

    scope = Scope(arguments.preset, arguments.seeds, arguments.seed, arguments.trajectories)
    planned = grid(arguments.names, scope, arguments.task)
    if unknown := set(arguments.without) - {each.algorithm for each in planned.settings.values()}:
        parser.error(f"--without: these experiments have no {' and no '.join(sorted(unknown))}.")
    wanted = {name: each for name, each in planned.settings.items() if each.algorithm not in arguments.without}
    with tempfile.TemporaryDirectory() as folder:
        directories = create_runs(Path(folder), wanted)
        training.resume_all(directories, on_progress)
        seconds = time.perf_counter() - started
        runs = {directory.name: training.load(directory) for directory in directories}
    name = "-".join([*arguments.names, arguments.preset])
    if not arguments.without:
        given = {name: value for name, value in vars(arguments).items() if value != parser.get_default(name)}
        options = [f"--{name} {value}" for name, value in given.items() if name not in ("names", "output")]
        command = " ".join(["python benchmarks/reproduce.py", *arguments.names, *options])
        results = Results.of(planned, runs, {**provenance(), "command": command, "seconds": seconds})
        if arguments.preset != "tuned":  # which aims to learn faster than the published curves
            say_how_far_apart(results)
        if arguments.output is not None:
            arguments.output.mkdir(parents=True, exist_ok=True)
            results.save(arguments.output / f"{name}.npz")
    hours = sum(15 if run.settings.env == LUNARLANDER else 5 for run in runs.values())
    number = sum(run.settings.num_seeds for run in runs.values())
    steps = sum(np.nansum(run.metrics["environment_steps"]) for run in runs.values())
    print(
        f"{name}: {number} runs on {jax.devices()[0].device_kind}: {seconds:.1f} s in total, {marks[0]:.1f} s until "
        f"the first block ended, compilation included; {steps / 1e6:,.0f} M environment steps, "
        f"{steps / seconds / 1e6:.1f} M/s; up to {hours * 3600 / seconds:,.0f} × faster than the paper's bound"
    )


def say_how_far_apart(results: Results) -> None:
    """Print how far our curves are from the published ones."""
    for each in comparisons(results.experiments, results.runs):
        mean, spread = (
            np.interp(each.trajectories, each.result.progress, of(each.result.returns, axis=0))
            for of in (np.mean, np.std)
        )
        apart = np.abs(mean - each.returns)[each.trajectories > 0]
        within = np.mean(apart <= spread[each.trajectories > 0])
        place = f"{each.experiment.name}, {each.panel.title}, {each.cell.label}"
        print(
            f"{place}: {np.mean(apart):.1f} from the published mean, within our deviation at {within:.0%} of its points"
        )


if __name__ == "__main__":
    main()
