"""The results of experiments in one small file, which holds what figures and tables need.

The file is an .npz without pickles. It holds `about`, a JSON text (the experiments, the settings of every run, the
provenance), and arrays named `RUN/METRIC`. Runs are reduced to cells of trajectories, so that dozens of them fit into a
repository.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from byzpg import _parts
from byzpg._files import write_atomically
from byzpg.config import Config, Settings
from byzpg.experiments.paper import Cell, Experiment, Grid, Panel, texts
from byzpg.experiments.statistics import even_grid, smooth_on_grid
from byzpg.runs import Run

NUM_CELLS = 160
# The metrics that are kept.
KEPT = ("return_mean", "byzantine_weight", "diameter_before", "diameter_after")
FORMAT = 1
OWN_RUNS = "runs"  # the name of the experiment that a user's own runs are
# What the labels in files of byzpg 0.1 had in addition.
OLD_WORD = " declared"
# What `Result.progress` is called in files of byzpg 0.2.
OLD_PROGRESS = "trajectories"


@dataclass(frozen=True, eq=False)
class Result:
    """A run on even cells of trajectories or, with a critic, of steps; see `statistics.smooth_on_grid`."""

    settings: Settings
    progress: np.ndarray  # [cell], trajectories or steps per agent, at the end of the cell
    metrics: Mapping[str, np.ndarray]  # the metrics of KEPT that the run has: [seed, cell]

    @property
    def returns(self) -> np.ndarray:
        """Mean undiscounted training return of the honest agents [seed, cell]."""
        return self.metrics["return_mean"]

    @classmethod
    def of(cls, run: Run) -> "Result":
        """Reduce a run, complete or not, to at most NUM_CELLS cells."""
        grid = even_grid(run.progress, NUM_CELLS)
        metrics = {"return_mean": smooth_on_grid(run.progress, run.returns, grid)}
        for name in KEPT:
            values = run.metrics.get(name)
            if name != "return_mean" and values is not None and np.any(np.isfinite(values)):
                metrics[name] = np.stack(
                    [_spread(*of_seed, grid) for of_seed in zip(run.progress, values, strict=True)]
                )
        return cls(run.settings, grid, {name: values.astype(np.float32) for name, values in metrics.items()})


def _spread(progress: np.ndarray, values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The metric of one seed [cell]. Iterations that lack it (small batches, a diverged seed) use their neighbours'."""
    known = np.isfinite(values)
    if not np.any(known):
        return np.full(len(grid), np.nan)
    sizes = np.diff(progress, prepend=0)[known]
    return smooth_on_grid(np.cumsum(sizes) * progress[-1] / sizes.sum(), values[None, known], grid)[0]


