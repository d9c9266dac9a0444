"""Grids of runs from a file: every combination of options is a cell, and a cell is one run on one device.

`Workers` train the cells; `byzpg.engines` has several kinds. On CPUs, the result of a cell does not depend on the kind.
"""

import csv
import json
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from io import StringIO
from itertools import pairwise, product
from math import isnan, nan
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from byzpg._files import write_atomically
from byzpg.config import Config, Settings, present_name
from byzpg.experiments.paper import run_name
from byzpg.experiments.results import Result
from byzpg.experiments.summaries import attacker_weight, best_return, final_returns
from byzpg.robust.components import Component, without_numbers
from byzpg.runs import Run, RunDirectory

# Seconds to wait for workers before reporting progress, where the caller may stop the sweep.
REPORT_SECONDS = 0.2


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    name: str  # of its directory
    settings: Settings

    @property
    def program(self) -> Any:
        """What the compiled program depends on; cells with equal values share it, whatever their numbers are."""
        return without_numbers(self.settings.federation())[0], self.settings.num_seeds

    @property
    def group(self) -> Settings:
        """The settings without the seed, which are equal for the cells of a group."""
        return replace(self.settings, seed=0)

    def option(self, name: str) -> Any:
        """The value of an option, in its shortest notation."""
        value = getattr(self.settings, name)
        return str(value).removesuffix("()") if isinstance(value, Component) else value


@dataclass(frozen=True)
class Sweep:
    """The cells of a grid, without repetition."""

    options: tuple[str, ...]  # the options that vary
    cells: tuple[Cell, ...]

    @classmethod
    def load(cls, path: Path) -> "Sweep":
        """Read a grid from a .toml file.

        Top-level keys apply to every cell; lists under `[grid]`, or under several `[[grid]]`, are swept.

        Raises:
            ValueError: If the file cannot be read, or a cell of it is wrong; the message names the cell.
        """
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"grid {path} cannot be read: {error}") from None
        return cls.of(values, str(path))

    @classmethod
    def of(cls, values: Mapping[str, Any], source: str) -> "Sweep":
        """Make a grid from plain data. Every cell is resolved and checked; equal cells are merged."""
        shared = {option: value for option, value in values.items() if option != "grid"}
        Config.of(shared, source)
        given: Any = values.get("grid")
        tables: list[Any] = given if isinstance(given, list) and given else [given]
        for table in tables:
            _check_table(table, shared, source)
        cells: dict[str, Cell] = {}
        for table in tables:
            for combination in product(*table.values()):
                chosen = dict(zip(table, combination, strict=True))
                try:
                    settings = Config.of(shared | chosen, source).resolved()
                except ValueError as error:
                    which = ", ".join(f"{option} = {value!r}" for option, value in chosen.items())
                    raise ValueError(f"{source}, cell {which}: {error}") from None
                cell = cells.setdefault(run_name(settings), Cell(run_name(settings), settings))
                if cell.settings != settings:
                    raise ValueError(f"{source}: two cells have the name {cell.name}: put one into another grid.")
        options = dict.fromkeys(present_name(option, {*shared, *table}) for table in tables for option in table)
        sweep = cls(tuple(options), tuple(cells.values()))
        for group in sweep.groups:
            _check_seeds(group, source)
        return sweep

    @property
    def groups(self) -> list[list[Cell]]:
        """The cells in groups; the cells of a group differ in the seed alone."""
        found: dict[Settings, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.group, []).append(cell)
        return list(found.values())

    @property
    def telling(self) -> list[str]:
        """The options in which groups differ."""
        return [
            option
            for option in self.options
            if option != "seed" and len({str(cell.option(option)) for cell in self.cells}) > 1
        ]


def _check_table(table: object, shared: Mapping[str, Any], source: str) -> None:
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{source} needs a table [grid] of options and lists of their values: seed = [0, 1, 2].")
    firsts = {name: choices[0] if isinstance(choices, list) and choices else None for name, choices in table.items()}
    Config.of(firsts, f"{source}, [grid]")  # refuses unknown options
    for option, choices in table.items():
        if not isinstance(choices, list) or not choices:
            raise ValueError(f"{source}, [grid]: {option} must be a list of at least one value, got {choices!r}.")
        if option in shared:
            raise ValueError(f"{source}: {option} is in [grid] and also an option of all cells: leave one out.")
        twice = [text for text, number in Counter(map(repr, choices)).items() if number > 1]
        if twice:
            raise ValueError(f"{source}, [grid]: {option} has {twice[0]} more than once: leave the others out.")


