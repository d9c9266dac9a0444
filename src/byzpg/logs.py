"""What a run reports while it trains, iteration by iteration, and the logs that keep it for other programs.

A log lies in the directory of its run and is written together with the checkpoints. It knows which iterations it
holds, so a resumed run writes the missing ones, and none twice.
"""

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args
from uuid import uuid4

import numpy as np

from byzpg._files import write_atomically
from byzpg._install import install
from byzpg.config import Settings
from byzpg.federation.schedule import Timetable
from byzpg.robust.components import unknown
from byzpg.runs import Run

LogName = Literal["jsonl", "tensorboard", "wandb"]
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # which the extras with the names of the logs install


@dataclass(frozen=True, eq=False)
class Report:
    """One iteration of a run, of all seeds.

    With p < 1, every seed tosses its own coin, and seeds whose batch is of the other size wait. Of these, `took_part`
    is False and all else is as it was, with metrics that are NaN.
    """

    number: int  # how many reports came before; where all seeds take part, the iteration
    seeds: tuple[int, ...]
    took_part: np.ndarray  # [seed]
    iteration: np.ndarray  # [seed], from 0
    progress: np.ndarray  # [seed], trajectories or steps per agent, up to and including the iteration
    unit: Literal["trajectories", "steps"]  # of `progress`
    large: np.ndarray  # [seed], whether it sampled a large batch
    metrics: Mapping[str, np.ndarray]  # name: [seed], see docs/reference/metrics.md

    def rows(self) -> list[dict[str, Any]]:
        """One row for each seed that took part, with the columns of `Run.to_dataframe`."""
        return [
            {
                "seed": self.seeds[index],
                "iteration": int(self.iteration[index]),
                self.unit: int(self.progress[index]),
                "large": bool(self.large[index]),
                **{name: float(values[index]) for name, values in self.metrics.items()},
            }
            for index in np.flatnonzero(self.took_part)
        ]


OnIteration = Callable[[Report], None]


def reports(
    settings: Settings, timetable: Timetable, metrics: Mapping[str, np.ndarray], first: int = 0
) -> Iterator[Report]:
    """The reports of consecutive entries of a timetable.

    Args:
        settings: The settings of the run.
        timetable: Its timetable.
        metrics: By name, values [seed, entry], from the entry `first` on.
        first: The first entry.
    """
    number = next(iter(metrics.values())).shape[1]
    done = timetable.iterations(first)
    for entry in range(first, first + number):
        took_part = timetable.takes_part[:, entry]
        done = done + took_part
        ends = [*zip(timetable.plans, done, strict=True)]
        reached = [plan.progress[end - 1] if end else 0 for plan, end in ends]
        large = [plan.large[end - 1] and there for (plan, end), there in zip(ends, took_part, strict=True)]
        yield Report(
            number=entry,
            seeds=settings.seeds,
            took_part=took_part,
            iteration=done - 1,
            progress=np.asarray(reached),
            unit=settings.unit,
            large=np.asarray(large),
            metrics={name: np.where(took_part, values[:, entry - first], np.nan) for name, values in metrics.items()},
        )


def reports_of(run: Run) -> Iterator[Report]:
    """The reports of a run as it would be if no seed had to wait for another."""
    for iteration in range(run.progress.shape[1]):
        yield Report(
            number=iteration,
            seeds=run.settings.seeds,
            took_part=iteration < run.num_iterations,
            iteration=np.minimum(iteration, run.num_iterations - 1),
            progress=run.progress[:, iteration],
            unit=run.settings.unit,
            large=run.large[:, iteration],
            metrics={name: values[:, iteration] for name, values in run.metrics.items()},
        )


class Log:
    """A log in the directory of a run."""

    def __init__(self) -> None:
        self.written: dict[int, int] = {}  # iterations of each seed that the log holds

    def extend(self, reports: Iterable[Report]) -> None:
        """Write what the log lacks of these reports."""
        for report in reports:
            rows = [row for row in report.rows() if row["iteration"] >= self.written.get(row["seed"], 0)]
            if rows:
                self.write(rows, report)
                self.written |= {row["seed"]: row["iteration"] + 1 for row in rows}
        self.flush()

    @abstractmethod
    def write(self, rows: Sequence[Mapping[str, Any]], report: Report) -> None:
        """Write rows of a report."""

    @abstractmethod
    def flush(self) -> None:
        """Bring everything to the disk."""

    @abstractmethod
    def close(self) -> None: ...


