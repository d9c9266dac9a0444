"""byzpg report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from byzpg.cli.console import console, say
from byzpg.cli.inputs import WHAT, read_inputs
from byzpg.cli.parts import OwnModules

if TYPE_CHECKING:
    from byzpg.experiments.results import Results


@dataclass(frozen=True)
class Report:
    """Write an HTML report about runs, sweeps and experiments.

    The report is one self-contained file with figures, tables, commands and, for experiments of the paper, the
    differences from it.

    Example: byzpg report reproduction/fig2-tuned.npz --output fig2.html
    """

    results: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="PATH [PATH ...]", help_behavior_hint="(at least one)"),
    ]
    """Directories of runs, complete or not, of sweeps, or of `byzpg reproduce`; or result files, .npz, which
    `byzpg reproduce` has written."""
    output: Path = Path("report.html")
    """File for the report, .html."""
    figures: Path | None = None
    """Directory for the figures as separate .png, .svg and .pdf files. Default: they are not saved separately."""
    parts: OwnModules = ()

    def run(self) -> None:
        from byzpg.cli.labels import named_runs
        from byzpg.experiments.report import write_report
        from byzpg.experiments.results import results_of_runs

        if not self.results:
            raise ValueError(f"report needs at least one path: {WHAT}.")
        if self.output.suffix != ".html":
            raise ValueError(f"--output must end in .html, got {self.output}.")
        inputs = read_inputs(self.results)
        loaded = [*results_of_runs(named_runs(inputs.runs)[0], inputs.made_by), *inputs.results]
        with console.status("drawing"):
            write_report(loaded, self.output)
        if self.figures is not None:
            save_plots(loaded, self.figures)
        say(f"Report: {self.output}")


def save_plots(results: "Sequence[Results]", folder: Path) -> None:
    """Save every experiment as a plot, for the screen and for papers."""
    from byzpg.experiments import figures
    from byzpg.experiments.report import by_preset

    folder.mkdir(parents=True, exist_ok=True)
    for chapter in by_preset(results):
        for experiment in chapter.experiments.values():
            plot = folder / f"{experiment.name}-{chapter.preset}.png"
            figure = figures.draw_experiment(experiment, chapter.runs)
            for ending in (".png", ".svg", ".pdf"):
                figures.save(figure, plot.with_suffix(ending))
            say(f"Plot: {plot} (also .svg and .pdf)")