def _check_seeds(group: Sequence[Cell], source: str) -> None:
    """Check that no two cells of a group share a seed, so that a mean over them counts each seed once."""
    ordered = sorted(cell.settings.seed for cell in group)
    size = group[0].settings.num_seeds
    for one, other in pairwise(ordered):
        if other < one + size:
            raise ValueError(
                f"{source}: cells with seed = {one} and seed = {other} overlap, as each has num_seeds = {size} seeds "
                "from there on: set num_seeds = 1, or seeds further apart."
            )


# Finished cells


def is_done(cell: Cell, folder: Path) -> bool:
    """Whether the run of the cell is complete.

    Raises:
        ValueError: If its directory holds something else, or broken files.
    """
    path = folder / cell.name
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    try:
        kept = RunDirectory.open(path)
        if kept.settings() != cell.settings:
            raise ValueError("its config.json is not the one that its name stands for.")
        return kept.complete and _fits(kept.read_results())
    except ValueError as error:
        raise ValueError(f"{path} is broken: {error} Remove it, and the cell is trained again.") from None


def _fits(run: Run) -> bool:
    shape = (run.settings.num_seeds, run.progress.shape[1])
    if any(values.shape != shape for values in run.metrics.values()) or "return_mean" not in run.metrics:
        raise ValueError("its results have other shapes than its config.json says.")
    return True


# Workers, and the order of cells


@dataclass(frozen=True)
class Event:
    """News about a cell: how much of it is trained, or how its training ended."""

    cell: Cell
    kind: Literal["training", "finished", "failed", "lost"]  # lost: its worker died
    share: float = 0.0
    reason: str = ""


class Workers(Protocol):
    """Workers that train cells. A finished cell is in its run directory."""

    @property
    def together(self) -> bool:
        """Whether a worker trains all cells of a program side by side: a GPU has room for many."""
        ...

    def idle(self) -> list[int]:
        """The numbers of the workers that wait for a cell."""
        ...

    def submit(self, worker: int, cells: Sequence[Cell]) -> None:
        """Give cells of one program to an idle worker: one cell, unless it trains them together."""
        ...

    def wait(self, seconds: float) -> Event | None:
        """The next event, or None if none happens within these seconds."""
        ...

    def close(self) -> None:
        """End all workers, even if they are training."""
        ...


@dataclass(frozen=True)
class Progress:
    """How far a sweep is."""

    finished: int  # cells
    failed: int  # cells that will not be tried again
    total: int  # cells
    running: int  # cells
    done: float  # share of all the work, as if all cells took equally long
    seconds: float
    news: str = ""  # a failure that has just happened


OnProgress = Callable[[Progress], None]