def open_log(name: str, directory: Path, settings: Settings) -> Log:
    """Open a log for writing, a new one or one to continue.

    Args:
        name: jsonl (metrics.jsonl, one line per seed and iteration), tensorboard, or wandb (Weights & Biases).
        directory: The directory of the run.
        settings: Its settings.

    Raises:
        ValueError: There is no such kind of log, or a package is missing.
    """
    check_logs([name])
    kinds = {"jsonl": _JSONLines, "tensorboard": _TensorBoard, "wandb": _WeightsAndBiases}
    return kinds[name](directory, settings)


def check_logs(names: Sequence[str]) -> None:
    """Raise a ValueError if there is no such kind of log, or a package is missing."""
    if isinstance(names, str):
        raise ValueError(f"log must be a list: log = [{names!r}].")
    for name in names:
        if name not in get_args(LogName):
            raise ValueError(unknown("log", name, get_args(LogName)))
        if name in PACKAGES:
            try:
                import_module(PACKAGES[name])
            except ImportError:
                raise ValueError(f"the log {name} needs a package: {install(name)}.") from None


class _JSONLines(Log):
    """The file metrics.jsonl: one JSON object per seed and iteration, with null where a metric does not apply."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        super().__init__()
        self.file = (directory / "metrics.jsonl").open("a+b")
        self.file.seek(0)
        whole = 0
        for line in self.file:
            try:
                row = json.loads(line[: line.index(b"\n")])
                self.written[row["seed"]] = row["iteration"] + 1
            except (ValueError, KeyError, TypeError):
                break  # the process was killed while it wrote
            whole += len(line)
        self.file.truncate(whole)

    def write(self, rows: Sequence[Mapping[str, Any]], report: Report) -> None:
        self.file.write("".join(json.dumps(_jsonable(row)) + "\n" for row in rows).encode())

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _jsonable(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in row.items()}


class _Marked(Log):
    """A log that other programs keep; a file of ours beside it says how far it goes."""

    def __init__(self, directory: Path, folder: str) -> None:
        super().__init__()
        self.marker = directory / folder / "written.json"
        self.about: dict[str, Any] = json.loads(self.marker.read_text()) if self.marker.exists() else {}
        self.written |= {int(seed): number for seed, number in self.about.get("iterations", {}).items()}

    def flush(self) -> None:
        text = json.dumps(self.about | {"iterations": self.written}) + "\n"
        write_atomically(self.marker, lambda file: file.write(text.encode()))


class _TensorBoard(_Marked):
    """Event files in the folder tensorboard: a chart per metric, with a curve per seed over its progress."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        super().__init__(directory, "tensorboard")
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(directory / "tensorboard"))

    def write(self, rows: Sequence[Mapping[str, Any]], report: Report) -> None:
        for row in rows:
            for name in report.metrics:
                if isfinite(row[name]):
                    self.writer.add_scalar(f"{name}/seed_{row['seed']}", row[name], row[report.unit])

    def flush(self) -> None:
        self.writer.flush()
        super().flush()

    def close(self) -> None:
        self.writer.close()


class _WeightsAndBiases(_Marked):
    """A run of Weights & Biases, in the project that WANDB_PROJECT names, or byzpg."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        super().__init__(directory, "wandb")
        import wandb

        self.about = {"id": uuid4().hex, "steps": 0} | self.about
        self.marker.parent.mkdir(exist_ok=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "byzpg"),
            name=directory.resolve().name,
            dir=str(directory),
            id=self.about["id"],
            resume="allow",
            config=settings.as_data(),
            settings=wandb.Settings(console="off"),
        )

    def write(self, rows: Sequence[Mapping[str, Any]], report: Report) -> None:
        values: dict[str, Any] = {}
        for row in rows:
            named = {name: value for name, value in row.items() if name in (report.unit, *report.metrics)}
            values |= {f"{name}/seed_{row['seed']}": value for name, value in named.items() if isfinite(value)}
        self.run.log(values, step=self.about["steps"])
        self.about["steps"] += 1

    def close(self) -> None:
        self.run.finish()
