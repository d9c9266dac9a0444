"""byzpg sweep."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.markup import escape
from rich.table import Table

from byzpg._install import install
from byzpg.cli.console import complain, console, counted, progress_line, say, this_command

if TYPE_CHECKING:
    import numpy as np

    from byzpg.experiments.sweeps import Cell, OnProgress, Outcome, Progress, Workers
    from byzpg.experiments.sweeps import Sweep as Grid


@dataclass(frozen=True)
class Sweep:
    """Run a grid of options, on this machine or on a Ray cluster.

    Every combination of options is a cell, and every cell is a run of its own. On CPUs it has one core for itself, so
    its result does not depend on where it is trained; on a GPU of this machine, cells that differ only in numbers train
    side by side. Finished cells are kept and skipped: a grid that was stopped continues, and a larger grid only trains
    what is new.

    Example: byzpg sweep grid.toml --workers 4
    """

    grid: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="GRID.toml")]
    """File with the grid. Top-level keys apply to every cell; lists under [grid] are swept, for example seed = [0, 1]
    and attack = ["AvgZero", "ALIE"]. A file may have several [[grid]] tables, each with its own cells."""
    engine: Literal["local", "ray"] = "local"
    """Engine that trains the cells: processes on this machine, or Ray."""
    address: str | None = None
    """Address of a Ray cluster: host:port, ray://host:port or auto. Default: a new Ray instance on this machine."""
    workers: int | None = None
    """Number of workers. Default: one per core. With GPUs: one on this machine, one per GPU on Ray."""
    retries: int = 2
    """Number of further attempts for a cell that failed or lost its worker."""
    directory: Path | None = None
    """Directory for runs, table and plot. Default: sweeps/ and the name of the grid file."""

    def run(self) -> None:
        self._check()
        import jax

        from byzpg.experiments import sweeps

        jax.config.update("jax_platforms", "cpu")  # the GPUs belong to the workers
        grid = sweeps.Sweep.load(self.grid)
        folder = Path("sweeps") / self.grid.stem if self.directory is None else self.directory
        left = [cell for cell in grid.cells if not sweeps.is_done(cell, folder / "runs")]
        done = len(grid.cells) - len(left)
        say(f"{counted(len(grid.cells), 'cell')}: {done} done, {len(left)} to do → {folder}")
        failed = self._train(left, folder) if left else {}
        self._conclude(grid, folder)
        if failed:
            for name, reason in failed.items():
                complain(f"{name}: {reason}", prefix="failed")
            attempts = counted(self.retries + 1, "attempt")
            say(f"{counted(len(failed), 'cell')} failed after {attempts}. Try again with: {this_command()}")
            sys.exit(1)

    def _check(self) -> None:
        if self.address is not None and self.engine != "ray":
            raise ValueError("--address is the address of a Ray cluster: add --engine ray.")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {self.workers}.")
        if self.retries < 0:
            raise ValueError(f"--retries must not be negative, got {self.retries}.")
        if self.engine == "ray" and find_spec("ray") is None:
            raise ValueError(f"--engine ray needs Ray: {install('ray')}.")

    def _train(self, cells: "Sequence[Cell]", folder: Path) -> dict[str, str]:
        """Train the cells, and return those that failed with the reason."""
        from byzpg.experiments import sweeps

        with _sweep_progress() as on_progress:
            workers = self._start_workers(folder, len(cells))
            try:
                return sweeps.run(cells, workers, self.retries, on_progress)
            finally:
                workers.close()

    def _start_workers(self, folder: Path, num_cells: int) -> "Workers":
        if self.engine == "local":
            from byzpg.engines.local import LocalWorkers

            return LocalWorkers(folder, self.workers, num_cells)
        from byzpg.engines.ray import RayWorkers

        return RayWorkers(folder, self.address, self.workers)

    def _conclude(self, grid: "Grid", folder: Path) -> None:
        """Print a table by group; save a table by cell, and the plot."""
        from byzpg.cli.tables import report_diverged
        from byzpg.experiments import figures, sweeps

        groups = sweeps.outcomes(grid.groups, folder / "runs")
        if not groups:
            return
        labelled = {_label(group, grid.telling): group for group in groups}
        console.print(_groups_table(groups, grid.telling))
        for label, group in labelled.items():
            report_diverged(group.diverged, label)
        table, plot = folder / "table.csv", folder / "sweep.png"
        sweeps.write_table(grid, folder / "runs", table)
        returns: Mapping[str, np.ndarray] = {label: group.final_returns for label, group in labelled.items()}
        axis = "return of the last tenth: one dot per seed, and their mean"
        figures.save(figures.dots(returns, self.grid.stem, axis), plot)
        say(f"Table: {table}")
        say(f"Plot: {plot}")


def _values(group: "Outcome", options: Sequence[str]) -> list[str]:
    return [str(group.cells[0].option(option)) for option in options]


def _label(group: "Outcome", options: Sequence[str]) -> str:
    return ", ".join(_values(group, options)) or group.cells[0].settings.algorithm


def _groups_table(groups: "Sequence[Outcome]", options: Sequence[str]) -> Table:
    """A row per group of cells that differ in the seed alone."""
    from byzpg.cli.tables import BEST, LAST_TENTH, WEIGHT, percent, spread, summary_table
    from byzpg.experiments.statistics import significant

    several = any(len(group.final_returns) > 1 for group in groups)
    table = summary_table(options, ["seeds", LAST_TENTH, BEST, WEIGHT], several_seeds=several)
    for group in groups:
        returns = group.final_returns
        numbers = (f"{len(returns)}", spread(returns), significant(group.best), percent(group.attacker_weight))
        table.add_row(*map(escape, _values(group, options)), *numbers)
    return table


@contextmanager
def _sweep_progress() -> "Iterator[OnProgress]":
    """Show how far the grid is. After Ctrl-C, the workers end with their checkpoints."""
    on_stop = "Stopping after the blocks of iterations that are under way"
    with progress_line(first="starting workers", on_stop=on_stop, continue_with=this_command()) as show:

        def on_progress(progress: "Progress") -> None:
            if progress.news:
                say(progress.news)
            failed = f", {progress.failed} failed" if progress.failed else ""
            text = f"{progress.finished} of {counted(progress.total, 'cell')}{failed}, {progress.running} running"
            ended = progress.finished + progress.failed == progress.total
            show(progress.done, text, seconds=progress.seconds, ended=ended)

        yield on_progress