def run(cells: Sequence[Cell], workers: Workers, retries: int, on_progress: OnProgress) -> dict[str, str]:
    """Train all cells. A worker stays with the program that it has compiled as long as cells of it are left.

    Args:
        cells: The cells to train.
        workers: Who trains them.
        retries: How often a cell that failed, or lost its worker, is tried again. A failure of several cells together
            does not count: each of them is then tried alone.
        on_progress: Called after every event; what it raises stops the sweep.

    Returns:
        The names of the cells that failed in every attempt, with the reason.
    """
    started = time.monotonic()
    waiting, running = list(cells), dict[str, float]()
    attempts, failed, finished = Counter[str](), dict[str, str](), 0
    latest: dict[int, Any] = {}  # the program of each worker
    together, alone = set[str](), set[str]()  # cells that train with others, and those that no longer do

    def report(news: str = "") -> None:
        over = finished + len(failed)
        done = (over + sum(running.values())) / max(1, len(cells))
        on_progress(
            Progress(
                finished=finished,
                failed=len(failed),
                total=len(cells),
                running=len(running),
                done=done,
                seconds=time.monotonic() - started,
                news=news,
            )
        )

    while waiting or running:
        for worker in workers.idle():
            if waiting:
                first = _next(waiting, latest.get(worker), set(latest.values()))
                given = [first]
                if workers.together and first.name not in alone:
                    given = [cell for cell in waiting if cell.program == first.program and cell.name not in alone]
                (together if len(given) > 1 else alone).update(cell.name for cell in given)
                latest[worker] = first.program
                for cell in given:
                    waiting.remove(cell)
                    attempts[cell.name] += 1
                    running[cell.name] = 0.0
                workers.submit(worker, given)
        event = workers.wait(REPORT_SECONDS)
        news = ""
        if event is not None:
            name = event.cell.name
            if event.kind == "training":
                running[name] = event.share
            else:
                del running[name]
            if event.kind == "finished":
                finished += 1
            if event.kind in ("failed", "lost") and name in together:
                # Another cell may be the cause, so this was no attempt of its own.
                together.remove(name)
                alone.add(name)
                del attempts[name]
                waiting.append(event.cell)
                news = f"{name} failed together with others, and will be tried again alone: {event.reason}"
            elif event.kind in ("failed", "lost"):
                again = attempts[name] <= retries
                if again:
                    waiting.append(event.cell)  # at the end, so that the others are trained before it fails again
                else:
                    failed[name] = event.reason
                verb = "failed" if event.kind == "failed" else "lost its worker"
                then = "will be tried again" if again else "given up"
                news = f"{name} {verb} (attempt {attempts[name]} of {retries + 1}, {then}): {event.reason}"
        report(news)
    return failed


def _next(waiting: Sequence[Cell], own: Any, taken: Set[Any]) -> Cell:
    """A cell of the program `own` if any, else of a program that no worker has, else of the most common one."""
    number = Counter(cell.program for cell in waiting)
    free = [program for program in number if program not in taken]
    chosen = own if own in number else free[0] if free else number.most_common(1)[0][0]
    return next(cell for cell in waiting if cell.program == chosen)


# Results


@dataclass(frozen=True, eq=False)
class Outcome:
    """The numbers of one cell, or of a group with the seeds of all its cells; `summaries` defines them."""

    cells: tuple[Cell, ...]
    trajectories: int  # per agent, of the longest cell; of PPO, steps
    final_returns: np.ndarray  # [seed]
    best: float  # the mean over cells
    attacker_weight: float  # the mean over cells
    diverged: tuple[int, ...]  # seeds

    @classmethod
    def of(cls, cells: Sequence[Cell], runs: Sequence[Run]) -> "Outcome":
        results = [Result.of(run) for run in runs]
        weights = [weight for result in results if not isnan(weight := attacker_weight(result))]
        return cls(
            cells=tuple(cells),
            trajectories=max(int(np.max(run.progress)) for run in runs),
            final_returns=np.concatenate([final_returns(result) for result in results]),
            best=float(np.mean([best_return(result) for result in results])),
            attacker_weight=float(np.mean(weights)) if weights else nan,
            diverged=tuple(seed for run in runs for seed in run.diverged),
        )


def outcomes(groups: Iterable[Sequence[Cell]], folder: Path) -> list[Outcome]:
    """The outcome of the finished cells of each group; groups without one are left out."""
    found = []
    for group in groups:
        done = [cell for cell in group if RunDirectory(folder / cell.name).complete]
        if done:
            found.append(Outcome.of(done, [RunDirectory(folder / cell.name).read_results() for cell in done]))
    return found


def write_table(sweep: Sweep, folder: Path, path: Path) -> None:
    """Write a .csv file with a line per finished cell: its run, the options that vary, and its numbers.

    A number that is not known, such as the weight of attackers where there are none, is left empty.
    """
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = ("trajectories", "last_tenth", "last_tenth_deviation", "best", "weight_of_attackers", "diverged")
    writer.writerow(["run", *sweep.options, *numbers])
    for outcome in outcomes([[cell] for cell in sweep.cells], folder):
        cell = outcome.cells[0]
        chosen = [cell.option(option) for option in sweep.options]
        late = outcome.final_returns
        about = (float(np.mean(late)), float(np.std(late)), outcome.best, outcome.attacker_weight)
        shown = ["" if np.isnan(number) else repr(number) for number in about]
        listed = [json.dumps(value) if isinstance(value, tuple) else value for value in chosen]
        writer.writerow([cell.name, *listed, outcome.trajectories, *shown, " ".join(map(str, outcome.diverged))])
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))