@dataclass(frozen=True, eq=False)
class Results:
    """Experiments and the results of their runs."""

    experiments: tuple[Experiment, ...]
    runs: Mapping[str, Result]
    provenance: Mapping[str, Any]

    @classmethod
    def of(cls, grid: Grid, runs: Mapping[str, Run], provenance: Mapping[str, Any]) -> "Results":
        """Collect the runs of a grid."""
        return cls(grid.experiments, {name: Result.of(run) for name, run in runs.items()}, provenance)

    def save(self, path: Path) -> None:
        """Write everything to one .npz file."""
        about = {
            "experiments": [asdict(experiment) for experiment in self.experiments],
            "settings": {name: result.settings.as_data() for name, result in self.runs.items()},
            "provenance": self.provenance,
        }
        arrays: dict[str, np.ndarray] = {}
        for name, result in self.runs.items():
            arrays |= {f"{name}/{metric}": values for metric, values in result.metrics.items()}
            arrays[f"{name}/progress"] = result.progress
        write_archive(path, FORMAT, about, arrays)

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read what `save` wrote.

        Raises:
            ValueError: If the file is missing, broken, or not such a file.
        """
        with reading_archive(path, FORMAT, "byzpg reproduce") as (about, arrays):
            runs = {}
            for name, values in about["settings"].items():
                config = Config.of(values, f"{path}, {name}")
                _parts.check_trusted(config.own_modules, str(path))
                settings = config.resolved()
                metrics = {metric: arrays[f"{name}/{metric}"] for metric in KEPT if f"{name}/{metric}" in arrays}
                progress = OLD_PROGRESS if f"{name}/{OLD_PROGRESS}" in arrays else "progress"
                runs[name] = Result(settings, arrays[f"{name}/{progress}"], metrics)
            experiments = tuple(_experiment(data) for data in about["experiments"])
            return cls(experiments, runs, about["provenance"])


def joined(runs: Sequence[Run]) -> Run:
    """Runs that differ in their seeds alone as one run with all of them."""
    if len(runs) == 1:
        return runs[0]
    width = max(run.progress.shape[1] for run in runs)

    def rows(values: Sequence[np.ndarray], **padding: Any) -> np.ndarray:
        return np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1])), **padding) for each in values])

    first, nan = runs[0], {"constant_values": np.nan}
    return replace(
        first,
        settings=replace(first.settings, num_seeds=sum(run.settings.num_seeds for run in runs)),
        progress=rows([run.progress for run in runs], mode="edge"),
        large=rows([run.large for run in runs]),
        metrics={name: rows([run.metrics[name] for run in runs], **nan) for name in first.metrics},
        parameters={name: np.concatenate([run.parameters[name] for run in runs]) for name in first.parameters},
        output_iteration=np.concatenate([run.output_iteration for run in runs]),
        complete=all(run.complete for run in runs),
    )


def results_of_runs(runs: Mapping[str, Run], made_by: Sequence[Mapping[str, Any]]) -> list[Results]:
    """Runs by label as experiments, one for each preset, with a panel for each task and unit of progress."""
    found = []
    for preset in dict.fromkeys(run.settings.preset for run in runs.values()):
        of_preset = {label: run for label, run in runs.items() if run.settings.preset == preset}
        panels: dict[tuple[str, str], list[Cell]] = {}
        for label, run in of_preset.items():
            panels.setdefault((run.settings.env, run.settings.unit), []).append(Cell(label, label))
        mixed = len({task for task, _ in panels}) < len(panels)
        drawn = tuple(
            Panel(f"{task}, {unit}" if mixed else task, task, tuple(cells)) for (task, unit), cells in panels.items()
        )
        experiment = Experiment(OWN_RUNS, "Runs", "How do these runs compare?", "curves", drawn)
        found.append(Results.of(Grid((experiment,), {}), of_preset, {"runs": made_by}))
    return found


def _experiment(data: dict[str, Any]) -> Experiment:
    panels = [
        Panel(
            panel["title"],
            panel["task"],
            tuple(Cell(**{**cell, "label": cell["label"].removesuffix(OLD_WORD)}) for cell in panel["cells"]),
            tuple(panel["published"]) if panel["published"] else None,  # pyright: ignore[reportArgumentType]
            panel.get("level"),
        )
        for panel in data["panels"]
    ]
    # An older version may have worded them in another way.
    title, question = texts(data["name"]) or (data["title"], data["question"])
    return Experiment(data["name"], title, question, data["kind"], tuple(panels))


def write_archive(path: Path, version: int, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, and `about` with the version of its format as a JSON text, to one .npz file."""
    text = np.asarray(json.dumps({"format": version, **about}, ensure_ascii=False))
    everything: dict[str, Any] = {"about": text, **arrays}
    write_atomically(path, lambda file: np.savez_compressed(file, allow_pickle=False, **everything))


@contextmanager
def reading_archive(path: Path, version: int, command: str) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yield `about` and the arrays of `write_archive`. Whatever fails at a broken file becomes one clear error.

    Raises:
        ValueError: If the file is missing, broken, or not of this version; the error names the command that writes it.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = dict(stored)
        about = json.loads(str(arrays.pop("about")))
        if about.get("format") != version:
            raise ValueError(f"it is in format {about.get('format')}, and this version of byzpg reads {version}.")
        yield about, arrays
    except (OSError, ValueError, KeyError, TypeError, AttributeError, BadZipFile, EOFError) as error:
        raise ValueError(f"{path} cannot be read as results of `{command}`: {error}") from None
