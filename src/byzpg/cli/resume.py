"""byzpg resume."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Annotated

import numpy as np
import tyro

from byzpg import envs
from byzpg.cli.console import console, counted, say
from byzpg.cli.hardware import HardwareOptions, follows_another_process, training_progress
from byzpg.cli.labels import curves, federation, method
from byzpg.cli.parts import OwnModules
from byzpg.config import Settings
from byzpg.federation.devices import Hardware
from byzpg.logs import LogName, check_logs
from byzpg.runs import Run, RunDirectory

Logs = Annotated[tuple[LogName, ...], tyro.conf.arg(help_behavior_hint="")]

COMPARISON = "plain-averaging"  # the folder, in a run's directory, of the run it is compared with


@dataclass(frozen=True)
class Resume:
    """Continue a run from its last checkpoint, or extend a finished one.

    The result is the same as if the run had never stopped, or had been longer from the start. If the step size decays
    over the run, the extension follows the schedule of the new length from where it begins.

    Example: byzpg resume runs/CartPole-v1-DecByzPPO-AvgZero-1
    """

    directory: tyro.conf.Positional[Path]
    """Directory of the run."""
    log: Logs = ()
    """Logs to write as well, or to continue: see `byzpg train --help`. What a log lacks is written first."""
    trajectories: int | None = None
    """New number of trajectories per agent, to which a finished run is extended; those that are done count. Default:
    the run keeps its length."""
    steps: int | None = None
    """New number of environment steps per agent, in place of trajectories for algorithms with a critic. Default: the
    run keeps its length."""
    parts: OwnModules = ()
    hardware: HardwareOptions = field(default_factory=Hardware)

    def run(self) -> None:
        if not follows_another_process(self.hardware):
            check_logs(self.log)
            for directory in _with_comparison(self.directory):
                self._extend(directory)
            finish(self.directory, self.log)

    def _extend(self, directory: Path) -> None:
        from byzpg import training
        from byzpg.experiments.paper import run_name

        before = RunDirectory.open(directory).settings()
        if (self.trajectories or self.steps) and run_name(before) == directory.name:
            raise ValueError(
                f"{directory} belongs to a sweep or an experiment, and its name stands for its length: set the length "
                "there, or copy the directory to another name first."
            )
        if not training.extend(directory, trajectories=self.trajectories, steps=self.steps):
            return
        new = self.steps if before.has_critic else self.trajectories
        say(f"{directory} is extended from {before.length:,} to {new:,} {before.unit} per agent.")
        if before.decay:
            say(
                f"  Its step size decays by {before.decay:.0%} over the run: it now goes up again, to where one run of "
                f"{new:,} {before.unit} would be. The result is not that of such a run."
            )


def finish(path: Path, log: Sequence[LogName] = ()) -> None:
    """Train a run, and the run it is compared with, to the end; then show how they went."""
    from byzpg import training

    directories = _with_comparison(path)
    planned = {directory: RunDirectory.open(directory).settings() for directory in directories}
    # Matplotlib takes most of a second to import, and training leaves Python idle.
    drawing = Thread(target=import_module, args=("byzpg.experiments.figures",), daemon=True)
    with training_progress(shlex.join(["byzpg", "resume", str(path)])) as show:

        def on_progress(progress: training.Progress) -> None:
            if drawing.ident is None:
                drawing.start()
            show(progress)

        _announce(planned)
        training.resume_all(directories, on_progress, log)
    _conclude({directory: training.load(directory) for directory in directories})


def _with_comparison(path: Path) -> list[Path]:
    comparison = path / COMPARISON
    return [path, comparison] if comparison.exists() else [path]


def _announce(planned: Mapping[Path, Settings]) -> None:
    settings = next(iter(planned.values()))
    amount = f"{counted(settings.num_seeds, 'seed')}, {settings.length:,} {settings.unit} per agent"
    say(f"Training on {settings.env}: {federation(settings)}; {amount}; preset {settings.preset}")
    for directory, each in planned.items():
        say(f"  {method(each)} → {directory}")
    complete = all(RunDirectory(directory).complete for directory in planned)
    if not console.is_terminal and not complete:  # a terminal shows a line of progress
        say("Compiling (later starts find the program in a cache) …")


def _conclude(runs: Mapping[Path, Run]) -> None:
    """Print the summary and save the learning curves of a run and of the run it is compared with."""
    from byzpg.cli.tables import report_diverged, runs_table
    from byzpg.experiments import figures

    path, settings = next((path, run.settings) for path, run in runs.items())
    console.print()
    console.print(runs_table(runs, with_paths=False))
    console.print()
    for directory, run in runs.items():
        report_diverged(run.diverged, directory, "Try a smaller --step-size, or a cap on the importance weights.")
    _compare(runs)
    plot = path / "curves.png"
    solved = envs.make(settings.env).reward_threshold
    title = f"{settings.env}, {federation(settings)}"
    drawn, common, unit = curves(runs)
    figure = figures.learning_curves(
        drawn, title, subtitle=common, reference_level=solved, reference_name="counts as solved", unit=unit
    )
    figures.save(figure, plot)
    say(f"Learning curves:  {plot}")
    say(f"Watch it play:    {shlex.join(['byzpg', 'play', str(path)])}")
    say(f"Load in Python:   byzpg.load({str(path)!r})")


def _compare(runs: Mapping[Path, Run]) -> None:
    """Say in one sentence how a run ended next to plain averaging."""
    from byzpg.experiments.results import Result
    from byzpg.experiments.statistics import significant
    from byzpg.experiments.summaries import final_returns

    ends = [float(np.mean(final_returns(Result.of(run)))) for run in runs.values()]
    if len(ends) == 2 and np.all(np.isfinite(ends)):
        settings = next(iter(runs.values())).settings
        ours, plain = (significant(end, *ends) for end in ends)
        attackers = f"{settings.num_attackers} of {settings.num_agents} agents attacking"
        say(f"With {attackers}, {settings.algorithm} ends at {ours} and plain averaging at {plain}.")
        console.print()
