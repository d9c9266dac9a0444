"""byzpg plot."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from byzpg.cli.console import check_plot_path, console, say
from byzpg.cli.parts import OwnModules


@dataclass(frozen=True)
class Plot:
    """Compare runs in a table and a plot of their learning curves.

    The plot shows the mean ± one standard deviation over seeds and, from three seeds on, the interquartile mean with
    bootstrap intervals.

    Example: byzpg plot runs/first runs/second --output both.pdf
    """

    directories: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="PATH [PATH ...]", help_behavior_hint="(at least one)"),
    ]
    """Directories of runs, complete or not."""
    output: Path = Path("curves.png")
    """File for the plot: .png, .svg or .pdf."""
    title: str = "Learning curves"
    """Title of the plot."""
    parts: OwnModules = ()

    def run(self) -> None:
        check_plot_path(self.output)
        if not self.directories:
            raise ValueError("plot needs the directory of at least one run.")
        from byzpg import training
        from byzpg.cli.labels import curves
        from byzpg.cli.tables import runs_table
        from byzpg.experiments import figures

        runs = {directory: training.load(directory) for directory in self.directories}
        console.print(runs_table(runs, with_paths=True))
        drawn, common, unit = curves(runs)
        figures.save(figures.learning_curves(drawn, self.title, subtitle=common, unit=unit), self.output)
        say(f"Plot: {self.output}")
