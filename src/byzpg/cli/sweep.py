"""The command that runs grids."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.markup import escape
from rich.table import Table

from byzpg.cli.console import console, errors, progress_line, say
from byzpg.engines.local import LocalWorkers
from byzpg.experiments import sweeps


@dataclass(frozen=True)
class SweepCommand:
    """Run a grid of options, every combination a run of its own, here or on a Ray cluster.

    Finished cells are kept and skipped, so that a grid that was stopped goes on, and a larger one does only what is
    new. A cell's result does not depend on where it runs: one device and one core each.
    """

    grid: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="GRID.toml")]
    """Options of all cells, and a table [grid] of lists: seed = [0, 1], attack = ["AvgZero", "ALIE"]. Several [[grid]]
    tables: all cells of each."""
    engine: Literal["local", "ray"] = "local"
    """Who trains: processes on this machine, or Ray."""
    address: str | None = None
    """Of a Ray cluster: host:port, ray://host:port or auto. Left out: a Ray of its own on this machine."""
    workers: int | None = None
    """Cells at a time. Left out: as many as there are cores or, on GPUs, one here and one per GPU on Ray."""
    retries: int = 2
    """How often a cell that failed, or lost its worker, is tried again."""
    directory: Path | None = None
    """Where runs, table and picture go. Left out: sweeps/ and the name of the grid's file."""

    def run(self) -> None:
        if self.address is not None and self.engine != "ray":
            raise ValueError("--address is that of a Ray cluster: add --engine ray.")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {self.workers}.")
        if self.retries < 0:
            raise ValueError(f"--retries must not be negative, got {self.retries}.")
        if self.engine == "ray" and find_spec("ray") is None:
            raise ValueError("--engine ray needs Ray: pip install 'byzpg[ray]'.")
        jax.config.update("jax_platforms", "cpu")  # the GPU is for workers
        sweep = sweeps.Sweep.load(self.grid)
        folder = Path("sweeps") / self.grid.stem if self.directory is None else self.directory
        runs = folder / "runs"
        left = [cell for cell in sweep.cells if not sweeps.is_done(cell, runs)]
        say(f"{_cells(len(sweep.cells))}: {len(sweep.cells) - len(left)} done, {len(left)} to do → {folder}")
        failed = self._train(left, folder) if left else {}
        self._conclude(sweep, folder)
        if failed:
            for name, reason in failed.items():
                errors.print(f"[red]failed:[/red] {escape(f'{name}: {reason}')}", highlight=False, soft_wrap=True)
            say(f"{_cells(len(failed))} failed, {self.retries + 1} times each. To try again: {_command()}")
            sys.exit(1)

    def _train(self, cells: list[sweeps.Cell], folder: Path) -> dict[str, str]:
        with _progress() as on_progress:
            workers = self._workers(folder, len(cells))
            try:
                return sweeps.run(cells, workers, self.retries, on_progress)
            finally:
                workers.close()

    def _workers(self, folder: Path, num_cells: int) -> sweeps.Workers:
        if self.engine == "local":
            return LocalWorkers(folder, self.workers, num_cells)
        from byzpg.engines.ray import RayWorkers

        return RayWorkers(folder, self.address, self.workers)

    def _conclude(self, sweep: sweeps.Sweep, folder: Path) -> None:
        """The table, by cell in a file and by group here, and the picture."""
        runs, telling = folder / "runs", sweep.telling
        groups = sweeps.outcomes(sweep.groups, runs)
        if not groups:
            return
        table = Table(title="Return of honest agents: mean ± standard deviation over seeds")
        for column in (*telling, "seeds", "last tenth", "best", "weight of attackers"):
            table.add_column(column, justify="left" if column in telling else "right")
        rows = {}
        for group in groups:
            options = [str(group.cells[0].option(option)) for option in telling]
            late = group.final_returns
            weight = "–" if isnan(group.weight) else f"{group.weight:.1%}"
            numbers = (f"{len(late)}", f"{late.mean():.0f} ± {late.std():.0f}", f"{group.best:.0f}", weight)
            table.add_row(*map(escape, options), *numbers)
            rows[", ".join(options) or group.cells[0].settings.algorithm] = late
        console.print(table)
        for label, group in zip(rows, groups, strict=True):
            if group.diverged:
                say(f"Diverged: seed {', '.join(map(str, group.diverged))} of {label}.")
        sweeps.write_table(sweep, runs, folder / "table.csv")
        from byzpg.experiments import figures

        picture = folder / "sweep.png"
        figures.save(
            figures.dots(rows, self.grid.stem, "return of the last tenth; a dot per seed, and their mean"), picture
        )
        say(f"Table: {folder / 'table.csv'}")
        say(f"Picture: {picture}")


def _cells(number: int) -> str:
    return f"{number} cell{'s' * (number != 1)}"


def _command() -> str:
    return shlex.join(["byzpg", *sys.argv[1:]])


@contextmanager
def _progress() -> Iterator[sweeps.OnProgress]:
    """How far the whole grid is; stopped, workers end with their checkpoints."""
    words = "Stopping after the blocks of iterations that are under way"
    with progress_line(_command(), "starting workers", words) as show:

        def on_progress(progress: sweeps.Progress) -> None:
            if progress.news:
                say(progress.news)
            bad = f", {progress.failed} failed" if progress.failed else ""
            text = f"{progress.finished} of {_cells(progress.total)}{bad}, {progress.running} running"
            show(progress.done, text, progress.seconds, progress.finished + progress.failed == progress.total)

        yield on_progress


COMMANDS = (Annotated[SweepCommand, tyro.conf.subcommand("sweep")],)
