"""Finished experiments in one small file: all that pictures and tables need, and no more.

The file is an .npz without pickles: `about`, a JSON text (experiments, settings of every run, provenance), and arrays
`RUN/NAME`. Runs are reduced to cells of trajectories, so that dozens of them fit into a repository.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from byzpg._files import write_atomically
from byzpg.config import Config, Settings
from byzpg.experiments.paper import Cell, Experiment, Grid, Panel
from byzpg.experiments.statistics import even_grid, smooth_on_grid
from byzpg.runs import Run

NUM_CELLS = 160
KEPT = ("return_mean", "byzantine_weight", "diameter_before", "diameter_after")
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Result:
    """A finished run on even cells of trajectories, as `statistics.smooth_on_grid` has them."""

    settings: Settings
    trajectories: np.ndarray  # [cell], where it ends, per agent
    metrics: Mapping[str, np.ndarray]  # those of KEPT that the run has: [seed, cell]

    @property
    def returns(self) -> np.ndarray:
        """Mean undiscounted training return of the honest agents [seed, cell]."""
        return self.metrics["return_mean"]

    @classmethod
    def of(cls, run: Run) -> "Result":
        grid = even_grid(run.trajectories, NUM_CELLS)
        metrics = {"return_mean": smooth_on_grid(run.trajectories, run.returns, grid)}
        for name in KEPT:
            if name != "return_mean" and np.any(np.isfinite(run.metrics[name])):
                metrics[name] = np.stack([_spread(run.trajectories, values, grid) for values in run.metrics[name]])
        return cls(run.settings, grid, {name: values.astype(np.float32) for name, values in metrics.items()})


def _spread(trajectories: np.ndarray, values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """One seed's metric [cell]; where only large batches have it, or a diverged seed none, over the cells between."""
    known = np.isfinite(values)
    if not np.any(known):
        return np.full(len(grid), np.nan)
    sizes = np.diff(trajectories, prepend=0)[known]
    return smooth_on_grid(np.cumsum(sizes) * trajectories[-1] / sizes.sum(), values[None, known], grid)[0]


@dataclass(frozen=True, eq=False)
class Results:
    """Experiments, and what came of their runs."""

    experiments: tuple[Experiment, ...]
    runs: Mapping[str, Result]
    provenance: Mapping[str, Any]

    @classmethod
    def of(cls, grid: Grid, runs: Mapping[str, Run], provenance: Mapping[str, Any]) -> "Results":
        return cls(grid.experiments, {name: Result.of(run) for name, run in runs.items()}, provenance)

    def save(self, path: Path) -> None:
        about = {
            "format": FORMAT,
            "experiments": [asdict(experiment) for experiment in self.experiments],
            "settings": {name: result.settings.as_data() for name, result in self.runs.items()},
            "provenance": self.provenance,
        }
        arrays = {"about": np.asarray(json.dumps(about, ensure_ascii=False))}
        for name, result in self.runs.items():
            arrays |= {f"{name}/{metric}": values for metric, values in result.metrics.items()}
            arrays[f"{name}/trajectories"] = result.trajectories
        write_atomically(path, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))

    @classmethod
    def load(cls, path: Path) -> "Results":
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = dict(stored)
            about = json.loads(str(arrays.pop("about")))
            if about.get("format") != FORMAT:
                raise ValueError(f"it is in format {about.get('format')}, and this version of byzpg reads {FORMAT}.")
            runs = {}
            for name, values in about["settings"].items():
                settings = Config.of(values, f"{path}, {name}").resolved()
                metrics = {metric: arrays[f"{name}/{metric}"] for metric in KEPT if f"{name}/{metric}" in arrays}
                runs[name] = Result(settings, arrays[f"{name}/trajectories"], metrics)
            return cls(tuple(map(_experiment, about["experiments"])), runs, about["provenance"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, BadZipFile, EOFError) as error:
            raise ValueError(f"{path} cannot be read as results of `byzpg reproduce`: {error}") from None


def _experiment(data: dict[str, Any]) -> Experiment:
    panels = [
        Panel(
            panel["title"],
            panel["task"],
            tuple(Cell(**cell) for cell in panel["cells"]),
            tuple(panel["published"]) if panel["published"] else None,  # pyright: ignore[reportArgumentType]
        )
        for panel in data["panels"]
    ]
    return Experiment(data["name"], data["title"], data["question"], data["kind"], tuple(panels))
