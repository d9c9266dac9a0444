"""byzpg plot."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from byzpg.cli.console import check_plot_path, console, say
from byzpg.cli.inputs import WHAT, read_inputs
from byzpg.cli.parts import OwnModules


@dataclass(frozen=True)
class Plot:
    """Compare runs, sweeps and experiments in tables and plots.

    The learning curves of all runs are in one plot: the mean ± one standard deviation over seeds and, from three seeds
    on, the interquartile mean with bootstrap intervals. An experiment has a plot of its own.

    Example: byzpg plot runs/first sweeps/grid --output both.pdf
    """

    directories: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="PATH [PATH ...]", help_behavior_hint="(at least one)"),
    ]
    """Directories of runs, complete or not, of sweeps, or of `byzpg reproduce`; or result files, .npz, which
    `byzpg reproduce` has written."""
    output: Path = Path("curves.png")
    """File for the plot: .png, .svg or .pdf. If there are several plots, the name of each is added to it."""
    title: str = "Learning curves"
    """Title of the learning curves."""
    parts: OwnModules = ()

    def run(self) -> None:
        check_plot_path(self.output)
        if not self.directories:
            raise ValueError(f"plot needs at least one path: {WHAT}.")
        from byzpg.cli.labels import curves
        from byzpg.cli.tables import experiments_table, runs_table
        from byzpg.experiments import figures
        from byzpg.experiments.report import by_preset

        inputs, drawn = read_inputs(self.directories), {}
        if inputs.runs:
            console.print(runs_table(inputs.runs, with_paths=True))
            lines, common, unit = curves(inputs.runs)
            drawn["runs"] = figures.learning_curves(lines, self.title, subtitle=common, unit=unit)
        for results in inputs.results:
            console.print(experiments_table(results))
        for chapter in by_preset(inputs.results):
            for experiment in chapter.experiments.values():
                drawn[f"{experiment.name}-{chapter.preset}"] = figures.draw_experiment(experiment, chapter.runs)
        for name, figure in drawn.items():
            path = self.output if len(drawn) == 1 else self.output.with_stem(f"{self.output.stem}-{name}")
            figures.save(figure, path)
            say(f"Plot: {path}")
